"""Anthropic's messages over HTTP, whole and streamed, as Anthropic's own client reads them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.core.request import FinishReason, Grammar, SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import EngineError, HiserveError, OverloadedError, RequestError, UnavailableError
from hiserve.server.http import streaming
from hiserve.server.messages.format import MessageWriter, input_of
from hiserve.server.messages.types import BlockDelta, BlockStart, MessageEvent
from hiserve.server.reply.format import ServedModel
from hiserve.server.reply.generation import OutputDelta
from hiserve.server.reply.seals import Seals
from hiserve.text.reader.buffer import Event, Kind
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import TOKENIZER, Server, make_server
from tests.unit.server.tool_replies import ARGUMENTS, CALL, TWO, script, serving

USER: Any = {"role": "user", "content": "Hi"}
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}
BASIC: dict[str, Any] = {"messages": [USER], "max_tokens": 100}
PATH = "/v1/messages"
CALLS = f"{CALL}\n{CALL}"


def client_of(server: Server) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
    return anthropic.AsyncAnthropic(base_url="http://test", api_key="none", max_retries=0, http_client=http)


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    call = await server.post(PATH, {**BASIC, **fields})
    assert call.status == 200, call.text
    return dict(call.json)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event, whose name must be its type."""
    found = []
    for each in text.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_the_client_gets_thought_words_and_calls() -> None:
    async with serving(TWO) as server, client_of(server) as client:
        message = await client.messages.create(model="tiny", max_tokens=1000, messages=[USER], tools=[LOOK])
    thinking, text, first, second = message.content
    assert (thinking.type, text.type, first.type, second.type) == ("thinking", "text", "tool_use", "tool_use")
    assert (thinking.thinking, text.text, first.name) == ("so", "Let me see.", "look")  # type: ignore[union-attr]
    assert first.input == second.input == json.loads(ARGUMENTS)  # type: ignore[union-attr]
    assert first.id != second.id  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.output_tokens == len(script(TWO, 1))
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert message._request_id


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
async def test_the_client_puts_a_stream_together(size: int) -> None:
    async with serving(TWO, size) as server, client_of(server) as client:
        whole = await client.messages.create(model="tiny", max_tokens=1000, messages=[USER], tools=[LOOK])
        async with client.messages.stream(model="tiny", max_tokens=1000, messages=[USER], tools=[LOOK]) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert message.id != whole.id, "clients merge the messages of one id"
    calls = [block.id for reply in (whole, message) for block in reply.content if block.type == "tool_use"]
    assert len(set(calls)) == 4
    assert shown(message) == shown(whole)


def shown(message: Any) -> dict[str, Any]:
    """A message without what is new in each."""
    found: dict[str, Any] = message.model_dump(exclude={"id"})
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


async def test_events_come_in_anthropics_order() -> None:
    async with serving(TWO) as server:
        events = events_of((await server.post(PATH, {**BASIC, "tools": [LOOK], "stream": True})).text)
    order = [event["type"].removeprefix("content_block_") for event in events]
    assert order[0] == "message_start"
    assert order[-2:] == ["message_delta", "message_stop"]
    spelled = " ".join(order[1:-2])
    assert re.fullmatch(r"(start( delta)+ stop ?){4}", spelled), spelled
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1]["content_block"] == {"type": "text", "text": ""}
    assert starts[2]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "look", "input": {}}
    of_thought = [event["delta"]["type"] for event in events if event.get("index") == 0 and "delta" in event]
    assert set(of_thought[:-1]) == {"thinking_delta"}
    assert of_thought[-1] == "signature_delta"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_thought_that_is_not_shown_comes_back_by_its_signature(is_stream: bool) -> None:
    """The client keeps the block as it got it; another server's seal is left out, and counted."""
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    async with serving("<think>\nso\n</think>\n\nYes.") as server, client_of(server) as client:
        asked: Any = {"model": "tiny", "max_tokens": 100, "thinking": thinking}
        if is_stream:
            async with client.messages.stream(**asked, messages=[USER]) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked, messages=[USER])
        block, words = message.content
        assert block.type == "thinking"
        assert (block.thinking, words.text) == ("", "Yes.")  # type: ignore[union-attr]
        foreign = {"type": "thinking", "thinking": "no", "signature": Seals().seal("no")}
        for first, ignored in ((block.model_dump(), 0), (foreign, 1)):
            said = {"role": "assistant", "content": [first, words.model_dump(exclude_none=True)]}
            # Of another conversation, so that the server does not know the reply.
            other: Any = [{"role": "user", "content": "Hello"}, said, {"role": "user", "content": "And?"}]
            await client.messages.create(**asked, messages=other)
            prompt = TOKENIZER.decode(server.engine.seen[-1].prompt, skip_hidden=False)
            plain = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}, other[-1]]
            if not ignored:
                plain[1]["reasoning_content"] = "so"
            await server.post("/v1/chat/completions", {"messages": plain})
            assert TOKENIZER.decode(server.engine.seen[-1].prompt, skip_hidden=False) == prompt
            assert await server.metric("hiserve:ignored_request_parts_total", part="thought") == ignored


