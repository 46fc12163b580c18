"""What of an answer is kept: all that a client can rely on, and nothing of when its events came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.freeze.session import SESSION, Ask
from tools.freeze.wire import parse, told


def event(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "cmpl-" + "a" * 32, "choices": [{"index": index, "text": text, "finish_reason": finish}]}


def answer(*events: dict[str, Any], kind: bytes = b"text/event-stream") -> bytes:
    datas = [*map(json.dumps, events), "[DONE]"]
    body = "".join(f"data: {data}\n\n" for data in datas).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ndate: now\r\n\r\n%b" % (kind, body)


def lines(raw: bytes) -> list[str]:
    return list(told(Ask("POST", "/v1/completions"), raw))


def test_how_tokens_are_spread_over_events_is_not_kept() -> None:
    one = answer(event(0, "a"), event(1, "x"), event(0, "b"), event(0, "c", "stop"), event(1, "y", "length"))
    other = answer(event(1, "xy", "length"), event(0, "abc", "stop"))
    assert lines(one) == lines(other)


@pytest.mark.parametrize(
    "other",
    [
        answer(event(0, "a"), event(0, "c", "stop")),
        answer(event(0, "a"), event(0, "b", "length")),
        answer(event(1, "a"), event(1, "b", "stop")),
        answer(event(0, "a"), {**event(0, "b", "stop"), "new": 1}),
        answer(event(0, "a"), event(0, "b", "stop"), kind=b"text/plain"),
        answer(event(0, "a"), event(0, "b", "stop"))[:-14],
    ],
    ids=["text", "finish", "index", "field", "header", "end"],
)
def test_what_a_stream_says_is_kept(other: bytes) -> None:
    sent = answer(event(0, "a"), event(0, "b", "stop"))
    assert lines(sent) == lines(sent)
    try:
        assert lines(other) != lines(sent)
    except json.JSONDecodeError:  # no stream any more
        assert b"text/plain" in other


def test_an_answer_in_chunks_is_put_together_and_one_before_the_final_is_passed_over() -> None:
    head = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\nRetry-After: 1\r\n\r\n"
    )
    assert parse(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == (400, {"retry-after": "1"}, b"abcde")


def test_ids_are_not_kept_but_that_there_are_some() -> None:
    one, other = (answer(event(0, "a", "stop")).replace(b"a" * 32, digits * 32) for digits in (b"b", b"c"))
    assert lines(one) == lines(other) != lines(one.replace(b"b" * 32, b"none"))


def test_every_request_of_the_session_has_bytes() -> None:
    assert all(ask.bytes(number).endswith(ask.raw or b"") for number, ask in enumerate(SESSION))
    assert len({ask.method for ask in SESSION}) >= 4
