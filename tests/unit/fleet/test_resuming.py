"""A stream over engines that die: whatever byte was the last of one, the client gets the events of one engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from hiserve.fleet.resuming import Resumption, resumed
from hiserve.fleet.stream_events import NativeEvents
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script

TEXT, CHAT, NATIVE, MESSAGES, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/generate",
    "/v1/messages",
    "/v1/responses",
)
PROMPTS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "Hi", "stream_options": {"include_usage": True}},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}},
    NATIVE: {"text": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 99},
    RESPONSES: {"input": "Hi"},
}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"logprobs": 1},
    "token ids": {"return_token_ids": True},
    "choices": {"n": 2},
}
# What two replies of one engine to one request differ in.
OWN = re.compile(r'("(?:msg|resp)_|"e2e_latency": |"created_at": )[\w.]+')
REPLY = "the token 🙂 the text"


class EngineDiedError(Exception):
    pass


def body_of(path: str, case: str) -> dict[str, Any]:
    fields = FIELDS[case]
    if path == CHAT and case == "scores":
        fields = {"logprobs": True, "top_logprobs": 1}
    elif path == NATIVE:
        scores = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
        fields = {"scores": scores, "choices": {"sampling_params": {"n": 2}}}.get(case, {})
    return {**PROMPTS[path], "stream": True, **fields}


def events_of(data: bytes) -> list[Any]:
    """Returns the events, without what differs from reply to reply; those of each choice together."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        payload = event.rpartition("data: ")[2]
        found.append(
            payload if payload == "[DONE]" else json.loads(OWN.sub(r"\g<1>0", json.dumps(json.loads(payload))))
        )
    for event in found:
        if "choices" in event:
            event.pop("id")
            event.pop("created")
    return sorted(found, key=_choice)


def _choice(event: Any) -> int:
    choices = event["choices"] if "choices" in event else [{"index": event.get("index", 0)}] if "text" in event else []
    return int(choices[0]["index"]) if choices else 9 if event == "[DONE]" else 8 if "choices" in event else 0


async def joined(server: Server, path: str, body: dict[str, Any], deaths: list[int], size: int = 7) -> bytes:
    """Returns what a client gets from engines of which each dies after so many bytes; the last one lives."""
    resumption = Resumption.of(path, json.dumps(body).encode())
    assert resumption is not None

    async def opens(engine: int, asked: bytes) -> AsyncGenerator[bytes, None]:
        call = await server.post(path, asked, x_request_id="one")
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
    ("path", "case"),
    [
        *((path, case) for path in (TEXT, CHAT) for case in FIELDS),
        *((NATIVE, case) for case in ("plain", "scores", "choices")),
        *((path, case) for path in (MESSAGES, RESPONSES) for case in ("plain", "token ids")),
    ],
)
async def test_the_events_are_those_of_one_engine_wherever_it_dies(server: Server, path: str, case: str) -> None:
    """INV 96: two engines die, the second one early in its part."""
    body = body_of(path, case)
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        whole = await server.post(path, body, x_request_id="one")
        expected, size = events_of(b"".join(whole.chunks)), len(b"".join(whole.chunks))
        if path == TEXT and case == "scores":  # the engines show an opening, since they are asked for token ids
            expected.insert(
                0, expected[0] | {"choices": [dict.fromkeys(("logprobs", "finish_reason")) | {"index": 0, "text": ""}]}
            )
        for death in (*range(0, size, size // 23), size - 1, size + 99):
            got = await joined(server, path, body, [death, 300])
            assert events_of(got) == expected
            assert len(set(re.findall(rb'"(?:item_)?id":"([\w-]+)"', got))) <= (2 if path == RESPONSES else 1)


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
        ("/tokenize", b'{"prompt": "x", "stream": true}'),
        (TEXT, b'{"prompt": "x"}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 0}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": "2"}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 4097}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 2, "prompt_logprobs": 1}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 2, "resume_token_ids": [[5]]}'),
        (TEXT, b'{"prompt": "x", "stream": true, "n": 2, "resume_token_ids": [5, 6]}'),
        (TEXT, b'{"prompt": "x", "stream": true, "resume_token_ids": 5}'),
        (NATIVE, b'{"text": ["x", "y"], "stream": true, "sampling_params": [{"n": 1}, 5, {"n": true}]}'),
        (RESPONSES, b'{"input": "x", "stream": true, "include": ["message.output_text.logprobs"]}'),
        (TEXT, b"[" * 100_000),
        (TEXT, b"\xff"),
        (CHAT, b"[]"),
    ],
)
def test_other_replies_are_not_resumed(path: str, body: bytes) -> None:
    assert Resumption.of(path, body) is None


@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        (TEXT, {"prompt": ["x", "y"]}, 2),
        (TEXT, {"prompt": [[1], [2]], "n": 2}, 4),
        (TEXT, {"prompt": [1, 2]}, 1),
        (NATIVE, {"input_ids": [[1], [2]], "sampling_params": {"n": 3}}, 6),
        (NATIVE, {"text": ["x", "y"], "sampling_params": [{"n": 3}, None]}, 4),
    ],
)
def test_the_choices_of_all_prompts_are_resumed(path: str, body: dict[str, Any], number: int) -> None:
    made = Resumption.of(path, json.dumps({**body, "stream": True}).encode())
    assert made is not None
    chunks = {
        TEXT: {"choices": [{"index": number - 1, "text": "x", "token_ids": [7]}]},
        NATIVE: {"index": number - 1, "text": "x", "output_ids": [7], "meta_info": {"finish_reason": None}},
    }
    assert made.push(b"data: " + json.dumps(chunks[path]).encode() + b"\n\n")
    wanted = [7] if number == 1 else [*([] for _ in range(number - 1)), [7]]
    assert json.loads(made.body)["resume_token_ids"] == wanted


def test_a_stream_that_its_client_resumes_goes_on_from_there() -> None:
    made = Resumption.of(TEXT, b'{"prompt": "x", "stream": true, "n": 2, "resume_token_ids": [null, [5]]}')
    assert made is not None
    made.push(b'data: {"choices": [{"index": 1, "text": "x", "token_ids": [7]}]}\n\n')
    assert json.loads(made.body)["resume_token_ids"] == [None, [5, 7]]


@pytest.mark.parametrize("text", ["more data: ", 'data: {"x": 1}'])
def test_a_text_like_an_event_is_a_text(text: str) -> None:
    made = Resumption.of(NATIVE, b'{"text": "x", "stream": true}')
    assert made is not None
    event = {"text": text, "output_ids": [7], "meta_info": {"finish_reason": None}}
    shown = made.push(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert json.loads(shown.removeprefix(b"data: ")) == event
    assert json.loads(made.body)["resume_token_ids"] == [7]


async def test_a_reply_that_cannot_be_resumed_is_not_begun_again() -> None:
    """Else the client would get the reply of another engine behind the part that it has."""
    asked: list[int] = []

    async def opens(engine: int, _: bytes) -> AsyncGenerator[bytes, None]:
        asked.append(engine)
        if engine:
            yield b"part"
        raise EngineDiedError

    resumption = Resumption({}, NativeEvents({}))
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

    resumption = Resumption({"stream": True}, NativeEvents({}))
    assert [data async for data in resumed(resumption, [0, 1], opens, (EngineDiedError,))] == [refusal]