async def test_a_step_of_an_agent_with_a_result() -> None:
    async with serving(CALLS) as server, client_of(server) as client:
        asked: Any = {"model": "tiny", "max_tokens": 1000, "tools": [LOOK], "system": "Be short."}
        message = await client.messages.create(**asked, messages=[USER])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "found"}]}
            for block in message.content
            if block.type == "tool_use"
        ]
        history: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        await client.messages.create(**asked, messages=history)
        first, second = (seen.prompt.tolist() for seen in server.engine.seen)
        rest = TOKENIZER.decode(second[len(first) + len(script(CALLS, 1)) - 1 :], skip_hidden=False)
    ids = [token for delta in script(CALLS, 1) for token in delta]
    assert second[: len(first) + len(ids) - 1] == first + ids[:-1], "the tokens of the reply are kept"
    assert rest.count("<|tool|>found<|end|>") == 2


@pytest.mark.parametrize(
    ("text", "finish", "fields", "expected"),
    [
        ("Yes.", FinishReason.STOP, {}, ("end_turn", None)),
        ("Yes.", FinishReason.COMPLETE, {}, ("end_turn", None)),
        ("Yes. No.", FinishReason.STOP, {"stop_sequences": [" No"]}, ("stop_sequence", " No")),
        ("Yes. No.", FinishReason.STOP, {"stop": "x", "stop_sequences": [" No"]}, ("stop_sequence", " No")),
        ("Yes.", FinishReason.LENGTH, {}, ("max_tokens", None)),
        (CALL, FinishReason.STOP, {"tools": [LOOK]}, ("tool_use", None)),
        (CALL[:40], FinishReason.LENGTH, {"tools": [LOOK]}, ("max_tokens", None)),
        (CALL, FinishReason.STOP, {"tools": [LOOK], "tool_choice": {"type": "none"}}, ("end_turn", None)),
    ],
)
async def test_the_reason_of_an_end(
    text: str, finish: FinishReason, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    async with serving(text) as server:
        server.engine.finish = finish
        message = await ask(server, **fields)
        *_, delta, stop = events_of((await server.post(PATH, {**BASIC, **fields, "stream": True})).text)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert delta["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert delta["usage"] == message["usage"]
    assert stop == {"type": "message_stop"}


async def test_one_call_at_most_ends_the_reply() -> None:
    async with serving(TWO) as server:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await ask(server, tools=[LOOK], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["usage"]["output_tokens"] < len(script(TWO, 1))


@pytest.mark.parametrize("cached", [0, 16, 32])
async def test_the_input_fields_of_the_usage_sum_to_the_prompt(cached: int) -> None:
    async with serving("Yes.") as server:
        server.engine.cached = CacheUse(device=cached, miss="cold", miss_at=cached)
        messages = [{"role": "user", "content": "Hello there. " * 5}]
        usage = (await ask(server, messages=messages))["usage"]
        begin, *_ = events_of((await server.post(PATH, {**BASIC, "messages": messages, "stream": True})).text)
        num_prompt = len(server.engine.seen[0].prompt)
        (counted,) = (await server.post(f"{PATH}/count_tokens", {"messages": messages})).json.values()
    assert num_prompt > 48
    read, written, rest = (usage[f"{name}input_tokens"] for name in ("cache_read_", "cache_creation_", ""))
    assert read == cached
    assert read + written == num_prompt // 16 * 16
    assert read + written + rest == num_prompt == counted
    assert begin["message"]["usage"] == {**usage, "output_tokens": 0}
    assert begin["message"]["content"] == []


async def test_a_length_beyond_the_context_is_cut_to_it() -> None:
    async with serving("Yes.") as server:
        await ask(server, max_tokens=32_000)
        (seen,) = server.engine.seen
        assert seen.sampling.max_tokens == server.engine.max_model_len - len(seen.prompt)
        await ask(server, max_tokens=5)
        assert server.engine.seen[1].sampling.max_tokens == 5


async def test_no_tokens_fill_the_cache_and_are_an_empty_message() -> None:
    async with serving("Yes.") as server, client_of(server) as client:
        asked: Any = {"model": "tiny", "max_tokens": 0, "messages": [USER], "tools": [LOOK]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
        assert [seen.sampling.max_tokens for seen in server.engine.seen] == [1, 1]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("size", [4100, 9000])
async def test_clients_read_the_numbers_of_a_prompt_that_is_too_long(size: int, is_stream: bool) -> None:
    async with serving("Yes.") as server:
        messages = [{"role": "user", "content": "a " * size}]
        call = await server.post(PATH, {**BASIC, "messages": messages, "stream": is_stream})
        (counted,) = (await server.post(f"{PATH}/count_tokens", {"messages": messages})).json.values()
        assert call.status == 400
        assert call.json["error"] == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {counted} tokens > {server.engine.max_model_len - 1} maximum",
        }
        assert counted > size
        assert server.engine.seen == []


async def test_a_prompt_without_room_for_a_reply_is_too_long() -> None:
    async with serving("Yes.") as server:
        for room, status in ((1, 200), (0, 400)):
            server.engine.max_model_len = 4096
            (counted,) = (await server.post(f"{PATH}/count_tokens", {"messages": [USER]})).json.values()
            server.engine.max_model_len = counted + room
            call = await server.post(PATH, BASIC)
            assert call.status == status, call.text


ERRORS: list[tuple[HiserveError | Exception, int, str]] = [
    (RequestError("no."), 400, "invalid_request_error"),
    (OverloadedError("full."), 429, "rate_limit_error"),
    (UnavailableError("starting."), 529, "overloaded_error"),
    (EngineError("broken."), 500, "api_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
async def test_errors_have_anthropics_form(error: HiserveError, status: int, kind: str) -> None:
    async with serving("Yes.") as server:
        server.engine.failure, server.engine.fail_at = error, 0
        for stream in (False, True):
            call = await server.call("POST", PATH, {**BASIC, "stream": stream}, x_request_id="mine").end()
            assert call.status == status
            fault = {"type": kind, "message": error.message}
            assert call.json == {"type": "error", "error": fault, "request_id": "mine"}
            assert call.headers["request-id"] == call.headers["x-request-id"] == "mine"
            assert ("retry-after" in call.headers) == (status in (429, 529))


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
async def test_an_error_within_a_stream_is_its_last_event(error: HiserveError, status: int, kind: str) -> None:
    async with serving("Yes.") as server, client_of(server) as client:
        server.engine.failure, server.engine.fail_at = error, 2
        call = await server.call("POST", PATH, {**BASIC, "stream": True}, x_request_id="mine").end()
        *_, last = events_of(call.text)
        assert last == {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": "mine"}
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as stream:
                await stream.until_done()
    assert caught.value.type == kind


KINDS: dict[int, type[anthropic.APIStatusError]] = {
    400: anthropic.BadRequestError,
    401: anthropic.AuthenticationError,
    404: anthropic.NotFoundError,
    413: anthropic.RequestTooLargeError,
}


async def test_the_client_knows_the_errors() -> None:
    made = make_server(FakeEngineClient(script=lambda _: script("Yes.", 1)), api_key="k", max_request_bytes=5000)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        async with client_of(made).with_options(api_key="k") as client:
            asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
            assert (await client.messages.create(**asked)).content[0].type == "text"
            unknown = client.with_options(api_key="other")
            image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
            refused = [
                (400, client.messages.create(**asked | {"messages": [{"role": "user", "content": [image]}]})),
                (401, unknown.messages.create(**asked)),
                (404, client.messages.create(**asked | {"model": "claude"})),
                (413, client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x" * 6000}])),
            ]
            for status, asking in refused:
                with pytest.raises(KINDS[status]) as caught:
                    await asking
                assert caught.value.type == (
                    {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}.get(
                        status, "invalid_request_error"
                    )
                )
                assert caught.value.request_id


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x_api_key": "k"}, 200),
        ({"authorization": "Bearer k"}, 200),
        ({"x_api_key": "no"}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": "k", "authorization": "Bearer no"}, 401),
        ({"x_api_key": "no", "authorization": "Bearer k"}, 200),
    ],
)
async def test_a_key_comes_in_either_header(headers: dict[str, str], status: int) -> None:
    made = make_server(FakeEngineClient(script=lambda _: script("Yes.", 1)), api_key="k")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        for path, body in ((PATH, BASIC), ("/v1/chat/completions", {"messages": [USER]})):
            assert (await made.call("POST", path, body, **headers).end()).status == status
        if status == 401:
            assert made.engine.seen == []


async def test_both_headers_of_one_key_are_one_tenant() -> None:
    made = make_server(FakeEngineClient(script=lambda _: script("Yes.", 1)), api_key=["k", "l"])
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        for headers in ({"x_api_key": "k"}, {"authorization": "Bearer k"}, {"x_api_key": "l"}):
            await made.call("POST", PATH, BASIC, **headers).end()
    first, second, other = [seen.namespace for seen in made.engine.seen]
    assert first == second != other


async def test_a_stream_pings_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.001)
    go_on = asyncio.Event()

    async def wait(index: int) -> None:
        if index == 2:
            await go_on.wait()

    async with serving("Yes.") as server:
        server.engine.step = wait
        call = server.call("POST", PATH, {**BASIC, "stream": True})
        await call.until("event: ping\n")
        go_on.set()
        await call.end()
    events = events_of(call.text)
    assert {"type": "ping"} in events
    assert [event["type"] for event in events if event["type"] != "ping"][-1] == "message_stop"
    assert events[0]["type"] == "message_start", "no ping before it is certain that there is a reply"
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "Yes."


async def test_a_client_that_leaves_ends_its_request() -> None:
    go_on = asyncio.Event()
    async with serving("Yes.") as server:
        server.engine.step = lambda index: go_on.wait() if index == 2 else asyncio.sleep(0)
        for stream in (True, False):
            call = server.call("POST", PATH, {**BASIC, "stream": stream})
            if stream:
                await call.until("content_block_delta")
            else:
                while len(server.engine.seen) < 2:
                    await asyncio.sleep(0)
            call.disconnect()
            await call.end()
            assert server.engine.num_inflight == 0


class Vetted:
    """Stands for ``Vetting``: takes every grammar."""

    def __init__(self) -> None:
        self.trials: dict[str, int] = {}

    async def check(self, grammar: Grammar, _: str, **__: Any) -> tuple[Grammar, list[str]]:
        return grammar, ["Unknown format: é"]

    async def close(self) -> None:
        pass


async def test_a_schema_constrains_the_reply() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with serving("Yes.", vetting=Vetted()) as server:
        await ask(server, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
        (seen,) = server.engine.seen
        assert seen.sampling.grammar is not None
        call = await server.post(PATH, {**BASIC, "output_config": {"format": {"type": "json_schema", "schema": {}}}})
        assert call.headers["x-hiserve-warning"].startswith("output_config.format.schema is not held in full")
        assert json.loads(seen.sampling.grammar.text) == schema
        both = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "regex": "a"}
        call = await server.post(PATH, BASIC | both)
        assert call.status == 400
        assert "output_config.format.schema" in call.json["error"]["message"]
        assert await server.metric("hiserve:ignored_request_parts_total", part="effort") == 1


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"name": "a b", "input_schema": {}}, "tools[1].name"),
        ({"name": "f", "input_schema": {"type": "string"}}, "tools[1].input_schema"),
    ],
)
async def test_a_tool_that_cannot_be_called_is_named_as_the_client_has_it(tool: Any, param: str) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    async with serving(CALL, vetting=Vetted()) as server:
        call = await server.post(PATH, {**BASIC, "tools": [search, tool], "tool_choice": {"type": "any"}})
    assert call.status == 400
    assert call.json["error"]["message"].startswith(f"{param} "), call.text


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
async def test_a_call_that_is_required_has_the_grammar_of_a_chat(choice: Any, chat_choice: Any) -> None:
    function = {"name": "look", "parameters": LOOK["input_schema"]}
    chat = {"messages": [USER], "tools": [{"type": "function", "function": function}], "tool_choice": chat_choice}
    async with serving(CALL, vetting=Vetted()) as server:
        message = await ask(server, tools=[LOOK], tool_choice=choice)
        form = {"type": "json_schema", "schema": {"type": "object"}}
        await ask(server, tools=[LOOK], tool_choice=choice, output_config={"format": form})
        assert (await server.post("/v1/chat/completions", chat)).status == 200
        first, beside, second = (seen.sampling.grammar for seen in server.engine.seen)
        call = await server.post(PATH, {**BASIC, "tool_choice": choice})
    assert first == second == beside
    assert first is not None
    assert message["stop_reason"] == "tool_use"
    assert call.status == 400
    assert call.json["error"]["message"].startswith("tool_choice ")


async def test_the_same_conversation_has_the_same_prompt_in_both_protocols() -> None:
    function = {"name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where":"é"}'}}
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]},
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Later."},
    ]
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"where": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "found"},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Later."},
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
    tool = {"name": "look", "input_schema": LOOK["input_schema"], "description": "Looks."}
    async with serving("Yes.") as server:
        tools = [{"type": "function", "function": function}]
        assert (await server.post("/v1/chat/completions", {"messages": chat, "tools": tools})).status == 200
        await ask(server, messages=messages, system=system, tools=[tool])
        one, other = (seen.prompt.tolist() for seen in server.engine.seen)
        assert one == other
        body = {"messages": messages, "system": system, "tools": [tool]}
        assert (await server.post(f"{PATH}/count_tokens", body)).json == {"input_tokens": len(one)}


