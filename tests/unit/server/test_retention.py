"""Marks of clients become prefixes that the cache retains, and names of sessions a digest; the same in every protocol."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest

from hiserve.core.usage import CacheUse
from hiserve.text.body.chat import join_parts, parse_chat
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server
from tests.unit.server.tool_replies import script, serving

CHAT, MESSAGES, RESPONSES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
MARK, HOUR_MARK = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}
BASIC: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    TEXT: {"prompt": "Hi"},
}
FIRST, SECOND = "You look after ships. " * 4, "Answer in French. " * 4


def client_of(server: Server) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
    return anthropic.AsyncAnthropic(base_url="http://test", api_key="none", max_retries=0, http_client=http)


def block(text: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": mark} if mark else {})


def retained(server: Server) -> list[tuple[str, int]]:
    """The texts that the last request asks to retain, and how long."""
    seen = server.engine.seen[-1]
    return [(TOKENIZER.decode(seen.prompt[:count], skip_hidden=False), ttl_s) for count, ttl_s in seen.retain]


def is_up_to(text: str, last: str, following: str) -> bool:
    return last.strip() in text and following not in text


async def test_breakpoints_of_messages_retain_the_prompt_up_to_their_blocks() -> None:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {"where": "north"}, "cache_control": MARK}
    found = {"type": "tool_result", "tool_use_id": "1", "content": "Nothing in the north.", "cache_control": HOUR_MARK}
    messages = [
        {"role": "user", "content": [block("Hello to the ships.", MARK), block("Where are they?")]},
        {"role": "assistant", "content": [block("Let me see."), call]},
        {"role": "user", "content": [found, block("And the others?")]},
    ]
    async with serving("Yes.") as server:
        body = BASIC | {"system": [block(FIRST, HOUR_MARK), block(SECOND)], "messages": messages, "tools": [LOOK]}
        assert (await server.post(MESSAGES, body)).status == 200
        texts = retained(server)
        plain = {"system": FIRST + SECOND, "tools": [LOOK], "messages": [
            {"role": "user", "content": "Hello to the ships.Where are they?"},
            {"role": "assistant", "content": [block("Let me see."), {**call, "cache_control": None}]},
            {"role": "user", "content": [{**found, "cache_control": None}, block("And the others?")]},
        ]}  # fmt: skip
        assert (await server.post(MESSAGES, BASIC | plain)).status == 200
        one, other = server.engine.seen
    assert (one.prompt == other.prompt).all() and other.retain == ()
    assert [ttl_s for _, ttl_s in texts] == [3600, 300, 300, 3600]
    ends = (
        (FIRST, "Answer"),
        ("Hello to the ships.", "Where"),
        ("north", "Nothing"),
        ("Nothing in the north.", "others"),
    )
    for (text, _), (last, following) in zip(texts, ends, strict=True):
        assert is_up_to(text, last, following), text[-80:]


async def test_breakpoints_within_a_result_and_of_words_before_a_call() -> None:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {"where": "north"}}
    found = {"type": "tool_result", "tool_use_id": "1", "content": [block("Nothing in the north.", HOUR_MARK)]}
    messages = [
        {"role": "user", "content": "Where are they?"},
        {"role": "assistant", "content": [block("Let me see.", MARK), call]},
        {"role": "user", "content": [found, block("And the others?")]},
    ]
    async with serving("Yes.") as server:
        assert (await server.post(MESSAGES, BASIC | {"messages": messages, "tools": [LOOK]})).status == 200
        (said, first_s), (result, second_s) = retained(server)
        assert (first_s, second_s) == (300, 3600)
        assert is_up_to(said, "Let me see.", "Nothing") and is_up_to(result, "Nothing in the north.", "others")
        found["content"] = [block("Nothing.", MARK)] * 4
        refused = await server.post(MESSAGES, BASIC | {"messages": messages, "tools": [LOOK]})
        assert refused.status == 400 and "Found 5." in refused.text


async def test_breakpoints_of_tools_and_of_the_whole_prompt() -> None:
    async with serving("Yes.") as server:
        body = BASIC | {"system": FIRST, "tools": [LOOK | {"cache_control": MARK}], "cache_control": HOUR_MARK}
        assert (await server.post(MESSAGES, body)).status == 200
        (tools, _), (whole, ttl_s) = retained(server)
        assert '"look"' in tools and FIRST.strip() in tools and "Hi" not in tools
        assert ttl_s == 3600 and whole == TOKENIZER.decode(server.engine.seen[-1].prompt, skip_hidden=False)


async def test_breakpoints_in_contents_of_chats_mean_the_same() -> None:
    messages = [
        {"role": "system", "content": [block(FIRST, HOUR_MARK), block(SECOND)]},
        {"role": "user", "content": [block("Hello to the ships.", MARK), block("Where are they?")]},
    ]
    async with serving("Yes.") as server:
        assert (await server.post(CHAT, {"messages": messages})).status == 200
        texts = retained(server)
        plain = [{"role": "system", "content": FIRST + SECOND}, {"role": "user", "content": "Hello to the ships.Where are they?"}]  # fmt: skip
        assert (await server.post(CHAT, {"messages": plain})).status == 200
        one, other = server.engine.seen
    assert (one.prompt == other.prompt).all() and other.retain == ()
    assert [ttl_s for _, ttl_s in texts] == [3600, 300]
    assert is_up_to(texts[0][0], FIRST, "Answer") and is_up_to(texts[1][0], "the ships.", "Where")
    parsed = parse_chat({"messages": messages})
    join_parts(messages)  # as of large bodies
    assert parse_chat({"messages": messages}) == parsed and isinstance(messages[0]["content"], list)


POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "text"), (RESPONSES, "input_text")])
async def test_explicit_breakpoints_retain_the_prompt_up_to_their_parts(path: str, kind: str) -> None:
    def part(text: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "text": text, **more}

    field = {CHAT: "messages", RESPONSES: "input"}[path]
    marked = [
        {"role": "system", "content": [part(FIRST, **POINT), part(SECOND)]},
        {"role": "user", "content": [part("Hello to the ships.", **POINT), part("Where are they?")]},
    ]
    plain = [{"role": each["role"], "content": "".join(one["text"] for one in each["content"])} for each in marked]
    many = [{"role": "user", "content": [part(f"The ship {index} of them. ", **POINT) for index in range(9)]}]
    async with serving("Yes.") as server:
        for said in (marked, plain, many):
            reply = await server.post(path, {field: said})
            assert reply.status == 200, reply.text
        first, second, third = server.engine.seen
        assert (first.prompt == second.prompt).all() and second.retain == ()
        texts = [(TOKENIZER.decode(first.prompt[:count], skip_hidden=False), ttl_s) for count, ttl_s in first.retain]
        assert [ttl_s for _, ttl_s in texts] == [1800, 1800]
        assert is_up_to(texts[0][0], FIRST, "Answer") and is_up_to(texts[1][0], "the ships.", "Where")
        assert len(third.retain) == 4 and third.retain[-1][0] > third.retain[0][0]
        refused = await server.post(path, {field: [{"role": "user", "content": [part("a", prompt_cache_breakpoint={"mode": "x"})]}]})  # fmt: skip
        assert refused.status == 400 and "prompt_cache_breakpoint" in refused.text
    if path == CHAT:
        parsed = parse_chat({"messages": marked})
        join_parts(marked)  # as of large bodies
        assert parse_chat({"messages": marked}) == parsed


@pytest.mark.parametrize(("asked", "seconds"), [("in_memory", 300), ("24h", 86_400)])
async def test_prompt_cache_retention_retains_the_whole_prompt(server: Server, asked: str, seconds: int) -> None:
    for path, body in BODIES.items():
        assert (await server.post(path, body | {"prompt_cache_retention": asked})).status == 200
        seen = server.engine.seen[-1]
        assert seen.retain == ((len(seen.prompt), seconds),)
        reply = await server.post(path, body | {"prompt_cache_retention": "forever"})
        assert reply.status == 400 and "prompt_cache_retention" in reply.text


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h", "comparison_response_id": None}}, 43_200),
        ({"prompt_cache_options": {}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_options": {"ttl": "30m", "prewarm": False}, "prompt_cache_retention": "in_memory"}, 1800),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, 0),
        ({"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_options": None}, 0),
    ],
)
async def test_prompt_cache_options_retain_the_whole_prompt(
    server: Server, asked: dict[str, Any], seconds: int
) -> None:
    for path, body in BODIES.items():
        assert (await server.post(path, body | asked)).status == 200
        seen = server.engine.seen[-1]
        assert seen.retain == (((len(seen.prompt), seconds),) if seconds else ())


@pytest.mark.parametrize("options", [{"ttl": "5m"}, {"mode": "off"}, {"prewarm": True}, {"prewarm": 1}, "30m"])
async def test_prompt_cache_options_that_cannot_be_honoured_are_refused(server: Server, options: Any) -> None:
    for path, body in BODIES.items():
        reply = await server.post(path, body | {"prompt_cache_options": options})
        assert reply.status == 400 and "prompt_cache_options" in reply.text


async def test_more_than_four_breakpoints_are_refused_in_anthropics_words() -> None:
    five = [block(f"part {number}", MARK) for number in range(5)]
    fault = "A maximum of 4 blocks with cache_control may be provided. Found 5."
    async with serving("Yes.") as server:
        for body in (
            {"messages": [{"role": "user", "content": five}]},
            {"system": five[:2], "tools": [LOOK | {"cache_control": MARK}], "messages": [{"role": "user", "content": five[:2]}]},
            {"system": five[:4], "cache_control": MARK},
        ):  # fmt: skip
            with pytest.raises(anthropic.BadRequestError, match=fault):
                await client_of(server).messages.create(model="tiny", **BASIC | body)
            assert (
                await server.post(f"{MESSAGES}/count_tokens", {"messages": BASIC["messages"], **body})
            ).status == 400
        reply = await server.post(CHAT, {"messages": [{"role": "user", "content": five}]})
        assert reply.status == 400 and fault in reply.text
        for mark in ({"type": "ephemeral", "ttl": "2h"}, {"type": "forever"}, {}, "5m"):
            for path in (CHAT, MESSAGES):
                content = [{"type": "text", "text": "Hi", "cache_control": mark}]
                assert (
                    await server.post(path, BASIC | {"messages": [{"role": "user", "content": content}]})
                ).status == 400
        assert not server.engine.seen


async def test_usage_of_messages_tells_the_times() -> None:
    async with serving("Yes.") as server:
        body = BASIC | {"system": [block(FIRST * 3, HOUR_MARK), block(SECOND * 3, MARK)]}
        server.engine.cached = CacheUse(device=16, host=32)
        usage = (await client_of(server).messages.create(model="tiny", **body)).usage
        prompt, ((num_hour, _), _) = server.engine.seen[0].prompt, server.engine.seen[0].retain
        assert usage.cache_read_input_tokens == 48 and usage.cache_creation is not None
        assert usage.cache_creation_input_tokens == len(prompt) // 16 * 16 - 48
        assert usage.cache_creation.ephemeral_1h_input_tokens == num_hour - 48 > 0
        rest = usage.cache_creation_input_tokens - usage.cache_creation.ephemeral_1h_input_tokens
        assert usage.cache_creation.ephemeral_5m_input_tokens == rest > 0
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == len(prompt)
        server.engine.cached = CacheUse(host=num_hour // 16 * 16 + 16)
        usage = (await client_of(server).messages.create(model="tiny", **body)).usage
        assert usage.cache_creation is not None and usage.cache_creation.ephemeral_1h_input_tokens == 0


async def test_hits_of_every_tier_are_read_tokens_of_messages_and_responses() -> None:
    async with serving("Yes.") as server:
        server.engine.cached = CacheUse(device=16, host=32, store=64)
        usage = (await server.post(MESSAGES, BASIC | {"system": FIRST * 8})).json["usage"]
        assert usage["cache_read_input_tokens"] == 112
        usage = (await server.post(RESPONSES, {"instructions": FIRST * 8, "input": "Hi"})).json["usage"]
        num_prompt = len(server.engine.seen[-1].prompt)
        assert usage["input_tokens"] == num_prompt
        assert usage["input_tokens_details"]["cached_tokens"] == 112
        assert usage["input_tokens_details"]["cache_write_tokens"] == num_prompt // 16 * 16 - 112


async def test_sessions_are_told_by_a_header_or_the_cache_key_and_are_no_namespace() -> None:
    server = make_server(FakeEngineClient(script=lambda _: script("Yes.", 1)))
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        bodies: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
            TEXT: {"prompt": "Hi"},
            RESPONSES: {"input": "Hi"},
        }
        for path, body in (bodies | {MESSAGES: BASIC, "/generate": {"text": "Hi"}}).items():
            for header in ("x_session_affinity", "session_id", "x_session_id", "x_claude_code_session_id"):
                assert (await server.post(path, body, **{header: "one"})).status == 200
            assert (await server.post(path, body, x_session_affinity="one", session_id="two")).status == 200
        for path, body in bodies.items():
            assert (await server.post(path, body | {"prompt_cache_key": "one"})).status == 200
        sessions = {seen.session for seen in server.engine.seen}
        assert len(sessions) == 1 and len(sessions.pop()) == 16
        await server.post(CHAT, bodies[CHAT] | {"prompt_cache_key": "one"}, session_id="two")
        await server.post(CHAT, bodies[CHAT])
        *_, first, other, none = server.engine.seen
        assert first.session != other.session != none.session == b""
        assert {seen.namespace for seen in server.engine.seen} == {b""}
