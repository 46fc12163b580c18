"""Bodies over the limit are refused, however they come, before they are in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.asgi import Call
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script

LIMIT = 1000


class Chunked(Call):
    """Sends its body in pieces of 100 bytes, without end if need be."""

    num_sent = 0

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.num_sent >= len(self._body):
            return await super()._receive()
        start, self.num_sent = self.num_sent, self.num_sent + 100
        more = self.num_sent < len(self._body)
        self._is_body_sent = not more
        return {"type": "http.request", "body": self._body[start : self.num_sent], "more_body": more}


@pytest.fixture
def small() -> Server:
    return make_server(FakeEngineClient(script=lambda prompt: reply_script()), max_request_bytes=LIMIT)


def assert_too_large(call: Call) -> None:
    assert call.status == 413
    error = call.json["error"]
    assert error["code"] == "request_too_large"
    assert error["message"] == f"the body is larger than {LIMIT} bytes. Send less, or raise --max-request-bytes."
    assert call.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/abort_request"])
async def test_an_announced_length_over_the_limit_is_refused_unread(small: Server, path: str) -> None:
    call = await Chunked(small.app, "POST", path, b"x" * 50_000, content_length="50000").end()
    assert_too_large(call)
    assert call.num_sent == 0


@pytest.mark.parametrize("announced", [{}, {"content_length": "5"}, {"content_length": "-5"}, {"content_length": "x"}])
async def test_a_longer_body_is_refused_where_it_exceeds_the_limit(small: Server, announced: dict[str, str]) -> None:
    call = await Chunked(small.app, "POST", "/v1/completions", b" " * 50_000, **announced).end()
    assert_too_large(call)
    assert call.num_sent == LIMIT + 100


async def test_the_largest_body_is_read(small: Server) -> None:
    call = await Chunked(small.app, "POST", "/v1/completions", b"{" + b" " * (LIMIT - 1)).end()
    assert call.status == 400
    assert call.json["error"]["code"] == "invalid_json"