def written(parts: list[OutputDelta], *, shows_thoughts: bool) -> tuple[list[Any], str]:
    """The blocks that a stream of parts makes, and the order of their events."""
    writer = MessageWriter(SERVED, Seals("s").seal, shows_thoughts=shows_thoughts)
    events: list[MessageEvent] = [event for part in parts for event in writer.push(part)]
    blocks: list[Any] = []
    order: list[str] = []
    for event in events:
        kind = type(event).__name__
        if isinstance(event, BlockStart):
            assert event.index == len(blocks)
            blocks.append([type(event.content_block).__name__, getattr(event.content_block, "name", ""), ""])
        elif isinstance(event, BlockDelta):
            assert event.index == len(blocks) - 1
            kind = type(event.delta).__name__
            (text,) = event.delta.__rich_repr__()
            blocks[-1][2] += text[1] if kind != "SignatureDelta" else f"({text[1]})"
        if order[-1:] != [kind] or kind == "BlockStop":
            order.append(kind)
    return blocks, " ".join(order)


SERVED = ServedModel(name="m", root="m", vocab_size=9, created=0, fingerprint="f")
TEXTS = st.text(" \na{", max_size=4)
REPLIES = st.lists(
    st.one_of(
        st.tuples(st.just(Kind.CONTENT), TEXTS),
        st.tuples(st.just(Kind.THOUGHT), TEXTS),
        st.tuples(st.just(Kind.CALL), TEXTS),
    ),
    max_size=6,
)


