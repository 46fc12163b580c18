"""Streams of blocks and of several choices that go on after a break, whichever event was the last."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hiserve.core.request import FinishReason
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script
from tests.unit.server.resumptions import CALLS, CHAT, NATIVE, PROMPTS, TEXT, scripted

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object"}
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in ("look", "note")],
    },
    RESPONSES: {
        "input": "Hi",
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}, {"type": "custom", "name": "note"}],
    },
}
WORDS = ("the token 🙂 the text", "token")
# What two replies to one request differ in: names, times, seals, and the numbers of events.
OWN = re.compile(
    r"""("(?:msg|rs|fc|ctc|resp|call)_|"created_at": |"sequence_number": |"encrypted_content": "|"signature": ")[\w.+/=-]+"""
)


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[Server]:
    """A server whose model thinks and calls."""
    template = tiny_text.TEMPLATE + "{% if tools %}<tool_call>{% endif %}"
    made = make_server(FakeEngineClient(script=lambda _: []), template=template, reply_format="hermes")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


async def blocks(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    call = await server.post(path, {**BODIES[path], "stream": True, "return_token_ids": True, **fields})
    assert call.status == 200, call.text
    datas = [event.partition("data: ")[2] for event in call.text.split("\n\n")[:-1]]
    return [json.loads(OWN.sub(r"\g<1>0", json.dumps(json.loads(data), ensure_ascii=False))) for data in datas]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_of_blocks_goes_on_after_its_last_event_with_tokens(agent: Server, path: str) -> None:
    """The events after that one come again, and no other."""
    ids = scripted(agent, CALLS)
    whole = await blocks(agent, path)
    assert [token for event in whole for token in event.get("token_ids", ())] == ids
    seen: list[int] = []
    num_runs = 0
    for index, event in enumerate(whole):
        seen += event.get("token_ids", ())
        if "token_ids" in event and len(seen) < len(ids):
            rest = await blocks(agent, path, resume_token_ids=seen)
            assert agent.engine.seen[-1].num_resumed == len(seen)
            assert [*whole[: index + 1], *rest] == whole
            num_runs += 1
    assert num_runs > 25
    shown = [event for event in await blocks(agent, path, return_token_ids=None) if event.get("type") != "ping"]
    assert [{name: it for name, it in event.items() if name != "token_ids"} for event in whole] == shown


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_reply_of_blocks_shows_its_tokens(agent: Server, path: str) -> None:
    ids = scripted(agent, CALLS)
    assert (await agent.post(path, {**BODIES[path], "return_token_ids": True})).json["token_ids"] == ids
    assert "token_ids" not in (await agent.post(path, BODIES[path])).json


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("resumed", "fields", "fault"),
    [([500], {}, "between 0 and 499"), ([[5]], {}, "token ids"), ([5], {"stream": False}, "no stream")],
)
async def test_what_cannot_be_resumed_is_refused(
    agent: Server, path: str, resumed: Any, fields: dict[str, Any], fault: str
) -> None:
    call = await agent.post(path, {**BODIES[path], "stream": True, "resume_token_ids": resumed, **fields})
    assert call.status == 400
    assert fault in call.json["error"]["message"]


async def test_a_response_with_scores_cannot_be_resumed(agent: Server) -> None:
    fields = {"include": ["message.output_text.logprobs"], "stream": True, "resume_token_ids": [5]}
    call = await agent.post(RESPONSES, BODIES[RESPONSES] | fields)
    assert (call.status, call.json["error"]["param"]) == (400, "resume_token_ids")


# --- several choices -------------------------------------------------------------------------


def choices_of(path: str, events: list[Any]) -> dict[int, dict[str, Any]]:
    """Returns the text, tokens and end of each choice that a stream has said."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if path == NATIVE:
            end = event["meta_info"]["finish_reason"]
            found[event["index"]] = {"text": event["text"], "token_ids": event["output_ids"], "end": end}
            continue
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "token_ids": [], "end": None, "roles": 0})
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one["token_ids"] += choice["token_ids"]
            one["end"] = one["end"] or choice["finish_reason"]
            one["roles"] += "role" in choice.get("delta", {}) or "prompt_token_ids" in choice
    return found


def speaks(server: Server, words: tuple[str, ...]) -> list[list[int]]:
    """Makes the engine say other words for each choice; returns their tokens."""
    ids = [[index for tokens in reply_script(text, end=False) for index in tokens] for text in words]
    server.engine.finish = FinishReason.LENGTH

    def script(_: Any) -> list[list[int]]:
        seen = server.engine.seen[-1]
        return [[index] for index in ids[seen.choice][seen.num_resumed :]]

    server.engine.script = script
    return ids


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_each_choice_goes_on_behind_its_own_tokens(server: Server, path: str) -> None:
    """Choices that have not begun begin, and those that have ended are not run again."""
    ids = speaks(server, WORDS)
    body = {**PROMPTS[path], "stream": True, "return_token_ids": True, "n": 2}
    if path == NATIVE:
        body = {**PROMPTS[path], "stream": True, "sampling_params": {"n": 2}}
    *events, _ = (await server.post(path, body)).events
    whole = choices_of(path, events)
    assert [whole[index]["token_ids"] for index in (0, 1)] == ids
    for num_kept in range(len(events)):
        kept = choices_of(path, events[:num_kept])
        # An opening without tokens comes again.
        kept = {index: choice for index, choice in kept.items() if choice["token_ids"]}
        nothing: dict[str, Any] = {"token_ids": [], "end": None}
        if all(choice["end"] for choice in (kept.get(0, nothing), kept.get(1, nothing))):
            continue
        resumed = [None if (it := kept.get(at, nothing))["end"] else it["token_ids"] for at in (0, 1)]
        server.engine.seen.clear()
        call = await server.post(path, {**body, "resume_token_ids": resumed})
        assert call.status == 200, call.text
        assert [seen.num_resumed for seen in server.engine.seen] == [len(it) for it in resumed if it is not None]
        rest = choices_of(path, call.events[:-1])
        for at in (0, 1):
            both = rest[at] if path == NATIVE and at in rest else kept.get(at, rest.get(at))
            if path != NATIVE and at in rest and at in kept:
                names = ("text", "token_ids", "roles")
                both = {name: kept[at][name] + rest[at][name] for name in names} | {"end": rest[at]["end"]}
            assert both == whole[at]


async def test_scores_of_a_prompt_have_one_choice_that_makes_them(server: Server) -> None:
    speaks(server, WORDS)
    call = await server.complete("Hi", stream=True, n=2, prompt_logprobs=1, resume_token_ids=[[5], []])
    assert (call.status, call.json["error"]["param"]) == (400, "resume_token_ids")
    assert "scores of the prompt" in call.json["error"]["message"]
