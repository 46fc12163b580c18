"""Clients that are broken or mean no good, over real sockets: each gets one clear answer, and none stays."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hiserve.commands import serve
from hiserve.server.http import connection
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.running import Running
from tests.helpers.waiting import PATIENCE_S, until
from tests.unit.server.conftest import make_server, reply_script

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"prompt":"Hi","max_tokens":4}'
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest_asyncio.fixture
async def running(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    caplog.set_level(logging.CRITICAL, logger="uvicorn.error")
    monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)  # clients of this process may come late to read
    made = Running(make_server(FakeEngineClient(script=lambda prompt: reply_script()), max_request_bytes=1000))
    await made.ready()
    yield made
    await made.stop()


def parse(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Splits one response; fails if there is another behind it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"]), answer
    return int(status.split()[1]), headers, json.loads(body)


def assert_refused(answer: bytes, status: int, code: str) -> None:
    got, headers, body = parse(answer)
    assert (got, body["error"]["code"]) == (status, code)
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]


BAD_HTTP = [
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    b"CONNECT x HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    HEAD + b"transfer-encoding: chunked\r\n\r\nnot a length\r\n",
]


@pytest.mark.parametrize("raw", BAD_HTTP, ids=range(len(BAD_HTTP)))
async def test_what_is_not_http_is_a_400_in_our_shape(running: Running, raw: bytes) -> None:
    assert_refused(await running.say(raw), 400, "invalid_http")
    assert (await running.client.get("/health")).status_code == 200


HUGE_HEADS = {
    "one header": b"GET / HTTP/1.1\r\nx: " + b"a" * 2_000_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"x: aaaaaaaaaa\r\n" * 100_000,
    "an address": b"GET /" + b"a" * 2_000_000,
    "complete": b"GET / HTTP/1.1\r\nx: " + b"a" * 66_000 + b"\r\n\r\n",
    "trailers": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: aaaaaaaaaa\r\n" * 100_000,
    "chunk extensions": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1;" + b"a" * 2_000_000,
}


@pytest.mark.parametrize("kind", HUGE_HEADS)
async def test_a_head_without_end_is_a_431(running: Running, kind: str) -> None:
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    raw, answer = HUGE_HEADS[kind], b""
    try:
        for start in range(0, len(raw), 10_000):  # stop when the answer is there, as a client does
            writer.write(raw[start : start + 10_000])
            await asyncio.sleep(0)
            await writer.drain()
            if reader._buffer:  # type: ignore[attr-defined]
                break
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        answer = answer or bytes(reader._buffer)  # type: ignore[attr-defined]
    finally:
        writer.close()
    assert_refused(answer, 431, "headers_too_large")
    assert running.server.engine.seen == []


async def test_a_large_head_within_the_limit_is_served(running: Running) -> None:
    assert (await running.client.get("/health", headers={"x": "a" * 60_000})).status_code == 200


async def test_trailers_are_not_headers(running: Running) -> None:
    chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    raw = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunk + b"0\r\nx-request-id: t\r\n\r\n"
    answer = await running.say(raw)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"x-request-id: t\r\n" not in answer


async def test_a_large_body_is_a_413_that_the_client_can_read(running: Running) -> None:
    """Also one that is many times what the sockets buffer."""
    answer = await running.client.post("/v1/completions", content=b"x" * 20_000_000)
    assert answer.status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 100_000

    answer = await running.client.post("/v1/completions", content=chunks())
    assert answer.status_code == 413
    assert (await running.client.post("/v1/completions", content=BODY)).status_code == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_reply_before_the_end_of_a_request_is_readable_though_the_connection_ends(
    running: Running, version: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    head = b"POST /v1/completions HTTP/%b\r\nconnection: close\r\ncontent-length: 5000000\r\n\r\n" % version
    writer.write(head + b"x" * 2000)
    await asyncio.sleep(0.2)
    for _ in range(20):  # a connection that was closed would be reset here
        writer.write(b"x" * 1000)
        await asyncio.sleep(0.005)
    status, headers, body = parse(await asyncio.wait_for(reader.read(), PATIENCE_S))
    assert (status, headers["connection"], body["error"]["code"]) == (413, "close", "request_too_large")
    writer.close()


async def test_a_refusal_ends_the_request_before_it(running: Running) -> None:
    async def hang(_: int) -> None:
        await asyncio.Event().wait()

    running.server.engine.step = hang
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    writer.write(GOOD)
    await until(lambda: running.server.engine.seen)
    writer.write(b"garbage\r\n\r\n")
    assert_refused(await asyncio.wait_for(reader.read(), PATIENCE_S), 400, "invalid_http")
    await until(lambda: not running.server.engine.num_inflight)
    writer.close()


@pytest.mark.parametrize("raw", [b"", b"GET /hea", HEAD, HEAD + b"content-length: 10\r\n\r\n12345"], ids=range(4))
async def test_a_request_that_does_not_arrive_is_a_408(
    running: Running, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.1)
    assert_refused(await running.say(raw), 408, "request_timeout")


async def test_a_drip_of_header_bytes_does_not_keep_a_connection(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())

    async def drip() -> None:
        for byte in itertools.chain(b"GET ", itertools.repeat(ord("/"))):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(drip())
    assert_refused(await asyncio.wait_for(reader.read(), PATIENCE_S), 408, "request_timeout")
    task.cancel()
    writer.close()


async def test_a_reply_that_takes_longer_than_a_request_may_is_not_cut(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)

    async def step(_: int) -> None:
        await asyncio.sleep(0.02)

    running.server.engine.step = step
    peer = socket.create_connection(running.listener.getsockname())
    peer.sendall(GOOD)  # it is there before the server looks: it cannot be late
    reader, writer = await asyncio.open_connection(sock=peer)
    for is_last in (False, True):  # the second request comes over the same connection, after a pause
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        await asyncio.sleep(0.1)
        if not is_last:
            writer.write(GOOD)
    writer.close()


async def test_a_client_that_stops_reading_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PEER_TIMEOUT_S", 1)
    monkeypatch.setattr(serve, "KEEP_IDLE_S", 1)
    engine = FakeEngineClient(script=lambda prompt: [[100] * 10] * 200_000)
    running = Running(make_server(engine))
    await running.ready()
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(running.listener.getsockname())
    body = b'{"prompt":"Hi","stream":true}'
    peer.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: engine.seen and engine.seen[0].aborted)
    peer.close()
    await running.stop()


async def test_a_client_that_closes_its_half_ends_its_request(running: Running) -> None:
    async def hang(_: int) -> None:
        await asyncio.Event().wait()

    running.server.engine.step = hang
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    writer.write(GOOD)
    await until(lambda: running.server.engine.seen)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    await until(lambda: running.server.engine.seen[0].aborted)
    writer.close()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"made-up"])
@pytest.mark.parametrize("is_split", [False, True])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_served(
    running: Running, protocol: bytes, is_split: bool
) -> None:
    head = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAMAAABk\r\n" % protocol
    first, last = (
        head + b"content-length: %d\r\n\r\n" % len(BODY),
        BODY + GOOD.replace(b"host: x", b"connection: close"),
    )
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    writer.write(first)
    if is_split:
        await asyncio.sleep(0.05)
    writer.write(last)
    answers = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    assert answers.count(b"HTTP/1.1 200") == 2
    assert [seen.sampling.max_tokens for seen in running.server.engine.seen] == [4, 4]


async def test_an_offer_is_declined_in_the_last_request_too(running: Running) -> None:
    raw = HEAD + b"connection: close, Upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    assert (await running.say(raw)).startswith(b"HTTP/1.1 200")


async def test_many_offers_in_one_segment_are_all_declined(running: Running) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    assert (await running.say(1500 * one + last)).count(b"HTTP/1.1 200") == 1501


@pytest.mark.parametrize("target", [b"/v1/completions", b"x:80", b"http://x/"])
async def test_a_tunnel_is_refused(running: Running, target: bytes) -> None:
    assert_refused(await running.say(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target), 400, "invalid_http")


@pytest.mark.parametrize("ending", ["write_eof", "close"])
async def test_a_client_that_leaves_ends_a_request_that_others_wait_behind(running: Running, ending: str) -> None:
    async def hang(_: int) -> None:
        await asyncio.Event().wait()

    running.server.engine.step = hang
    _, writer = await asyncio.open_connection(*running.listener.getsockname())
    writer.write(GOOD + GOOD)
    await until(lambda: running.server.engine.seen)
    getattr(writer, ending)()
    await until(lambda: running.server.engine.seen[0].aborted)
    assert len(running.server.engine.seen) == 1
    writer.close()
