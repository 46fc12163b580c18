"""The command's own work: the port, signals, draining. The engine is a fake; sockets and HTTP are real."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from hiserve.commands import serve
from hiserve.config.options import make_options
from hiserve.errors import EngineError, ResourceError
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.running import Running
from tests.helpers.waiting import PATIENCE_S, until
from tests.unit.server.conftest import make_server, reply_script


def test_a_port_in_use_is_one_clear_error() -> None:
    with serve.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            serve.bind("127.0.0.1", port)
        assert caught.value.param == "port"


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_had_is_one_clear_error(host: str, port: int) -> None:
    with pytest.raises(ResourceError, match="cannot listen"):
        serve.bind(host, port)


def test_the_url_shows_the_real_port() -> None:
    with serve.bind("127.0.0.1", 0) as listener:
        assert serve.url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with serve.bind("::1", 0) as listener:
        assert serve.url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("host", "settings", "is_warned"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("0.0.0.0", {"api_key": "k"}, False),
        ("0.0.0.0", {"admin_api_key": "k"}, True),
        ("127.0.0.1", {}, False),
        ("127.9.9.9", {}, False),
        ("::1", {}, False),
    ],
)
def test_an_open_server_is_warned_about(
    caplog: pytest.LogCaptureFixture, host: str, settings: dict[str, Any], is_warned: bool
) -> None:
    with serve.bind(host, 0) as listener:
        serve.warn_if_open(listener, make_options(**settings).server)
    assert ("without --api-key" in caplog.text) == is_warned


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    made = Running(make_server(FakeEngineClient(script=lambda prompt: reply_script())))
    yield made
    await made.stop()


async def test_it_says_where_it_listens_once_the_model_is_ready(running: Running, capsys: Any) -> None:
    await running.ready()
    assert capsys.readouterr().out == f"listening on {serve.url_of(running.listener)}\n"


async def test_sigterm_lets_open_streams_finish_and_refuses_new_ones(running: Running) -> None:
    await running.ready()
    stream = await running.open_stream()
    os.kill(os.getpid(), signal.SIGTERM)
    while (ready := await running.client.get("/ready")).status_code == 200:
        await asyncio.sleep(0.01)
    assert "shutting down" in ready.json()["error"]["message"]
    refused = await running.client.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert running.server.engine.stopped == 0
    running.hold.set()
    assert (await asyncio.wait_for(stream, PATIENCE_S)).endswith("data: [DONE]\n\n")
    assert await asyncio.wait_for(running.task, PATIENCE_S) == 0
    assert running.server.engine.stopped == 1


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
async def test_sigint_or_a_second_sigterm_stops_at_once(
    running: Running, signals: list[signal.Signals], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await running.ready()
    stream = await running.open_stream()

    async def stop(drain_s: float = 0.0, copy_s: float = 0.0) -> None:  # a stopped engine ends its streams
        running.server.engine.failure = EngineError("stopped.")
        running.server.engine.fail_at = 1
        running.hold.set()

    running.server.engine.stop = stop  # type: ignore[method-assign]
    for number in signals:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)
    assert '"code":"engine_error"' in await asyncio.wait_for(stream, PATIENCE_S)
    assert await asyncio.wait_for(running.task, PATIENCE_S) == 0
    first = "stopping: open requests end now" if signals[0] is signal.SIGINT else "draining: open requests have"
    assert [record.getMessage().startswith(first) for record in caplog.records if record.name == serve.__name__] == [
        True
    ]


async def test_a_drain_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "CLOSE_S", 1)
    running = Running(make_server(FakeEngineClient(script=lambda prompt: reply_script())), drain_timeout_s=0.05)
    await running.ready()
    stream = await running.open_stream()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: running.server.engine.stopped)
    running.hold.set()
    await asyncio.wait_for(stream, PATIENCE_S)
    assert await asyncio.wait_for(running.task, PATIENCE_S) == 0
    await running.client.aclose()
    running.listener.close()


async def test_health_answers_while_the_model_loads_and_a_signal_ends_the_loading(capsys: Any) -> None:
    is_cancelled = asyncio.Event()

    async def start() -> FakeEngineClient:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise AssertionError

    running = Running(make_server(FakeEngineClient(script=lambda prompt: []), start))
    try:
        while True:
            try:
                assert (await running.client.get("/health")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
        assert (await running.client.get("/ready")).status_code == 503
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running.task, PATIENCE_S) == 0
        assert is_cancelled.is_set()
        assert "listening" not in capsys.readouterr().out
    finally:
        await running.client.aclose()
        running.listener.close()


async def test_an_engine_that_does_not_start_ends_the_command_with_its_error() -> None:
    async def start() -> FakeEngineClient:
        raise EngineError("no memory.")

    running = Running(make_server(FakeEngineClient(script=lambda prompt: []), start))
    with pytest.raises(EngineError, match="no memory"):
        await asyncio.wait_for(running.task, PATIENCE_S)
    await running.client.aclose()
    running.listener.close()


async def test_a_closed_socket_aborts_over_real_tcp(running: Running) -> None:
    await running.ready()
    for is_stream in (True, False):
        running.hold.clear()

        async def step(index: int) -> None:
            if index == 1:
                await running.hold.wait()

        running.server.engine.step = step
        running.server.engine.seen.clear()
        host, port = running.listener.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        body = b'{"messages":[{"role":"user","content":"Hi"}],"stream":%s}' % str(is_stream).lower().encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        if is_stream:
            await asyncio.wait_for(reader.readuntil(b"assistant"), PATIENCE_S)
        await until(lambda: running.server.engine.seen)
        writer.close()
        await writer.wait_closed()
        await until(lambda: running.server.engine.seen[0].aborted)
