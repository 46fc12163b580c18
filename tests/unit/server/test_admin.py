"""Information, load, and the log."""

from __future__ import annotations

import logging
import os

import pytest

from hiserve.errors import EngineError
from hiserve.messages.types import WorkerStats
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import REPLY, Server, make_server


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


async def test_server_info_of_an_engine_that_does_not_answer_is_a_503(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiserve.server.admin.STATUS_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    call = await server.get("/server_info")
    assert call.status == 503
    assert "did not answer" in call.json["error"]["message"]


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
