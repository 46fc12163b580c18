"""Alive, able to serve, making progress: three separate signals."""

from __future__ import annotations

import asyncio

import pytest

from hiserve.core.request import FinishReason
from hiserve.errors import EngineError, OverloadedError
from hiserve.ipc.messages import WorkerStats
from hiserve.server.management import health
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.waiting import PATIENCE_S, until
from tests.unit.server.conftest import Server, make_server


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_says_ok_whatever_the_engine_does(server: Server, path: str) -> None:
    server.engine.hangs, server.engine.is_ready = True, False
    assert (await server.get(path)).json == {"status": "ok"}
    assert (await server.call("HEAD", path).end()).status == 200


@pytest.mark.parametrize("key", [None, "alpha"])
async def test_ready_shows_no_words_of_an_error_where_there_are_keys(key: str | None) -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), api_key=("alpha",), admin_api_key="root")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        made.engine.is_ready, made.engine.trouble = False, "no worker is left: CUDA error at /home/me/secret.py"
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        call = await made.call("GET", "/ready", **headers).end()
        assert (call.status, call.json["error"]["message"]) == (503, "no worker is left")


async def test_ready_says_all_where_there_are_no_keys(server: Server) -> None:
    server.engine.is_ready, server.engine.trouble = False, "no worker is left: worker 0 died."
    assert (await server.get("/ready")).json["error"]["message"] == "no worker is left: worker 0 died."


async def test_an_idle_engine_proves_itself_with_one_token(server: Server) -> None:
    server.engine.finish = FinishReason.LENGTH
    server.engine.script = lambda prompt: [[1]]
    assert (await server.get("/health_generate")).json == {"status": "ok"}
    (seen,) = server.engine.seen
    assert seen.finished
    assert seen.sampling.max_tokens == 1
    assert seen.namespace != b""
    assert await server.metric("hiserve:prompt_tokens_total") == 0
    assert await server.metric("hiserve:e2e_request_latency_seconds_count") == 0


async def hang(_: int) -> None:
    await asyncio.Event().wait()


async def test_a_busy_engine_proves_itself_with_a_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_PERIOD_S", 0.01)
    server.engine.step = hang
    call = server.call("GET", "/health_generate")
    await until(lambda: server.engine.num_asked >= 2)  # the first answer is what the others are compared with
    server.engine.stats = WorkerStats(steps=1)
    assert (await call.end()).status == 200
    assert server.engine.seen[0].aborted


@pytest.mark.parametrize("is_silent", [False, True])
async def test_an_engine_that_stands_still_is_a_503_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.05)
    server.engine.step, server.engine.hangs = hang, is_silent
    call = await asyncio.wait_for(server.get("/health_generate"), PATIENCE_S)
    assert call.status == 503
    assert server.engine.num_inflight == 0


async def test_a_full_queue_is_no_proof_of_illness(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_PERIOD_S", 0.01)
    server.engine.fail_at, server.engine.failure = 0, OverloadedError("full.")
    call = server.call("GET", "/health_generate")
    await until(lambda: server.engine.num_asked >= 2)  # the first answer is what the others are compared with
    server.engine.stats = WorkerStats(steps=1)
    assert (await call.end()).status == 200


async def test_a_probe_that_fails_is_told(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 0, EngineError("broke.")
    assert (await server.get("/health_generate")).status == 500


async def test_a_probe_ends_with_its_client(server: Server) -> None:
    server.engine.step = hang
    call = server.call("GET", "/health_generate")
    while not server.engine.seen:
        await asyncio.sleep(0.001)
    call.disconnect()
    await call.end()
    assert server.engine.seen[0].aborted
