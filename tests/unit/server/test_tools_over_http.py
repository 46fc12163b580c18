"""Chats with tools and thoughts: replies read by their format, whole and streamed, as OpenAI's own client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, Grammar
from hiserve.core.usage import CacheUse
from tests.helpers.reply_formats import tokenizer_of
from tests.helpers.thinking_templates import FAMILIES
from tests.unit.server.conftest import TOKENIZER, Server
from tests.unit.server.tool_replies import ARGUMENTS, CALL, SOURCE, TOOL, TWO, USER, client_of, script, serving


async def test_openais_client_gets_thought_content_and_calls() -> None:
    async with serving(TWO) as server, client_of(server) as client:
        reply = await client.chat.completions.create(model="tiny", messages=[USER], tools=[TOOL])  # type: ignore[list-item]
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra == {"reasoning_content": "so"}
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == second.type == "function"
    assert (first.function.name, first.function.arguments) == ("look", ARGUMENTS), "as it was generated"
    assert first.id != second.id
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(script(TWO, 1))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
async def test_openais_client_puts_streamed_calls_together(size: int) -> None:
    async with serving(TWO, size) as server, client_of(server) as client:
        stream = client.chat.completions.stream(model="tiny", messages=[USER], tools=[TOOL])  # type: ignore[list-item]
        async with stream as events:
            chunks = [event.chunk async for event in events if event.type == "chunk"]
            message = (await events.get_final_completion()).choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS] * 2
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    for index in (0, 1):
        first, *others = [part for part in parts if part.index == index]
        assert first.id and first.type == "function" and first.function.name == "look"  # type: ignore[union-attr]
        assert all(part.id is None and part.function.name is None for part in others)  # type: ignore[union-attr]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    thoughts = [chunk.choices[0].delta.model_extra for chunk in chunks]
    assert "".join((extra or {}).get("reasoning_content", "") for extra in thoughts) == "so"


async def test_a_call_that_is_cut_ends_with_length() -> None:
    async with serving(f"Now.\n{CALL[:60]}") as server:
        server.engine.finish = FinishReason.LENGTH
        choice = (await server.chat("Hi", tools=[TOOL])).json["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert ARGUMENTS.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_calls_are_text_where_no_tools_may_be_called(fields: dict[str, Any]) -> None:
    async with serving(CALL, template=SOURCE) as server:
        choice = (await server.chat("Hi", **fields)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_mark_without_a_call_is_content_and_counted() -> None:
    text = "<tool_call>\nnothing\n</tool_call>"
    async with serving(text) as server:
        choice = (await server.chat("Hi", tools=[TOOL])).json["choices"][0]
        assert await server.metric("hiserve:unread_calls_total") == 1
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


async def test_one_call_at_most_ends_the_reply() -> None:
    async with serving(TWO) as server:
        reply = (await server.chat("Hi", tools=[TOOL], parallel_tool_calls=False)).json
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert reply["usage"]["completion_tokens"] < len(script(TWO, 1))


async def test_calls_and_results_reach_the_prompt() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "é"}'}}]
    messages = [
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    async with serving("Done.") as server:
        call = await server.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
        assert call.status == 200
        prompt = TOKENIZER.decode(server.engine.seen[0].prompt, skip_hidden=False)
    assert f"Be short.\n\nTools:\n{json.dumps(TOOL['function'])}\n" in prompt
    made = '<tool_call>\n{"name": "look", "arguments": {"where": "é"}}\n</tool_call>'
    assert f"<|assistant|>{made}<|end|><|tool|>found<|end|>" in prompt


@pytest.mark.parametrize("name", ["none", "hermes"])
async def test_the_operator_chooses_the_format(name: str) -> None:
    async with serving(TWO, reply_format=name) as server:
        message = (await server.chat("Hi", tools=[TOOL])).json["choices"][0]["message"]
    assert (message["content"] == TWO) == (name == "none")
    assert ("tool_calls" in message) == (name != "none")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_next_step_of_an_agent_begins_with_the_tokens_of_this_one(is_stream: bool) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"where":   "Oslo"}}\n</tool_call>'
    async with serving(text, template=SOURCE) as server, client_of(server) as client:
        fields: dict[str, Any] = {"model": "tiny", "tools": [TOOL]}
        async with client.chat.completions.stream(messages=[USER], **fields) as events:  # type: ignore[list-item]
            streamed = await events.get_final_completion()
        whole = await client.chat.completions.create(messages=[USER], **fields)  # type: ignore[list-item]
        message = (streamed if is_stream else whole).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        arguments = json.dumps(json.loads(call.function.arguments), separators=(",", ":"))
        calls = [{"id": call.id, "type": "function", "function": {"name": "look", "arguments": arguments}}]
        history = [
            USER,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": "x"},
        ]
        await client.chat.completions.create(messages=history, **fields)  # type: ignore[arg-type]
        first, *_, last = (seen.prompt.tolist() for seen in server.engine.seen)
    known = [*first, *(index for delta in script(text, 1) for index in delta)]
    assert last[: len(known)] == known


async def test_replies_in_prompts_are_counted_by_what_became_of_their_tokens() -> None:
    async with serving("Well.", template=SOURCE) as server:
        (choice,) = (await server.chat("Hi")).json["choices"]
        for content in (choice["message"]["content"], "Another."):
            history = [USER, {"role": "assistant", "content": content}, USER]
            assert (await server.post("/v1/chat/completions", {"messages": history})).status == 200
        metric = "hiserve:history_replies_total"
        counts = {kind: await server.metric(metric, tokens=kind) for kind in ("kept", "unknown", "cut")}
    assert counts == {"kept": 1, "unknown": 1, "cut": 0}


async def test_thoughts_of_earlier_turns_and_their_effort_follow_request_and_operator() -> None:
    history = [USER, {"role": "assistant", "content": "Yes", "reasoning_content": "secret"}, USER]

    async def prompt(server: Server, **fields: Any) -> str:
        call = await server.post("/v1/chat/completions", {"messages": history, **fields})
        assert call.status == 200
        return TOKENIZER.decode(server.engine.seen[-1].prompt, skip_hidden=False)

    source = FAMILIES["clearing"].source
    for keeps in (False, True):
        async with serving("Well.", template=source, keeps_thoughts=keeps) as server:
            assert ("secret" in await prompt(server)) == keeps
            for value in (False, True):
                switch = {"chat_template_kwargs": {"clear_thinking": value}}
                assert ("secret" in await prompt(server, **switch)) != value
            assert (await prompt(server)).endswith("<think>")
            assert (await prompt(server, reasoning_effort="none")).endswith("</think>")
            ids = (await server.post("/tokenize", {"messages": history})).json["tokens"]
            assert TOKENIZER.decode(ids, skip_hidden=False) == await prompt(server)
    async with serving("Well.", template=FAMILIES["effort"].source) as server:
        assert "Reasoning: low" in await prompt(server, reasoning_effort="low")
        assert "Reasoning: medium" in await prompt(server)
        shown = (await server.get("/server_info")).json["chat_template"]
    assert (shown["thoughts"], shown["effort_switch"]) == ("turn", "reasoning_effort")


async def test_a_miss_tells_the_turn_and_its_part() -> None:
    history = [
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": "Yes", "reasoning_content": "secret"},
        {"role": "user", "content": "And then?"},
    ]
    async with serving("Well.", template=FAMILIES["hybrid"].source) as server:

        async def miss(words: str, reason: str = "diverged_at", **fields: Any) -> Any:
            def cached(prompt: Int32Array) -> CacheUse:
                text = TOKENIZER.decode(prompt, skip_hidden=False)
                before = TOKENIZER.encode(text[: text.index(words)], add_special_tokens=False)
                return CacheUse(device=len(before) // 2, miss=reason, miss_at=len(before))

            server.engine.cached = cached
            body = {"messages": history, "tools": [TOOL], **fields}
            usage = (await server.post("/v1/chat/completions", body)).json["usage"]
            return usage["prompt_tokens_details"]["cache_miss"]

        shown = await miss("Yes")
        assert (shown["turn"], shown["part"]) == (2, "thought"), "the template has dropped it"
        assert (await miss("short"))["part"] == "system"
        assert (await miss("d then"))["turn"] == 3
        assert set(await miss("Yes", "page_remainder")) == {"reason", "at"}, "nothing is missing"
        counts = {
            (part, turn): await server.metric("hiserve:chat_cache_misses_total", part=part, turn=turn)
            for part, turn in (("thought", "history"), ("system", "history"), ("text", "new"), ("call", "new"))
        }
        assert list(counts.values()) == [1, 1, 1, 0]
        new = await server.metric("hiserve:chat_missed_tokens_total", part="text", turn="new")
        assert 0 < new < len(server.engine.seen[-1].prompt)
        server.engine.cached = CacheUse(miss="cold")
        call = await server.post("/v1/completions", {"prompt": "Hi"})
        assert set(call.json["usage"]["prompt_tokens_details"]["cache_miss"]) == {"reason", "at"}


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 5},
        {"thinking_budget": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"thinking_token_budget": 9, "thinking_budget": 5},
    ],
)
async def test_a_budget_of_thoughts_becomes_part_of_the_grammar(fields: dict[str, Any]) -> None:
    template = FAMILIES["clearing"].source
    marked = tokenizer_of("hermes", by_token=True)
    async with serving("Well.", template=template, tokenizer=marked, reply_format="thoughts") as server:
        await server.chat("Hi", max_tokens=50, **fields)
        await server.chat("Hi", max_tokens=50)
        await server.chat("Hi", max_tokens=5, **fields)
        await server.chat("Hi", max_tokens=50, reasoning_effort="none", **fields)
        held, *others = [seen.sampling.grammar for seen in server.engine.seen]
    assert held == Grammar.of("any", "", "</think>").within(5)
    assert others == [None] * 3, "without a budget, with one that is beyond the limit, without a thought"


async def test_a_budget_is_held_whatever_the_marks_of_thoughts_are() -> None:
    async with serving("Well.", template=FAMILIES["clearing"].source) as server:  # marks are text
        assert (await server.chat("Hi", thinking_budget=5)).status == 200
        assert server.engine.seen[-1].sampling.grammar == Grammar.of("any", "", "</think>").within(5)
    async with serving("Well.", template=FAMILIES["silent"].source) as server:
        assert (await server.chat("Hi", thinking_budget=5)).status == 200
        assert server.engine.seen[-1].sampling.grammar is None, "no thought exceeds it"
