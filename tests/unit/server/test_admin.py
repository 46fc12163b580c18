"""Information, load, and the log."""

from __future__ import annotations

import logging
import os

import pytest

from hiserve.errors import EngineError
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import WorkerStats
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import REPLY, Server, make_server

CRASH = Crash(0, 1, 4243, "exit code 71", "CUDA error: gone", "engine_error", 1.0, 12, [4, 5])


async def test_server_info_shows_processes_configuration_and_counters(server: Server) -> None:
    server.engine.stats = WorkerStats(free_pages=60, evictable_pages=40)
    info = (await server.get("/server_info")).json
    assert info["version"]
    assert info["config"]["cache"]["page_size"] == 16
    assert any(line.startswith("--kv-pages auto -> ") for line in info["decisions"])
    assert info["startup_s"]["api"]["tokenizer"] == 0.1
    assert info["startup_s"]["worker 0"] == {"load": 0.5}
    workers = [{"replica": 0, "pid": 4243, "incarnation": 1}]
    assert info["processes"] == {"api": os.getpid(), "scheduler": 4242, "workers": workers}
    (worker,) = info["workers"]
    assert worker["stats"]["free_pages"] + worker["stats"]["evictable_pages"] == worker["num_pages"]


async def test_server_info_of_an_engine_that_does_not_answer_is_its_last_known_state_and_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiserve.server.management.admin.INFO_TIMEOUT_S", 0.01)
    server.engine.stats, server.engine.queued = WorkerStats(running=4), 3
    fresh = (await server.get("/server_info")).json
    assert fresh["engine_error"] is None and fresh["state_age_s"] < 60
    server.engine.hangs, server.engine.stats, server.engine.queued = True, WorkerStats(running=9), 8
    call = await server.get("/server_info")
    assert call.status == 200
    info = call.json
    assert "did not answer" in info["engine_error"]
    assert (info["num_queued"], info["workers"][0]["stats"]["running"]) == (3, 4)
    assert info["state_age_s"] >= fresh["state_age_s"]


async def test_server_info_of_an_engine_that_never_answered_has_the_workers_it_began_with(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiserve.server.management.admin.INFO_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    info = (await server.get("/server_info")).json
    assert [worker["pid"] for worker in info["workers"]] == [4243]
    assert info["state_age_s"] is None


async def test_server_info_explains_an_outage_with_the_crash_before_it(server: Server) -> None:
    server.engine.crash = CRASH
    server.engine.die("the scheduler process died (killed by SIGKILL).")
    info = (await server.get("/server_info")).json
    assert "killed by SIGKILL" in info["not_ready_because"]
    assert (info["crash"]["end"], info["crash"]["uids"]) == ("exit code 71", [4, 5])
    server.handle._take_over(FakeEngineClient(lambda prompt: []))
    assert (await server.get("/server_info")).json["crash"] == info["crash"], "the next engine knows nothing of it"


async def test_server_info_before_the_engine_has_started() -> None:
    server = make_server(FakeEngineClient(script=lambda prompt: []))
    info = (await server.get("/server_info")).json
    assert info["not_ready_because"] == "the model is loading"
    assert info["processes"] == {"api": os.getpid(), "scheduler": None, "workers": []}
    assert (await server.get("/v1/models")).status == 200
    assert (await server.get("/metrics")).status == 200


async def test_each_request_is_one_log_line_without_its_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hiserve")
    await server.chat("a very secret prompt")
    await server.chat("a very secret prompt", stream=True)
    server.engine.fail_at, server.engine.failure = 1, EngineError("broke.")
    await server.chat("a very secret prompt")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("hiserve")]
    assert len(lines) == 3
    assert [line.split()[1].rstrip(":") for line in lines] == ["stop", "stop", "error"]
    assert "secret" not in "".join(lines)
    assert REPLY not in "".join(lines)
