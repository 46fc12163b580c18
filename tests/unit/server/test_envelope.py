"""Every response carries a request id, whatever became of the request; programs are told whether to try again."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import DeadlineError, EngineError, HiserveError, OverloadedError, UnavailableError
from tests.unit.server.conftest import Server

HI = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, HI, 200),
        ("POST", CHAT, {**HI, "stream": True}, 200),
        ("POST", CHAT, b"{", 400),
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("GET", CHAT, b"", 405),
        ("HEAD", "/health", b"", 200),
        ("HEAD", "/metrics", b"", 200),
    ],
)
async def test_every_response_has_the_request_id(
    server: Server, method: str, path: str, body: Any, status: int
) -> None:
    call = await server.call(method, path, body, x_request_id="abc").end()
    assert (call.status, call.headers["x-request-id"]) == (status, "abc")


async def test_a_failure_of_our_own_has_the_request_id_and_is_not_to_be_repeated(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 0, RuntimeError("at /srv/secret.py <object at 0x7f>")
    call = server.call("POST", CHAT, HI, x_request_id="abc")
    with pytest.raises(RuntimeError):  # passed on, for the log
        await call.end()
    assert (call.status, call.headers["x-request-id"]) == (500, "abc")
    assert call.headers["x-should-retry"] == "false"
    assert call.json["error"]["message"] == "the server failed to answer this request."
    assert not [word for word in ("secret", "0x7f", "RuntimeError") if word in call.text]


@pytest.mark.parametrize(
    ("failure", "status", "retry_after", "should_retry"),
    [
        (OverloadedError("full."), 429, "1", None),
        (OverloadedError("full.", retry_after_s=17), 429, "17", None),
        (UnavailableError("gone."), 503, "1", None),
        (DeadlineError("late."), DeadlineError.status, "1" if DeadlineError.status == 503 else None, None),
        (EngineError("broke."), 500, None, "false"),
    ],
)
async def test_clients_are_told_whether_and_when_to_come_back(
    server: Server, failure: HiserveError, status: int, retry_after: str | None, should_retry: str | None
) -> None:
    server.engine.fail_at, server.engine.failure = 0, failure
    call = await server.post(CHAT, HI)
    assert call.status == status
    assert (call.headers.get("retry-after"), call.headers.get("x-should-retry")) == (retry_after, should_retry)