@given(reply=REPLIES, shows_thoughts=st.booleans(), is_cut=st.booleans(), data=st.data())
@settings(deadline=None)
def test_any_partition_gives_the_same_blocks(
    reply: list[tuple[Kind, str]], shows_thoughts: bool, is_cut: bool, data: st.DataObject
) -> None:
    """One event of one character each, against all in one part; texts between parts of one kind run together."""
    events: list[Event] = []
    for kind, text in reply:
        if kind is Kind.CALL:
            events += [Event(kind, "look", 0, 0, "i")]
            events += [Event(Kind.ARGUMENTS, char, 0, 0) for char in text] + [Event(Kind.CALL_END, "", 0, 0)]
        else:
            events += [Event(kind, char, 0, 0) for char in text]
    if is_cut and events and events[-1].kind is Kind.CALL_END:
        events.pop()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))))
    pieces = [events[start:end] for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    end = FinishReason.LENGTH if is_cut else FinishReason.STOP
    parts = [OutputDelta(0, "", [], b"", FinishReason.RUNNING, None, piece) for piece in pieces]
    last = OutputDelta(0, "", [], b"", end, None, [Event(Kind.END, "", 0, 0)])
    whole = [OutputDelta(0, "", [], b"", end, None, [*events, Event(Kind.END, "", 0, 0)])]
    blocks, order = written([*parts, last], shows_thoughts=shows_thoughts)
    assert (blocks, order) == written(whole, shows_thoughts=shows_thoughts)
    assert order.count("BlockStart") == order.count("BlockStop") == len(blocks)
    content = "".join(text for kind, text in reply if kind is Kind.CONTENT)
    told = "".join(text for kind, _, text in blocks if kind == "TextContent")
    assert "".join(told.split()) == "".join(content.split()), "no word is lost"
    assert not any(kind == "TextContent" and not text.strip() for kind, _, text in blocks) or len(blocks) == 1
    thought = "".join(text for kind, text in reply if kind is Kind.THOUGHT)
    sealed = "".join(
        Seals("s").open(text[text.index("(") + 1 : -1]) or "" for kind, _, text in blocks if kind == "ThinkingContent"
    )
    assert sealed == thought, "signatures hold the thoughts whether they are shown or not"


async def test_text_alone_is_one_block_whatever_it_is() -> None:
    for text in ("Yes.", " \n", ""):
        async with serving(text) as server:
            assert (await ask(server))["content"] == ([{"type": "text", "text": text}] if text else [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "{}"),
        ('{"a":  1.0}', '{"a":  1.0}'),
        ('{"a": ' + "9" * 30 + "}", '{"a": ' + "9" * 30 + "}"),
        ('{"a": NaN}', '{"INVALID_JSON":"{\\"a\\": NaN}"}'),
        ('{"a', '{"INVALID_JSON":"{\\"a"}'),
        ("[1]", '{"INVALID_JSON":"[1]"}'),
        ('{"a": "\n"}', '{"INVALID_JSON":"{\\"a\\": \\"\\n\\"}"}'),
    ],
)
def test_arguments_are_as_generated_or_within_an_object(arguments: str, expected: str) -> None:
    assert bytes(input_of(arguments)).decode() == expected


