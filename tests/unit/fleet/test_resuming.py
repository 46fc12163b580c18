"""A stream over engines that die: whatever byte was the last of one, the client gets the events of one engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from hiserve.fleet.resuming import Resumption, resumed
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {TEXT: {"prompt": "Hi"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
REPLY = "the token 🙂 the text"


class EngineDiedError(Exception):
    pass


def events_of(data: bytes) -> list[Any]:
    """Returns the events, without what differs from reply to reply."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        payload = event.removeprefix("data: ")
        found.append(payload if payload == "[DONE]" else json.loads(payload))
    for event in found[:-1]:
        event.pop("id")
        event.pop("created")
    return found


async def joined(server: Server, path: str, body: dict[str, Any], deaths: list[int], size: int = 7) -> bytes:
    """Returns what a client gets from engines of which each dies after so many bytes; the last one lives."""
    resumption = Resumption.of(path, json.dumps(body).encode())
    assert resumption is not None

    async def opens(engine: int, asked: bytes) -> AsyncGenerator[bytes, None]:
        call = await server.post(path, asked)
        assert call.status == 200, call.text
        data = b"".join(call.chunks)
        lives = engine >= len(deaths)
        data = data if lives else data[: deaths[engine]]
        for at in range(0, len(data), size):
            yield data[at : at + size]
        if not lives:
            raise EngineDiedError

    return b"".join(
        [data async for data in resumed(resumption, range(len(deaths) + 1), opens, (EngineDiedError, ConnectionError))]
    )


@pytest.fixture
def server() -> Server:
    made = make_server(FakeEngineClient(script=lambda _: []))
    ids = [index for tokens in reply_script(REPLY) for index in tokens]
    made.engine.script = lambda _: [[index] for index in ids[made.engine.seen[-1].num_resumed :]]
    return made


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"return_token_ids": True}], ids=["plain", "scores", "token ids"]
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_the_events_are_those_of_one_engine_wherever_it_dies(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    body = {**PROMPTS[path], "stream": True, "stream_options": {"include_usage": True}, **fields}
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        whole = await server.post(path, body)
        expected, size = events_of(b"".join(whole.chunks)), len(whole.text)
        if path == TEXT and "logprobs" in fields:  # the engines show an opening, since they are asked for token ids
            expected.insert(
                0, expected[0] | {"choices": [dict.fromkeys(("logprobs", "finish_reason")) | {"index": 0, "text": ""}]}
            )
        for death in range(0, size, 61):
            got = await joined(server, path, body, [death, 300])
            assert events_of(got) == expected
            assert len({json.loads(event[6:])["id"] for event in got.decode().split("\n\n")[:-2]}) == 1


async def test_when_no_engine_is_left_the_stream_fails(server: Server) -> None:
    async def opens(_: int, __: bytes) -> AsyncGenerator[bytes, None]:
        yield b"data: {"
        raise EngineDiedError

    resumption = Resumption.of(TEXT, b'{"prompt": "x", "stream": true}')
    assert resumption is not None
    stream = resumed(resumption, [0, 1], opens, (EngineDiedError,))
    with pytest.raises(EngineDiedError):
        await anext(stream)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": "x", "stream": true}'),
        (TEXT, b'{"prompt": "x"}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 2}'),
        (TEXT, b'{"prompt": ["x", "y"], "stream": true}'),
        (TEXT, b'{"prompt": [[1], [2]], "stream": true}'),
        (TEXT, b"[" * 100_000),
        (TEXT, b"\xff"),
        (CHAT, b"[]"),
    ],
)
def test_other_replies_are_not_resumed(path: str, body: bytes) -> None:
    assert Resumption.of(path, body) is None


async def test_a_reply_that_cannot_be_resumed_is_not_begun_again() -> None:
    """Else the client would get the reply of another engine behind the part that it has."""
    asked: list[int] = []

    async def opens(engine: int, _: bytes) -> AsyncGenerator[bytes, None]:
        asked.append(engine)
        if engine:
            yield b"part"
        raise EngineDiedError

    resumption = Resumption({})
    resumption.is_plain = True
    stream = resumed(resumption, [0, 1, 2], opens, (EngineDiedError,))
    assert await anext(stream) == b"part"
    with pytest.raises(EngineDiedError):
        await anext(stream)
    assert asked == [0, 1]


async def test_a_refusal_passes_as_it_is() -> None:
    refusal = b'{"error": {"message": "x"}}'

    async def opens(_: int, __: bytes) -> AsyncGenerator[bytes, None]:
        resumption.is_plain = True
        yield refusal

    resumption = Resumption({"stream": True})
    assert [data async for data in resumed(resumption, [0, 1], opens, (EngineDiedError,))] == [refusal]
