"""The HTTP client: framing, connections that last or break, and errors that say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hiserve.bench import http
from hiserve.bench.http import Pool
from hiserve.errors import ConfigError, UnavailableError
from tests.helpers.fake_server import Asked, FakeServer, Out


@pytest.fixture(autouse=True)
def kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is used again however long a busy machine takes from one request to the next."""
    monkeypatch.setattr(http, "MAX_IDLE_S", 3600.0)


async def whole(asked: Asked, out: Out) -> None:
    await out.json(200, {"got": asked.body})


async def chunked(_: Asked, out: Out) -> None:
    await out.begin()
    await out.part(b"one ")
    await asyncio.sleep(0.05)
    await out.raw(b"3\r\nt")
    await asyncio.sleep(0.01)
    await out.raw(b"wo\r\n0\r\n\r\n")


async def until_close(_: Asked, out: Out) -> None:
    await out.raw(b"HTTP/1.0 200 OK\r\n\r\nall of ")
    await asyncio.sleep(0.01)
    await out.raw(b"it")
    await out.drop()


async def last_on_this_connection(_: Asked, out: Out) -> None:
    await out.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
    await out.drop()


async def interim(_: Asked, out: Out) -> None:
    await out.raw(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    await out.json(201, b"ok")


async def long(_: Asked, out: Out) -> None:
    await out.json(200, b"x" * 60_000)


async def dropped(_: Asked, out: Out) -> None:
    await out.begin()
    await out.part(b"some")
    await out.drop()


async def silent_drop(_: Asked, out: Out) -> None:
    await out.drop()


async def garbage(_: Asked, out: Out) -> None:
    await out.raw(b"220 mail.example ESMTP\r\n\r\n")


ROUTES = {
    "/whole": whole,
    "/chunked": chunked,
    "/until_close": until_close,
    "/last": last_on_this_connection,
    "/interim": interim,
    "/long": long,
    "/dropped": dropped,
    "/silent_drop": silent_drop,
    "/garbage": garbage,
}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(dict(ROUTES)) as made:
        yield made


class Body:
    """Collects what arrives, and when."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.times: list[float] = []

    def __call__(self, status: int, part: bytes, now: float) -> None:
        self.parts.append(part)
        self.times.append(now)

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/whole", 200, '{"got": {"a": 1}}'),
        ("/chunked", 200, "one two"),
        ("/until_close", 200, "all of it"),
        ("/last", 200, "ok"),
        ("/interim", 201, "ok"),
        ("/nowhere", 404, '{"error": {"message": "there is no route /nowhere"}}'),
    ],
)
async def test_each_framing_is_read_to_its_end(server: FakeServer, path: str, status: int, text: str) -> None:
    pool, body = Pool(server.url), Body()
    assert await pool.request("POST", path, b'{"a": 1}', body) == status
    assert body.text == text
    pool.close()


async def test_the_time_of_each_part_is_when_it_arrived(server: FakeServer) -> None:
    pool, body, said_s = Pool(server.url), Body(), [time.perf_counter()]

    async def in_turns(_: Asked, out: Out) -> None:
        await out.begin()
        for number in range(1, 4):
            await out.part(b"part")
            while len(body.parts) < number:
                await asyncio.sleep(0.001)
            said_s.append(time.perf_counter())
        await out.raw(b"0\r\n\r\n")

    server.routes["/in_turns"] = in_turns
    await pool.request("POST", "/in_turns", b"", body)
    moments = [said_s[0], *(moment for each in zip(body.times[:3], said_s[1:], strict=True) for moment in each)]
    assert moments == sorted(moments)
    pool.close()


async def test_a_connection_is_used_again(server: FakeServer) -> None:
    pool = Pool(server.url)
    for _ in range(3):
        assert (await pool.ask("POST", "/whole", {"n": 1}))[1] == {"got": {"n": 1}}
    assert [asked.connection for asked in server.asked] == [1, 1, 1]
    pool.close()


async def test_requests_at_once_have_connections_of_their_own(server: FakeServer) -> None:
    pool = Pool(server.url)
    await asyncio.gather(*(pool.request("POST", "/chunked", b"", Body()) for _ in range(3)))
    assert server.most_open == 3
    await asyncio.gather(*(pool.request("POST", "/chunked", b"", Body()) for _ in range(3)))
    assert server.num_connections == 3
    pool.close()


async def test_a_connection_that_ends_or_was_idle_for_long_is_not_used_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(server.url)
    for path in ("/last", "/until_close", "/whole"):
        await pool.ask("POST", path)
    monkeypatch.setattr(http, "MAX_IDLE_S", -1.0)
    await pool.ask("POST", "/whole")
    assert [asked.connection for asked in server.asked] == [1, 2, 3, 4]
    pool.close()


@pytest.mark.parametrize("path", ["/dropped", "/silent_drop", "/garbage"])
async def test_a_broken_response_is_an_error_and_the_next_request_goes_on(server: FakeServer, path: str) -> None:
    pool = Pool(server.url)
    with pytest.raises(OSError):
        await pool.request("POST", path, b"", Body())
    assert (await pool.ask("POST", "/whole"))[0] == 200
    pool.close()


async def test_a_cancelled_request_does_not_leave_its_rest_to_the_next_one(server: FakeServer) -> None:
    pool = Pool(server.url)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.request("POST", "/chunked", b"", Body()), 0.02)
    body = Body()
    await pool.request("POST", "/whole", b"", body)
    assert body.text == '{"got": null}'
    pool.close()


async def test_a_fault_of_the_receiver_is_not_blamed_on_the_server(server: FakeServer) -> None:
    def receive(status: int, part: bytes, now: float) -> None:
        raise ZeroDivisionError

    pool = Pool(server.url)
    with pytest.raises(Exception, match="callback") as caught:
        await pool.request("POST", "/whole", b"", receive)
    assert not isinstance(caught.value, OSError)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


async def test_nobody_listening_is_one_clear_error() -> None:
    with pytest.raises(UnavailableError, match=r"cannot reach the server at 127\.0\.0\.1 port 1"):
        await Pool("http://127.0.0.1:1").ask("GET", "/v1/models")


async def test_the_key_the_host_and_a_path_in_front_are_sent(server: FakeServer) -> None:
    server.routes["/proxy/whole"] = whole
    pool = Pool(server.url + "/proxy/", "secret")
    await pool.ask("POST", "/whole")
    asked = server.asked[0]
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.headers["host"] == server.url.removeprefix("http://")
    assert asked.path == "/proxy/whole"
    pool.close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
async def test_proxies_are_ignored(server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    pool = Pool(server.url)
    assert (await pool.ask("POST", "/whole"))[0] == 200
    pool.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://h:port", "", "http://[::1"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Pool(url)


async def test_a_slow_reader_takes_its_time_and_gets_everything(server: FakeServer) -> None:
    begin_s = time.perf_counter()
    pool, body = Pool(server.url, bytes_per_s=30_000), Body()
    assert await pool.request("POST", "/long", b"", body) == 200
    assert body.text == "x" * 60_000
    assert time.perf_counter() - begin_s > 1.5
    pool.close()