async def test_what_is_ignored_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Callable[[str], Any] = lambda part: server.metric("hiserve:ignored_request_parts_total", part=part)  # noqa: E731
    async with serving("Yes.") as server:
        await ask(
            server,
            system=[{"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"}],
            tools=[{"type": "web_search_20250305", "name": "web_search"}, LOOK | {"defer_loading": True}],
            thinking={"type": "enabled", "budget_tokens": 2000},
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        )
        for part in ("billing_header", "hosted_tool", "deferred_tool", "context_edit"):
            assert await parts(part) == 1, part
        assert await parts("effort") == await parts("thought") == 0


@pytest.mark.parametrize("keeps", [False, True])
async def test_the_billing_header_of_a_session_is_left_out_unless_it_is_kept(keeps: bool) -> None:
    made = make_server(FakeEngineClient(script=lambda _: script("Yes.", 1)), keep_volatile=keeps)
    header = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.572;"}]
    words = [{"type": "text", "text": "Be short."}]
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        for system in (words, header + words, words + header):
            await ask(made, system=system)
    without, first, later = (seen.prompt.tolist() for seen in made.engine.seen)
    assert (without == first) != keeps
    assert without != later, "elsewhere it is text"


async def test_sampling_fields_reach_the_engine() -> None:
    async with serving("Yes.") as server:
        await ask(server, temperature=0.5, top_p=0.9, top_k=5, seed=7, stop_sequences=["x"], min_p=0.1)
        (seen,) = server.engine.seen
    wanted = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=7, stop=("x",), min_p=0.1, max_tokens=100)
    assert seen.sampling == wanted


async def test_a_prompt_may_end_within_the_reply() -> None:
    async with serving("short.") as server:
        await ask(server, messages=[USER, {"role": "assistant", "content": "I am "}])
        prompt = TOKENIZER.decode(server.engine.seen[0].prompt, skip_hidden=False)
    assert prompt.endswith("<|assistant|>I am ")
    assert tiny_text.END not in server.engine.seen[0].prompt[-3:]


async def test_a_coding_agents_requests_share_their_prefix() -> None:
    """The fields that Claude Code sends: sessions differ in the billing header alone, turns in the form of a system message."""

    def step(session: str, *later: Any, is_list: bool) -> dict[str, Any]:
        reminder = "The folder is /src."
        system = [{"type": "text", "text": reminder}]
        cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        return {
            "model": "tiny",
            "max_tokens": 32_000,
            "stream": True,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.330.{session}; cc_entrypoint=sdk-cli;"},
                {"type": "text", "text": "You are an agent. ", **cached},
                {"type": "text", "text": "Be short.", **cached},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi", **cached}]},
                {"role": "system", "content": system if is_list else reminder},
                *later,
            ],
            "tools": [LOOK, LOOK | {"name": "found_later", "defer_loading": True}],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": '{"session_id": "x"}'},
        }  # fmt: skip

    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "a,b", "x_api_key": "none"}
    async with serving(CALL) as server:
        for session in ("572", "bf5"):
            await server.call("POST", f"{PATH}?beta=true", step(session, is_list=True), **headers).end()
        call = {"type": "tool_use", "id": "1", "name": "look", "input": json.loads(ARGUMENTS)}
        later = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [RESULT]}]
        reply = await server.call("POST", f"{PATH}?beta=true", step("572", *later, is_list=False), **headers).end()
        first, other, second = (seen.prompt.tolist() for seen in server.engine.seen)
    assert reply.status == 200, reply.text
    assert first == other
    ids = [token for delta in script(CALL, 1) for token in delta][:-1]
    assert second[: len(first) + len(ids)] == first + ids, "what is new comes after the whole of the last step"


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "found"}


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_arguments_that_are_nested_too_deeply_are_no_json_object(depth: int) -> None:
    written = '{"a": ' + "[" * depth + "]" * depth + "}"
    assert json.loads(bytes(input_of(written))) == {"INVALID_JSON": written}
