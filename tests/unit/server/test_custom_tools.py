"""Custom tools in chat completions, as OpenAI's own client uses them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.server.openai.format import CustomEvents
from hiserve.text.reader.buffer import Event, Kind
from tests.unit.server.tool_replies import ARGUMENTS, CALL, SOURCE, TOOL, USER, Trusting, client_of, script, serving

RULES = {"syntax": "lark", "definition": "start: /x+/ start?"}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": {"type": "grammar", "grammar": RULES}}}  # fmt: skip
NOTE = {"type": "custom", "custom": {"name": "note"}}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "xx\\n\\"x\\""}}\n</tool_call>'
TEXT = f"{CALL}\n{PATCHED}"


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "move", "format": form}}


async def test_a_call_of_a_custom_tool_has_its_input_and_goes_back() -> None:
    tools: list[Any] = [TOOL, PATCH]
    async with serving(TEXT, template=SOURCE) as server, client_of(server) as client:
        reply = await client.chat.completions.create(model="tiny", messages=[USER], tools=tools)  # type: ignore[list-item]
        message = reply.choices[0].message
        look, patch = message.tool_calls or ()
        assert (look.type, patch.type) == ("function", "custom")
        assert (patch.custom.name, patch.custom.input) == ("patch", 'xx\n"x"')
        assert reply.choices[0].finish_reason == "tool_calls"
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in (look, patch)]
        history: Any = [USER, message.to_dict(), *results]
        await client.chat.completions.create(model="tiny", messages=history, tools=tools)
        first, second = server.engine.seen
    reply_ids = [index for delta in script(TEXT, 1) for index in delta]
    assert second.prompt.tolist()[: len(first.prompt) + len(reply_ids)] == [*first.prompt.tolist(), *reply_ids]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_the_input_of_a_custom_tool_is_streamed_for_each_choice(size: int) -> None:
    whole: dict[tuple[int, int], dict[str, str]] = {}
    async with serving(f"{TEXT}\n{CALL}", size, template=SOURCE) as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[USER], tools=[TOOL, PATCH], n=2, stream=True  # type: ignore[list-item]
        )  # fmt: skip
        async for chunk in stream:
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    given = call.to_dict()
                    kind = whole.setdefault((choice.index, call.index), {"type": str(given.get("type"))})
                    for name, text in given.get("custom", given.get("function")).items():  # type: ignore[attr-defined, union-attr]
                        kind[name] = kind.get(name, "") + text
    patch = {"type": "custom", "name": "patch", "input": 'xx\n"x"'}
    assert [whole[choice, 1] for choice in (0, 1)] == [patch, patch]
    look = {"type": "function", "name": "look", "arguments": ARGUMENTS}
    assert [whole[choice, index] for choice in (0, 1) for index in (0, 2)] == [look] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_an_input_that_was_cut_is_shown_up_to_the_cut(stream: bool) -> None:
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "half \\'
    async with serving(text, template=SOURCE) as server:
        body = {"messages": [USER], "tools": [PATCH], "stream": stream}
        call = await server.post("/v1/chat/completions", body)
    shown = re.findall(r'"input":"([^"]*)"', call.text)
    assert "".join(shown) == r"half \\"


def test_arguments_of_another_form_are_shown_before_the_next_call() -> None:
    calls = [("patch", '{"x": 1}'), ("look", "{}")]
    events = [
        event
        for name, arguments in calls
        for event in (
            Event(Kind.CALL, name, 0, 1),
            Event(Kind.ARGUMENTS, arguments, 1, 5),
            Event(Kind.CALL_END, "", 5, 6),
        )
    ]
    shown = [*CustomEvents({"patch"}).read(events, is_last=False)]
    assert (
        "|".join(event.text or event.kind.name for event in shown)
        == 'patch|ARGUMENTS|{"x": 1}|CALL_END|look|{}|CALL_END'
    )


def test_the_rest_of_an_input_comes_with_the_last_delta_where_its_call_does_not_end() -> None:
    made = CustomEvents({"patch"})
    call = [Event(Kind.CALL, "patch", 0, 1), Event(Kind.ARGUMENTS, '{"input": "half \\', 1, 5)]
    shown = [*made.read(call, is_last=False), *made.read([], is_last=True)]
    assert [event.text for event in shown] == ["patch", "half ", "\\"]


@pytest.mark.parametrize(
    ("choice", "names", "num_tools"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, ["patch"], 3),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH, NOTE]}}, ["patch", "note"], 3),
        ("required", ["look", "patch", "note"], 3),
    ],
)  # fmt: skip
async def test_a_custom_tool_can_be_chosen(choice: Any, names: list[str], num_tools: int) -> None:
    vetting = Trusting()
    async with serving(TEXT, vetting=vetting, template=SOURCE) as server:
        body = {"messages": [USER], "tools": [TOOL, PATCH, NOTE], "tool_choice": choice}
        call = await server.post("/v1/chat/completions", body)
    assert call.status == 200, call.text
    ((grammar, param),) = (asked for asked in vetting.asked if "definition" not in asked[1])
    assert param == "tool_choice"
    assert [
        name for name in ("look", "patch", "note") if f'"{name}' in grammar.text or f'\\"{name}' in grammar.text
    ] == names


async def test_its_grammar_is_held_where_it_is_regular_and_named_where_not() -> None:
    vetting = Trusting()
    held = [with_grammar("regex", "up|down [1-9]"), with_grammar("lark", 'start: "up" | "down" /[1-9]/')]
    async with serving(TEXT, vetting=vetting, template=SOURCE) as server:
        for tool in held:
            call = await server.post("/v1/chat/completions", {"messages": [USER], "tools": [tool]})
            assert "x-hiserve-warning" not in call.headers
        call = await server.post("/v1/chat/completions", {"messages": [USER], "tools": [held[0], PATCH]})
        counted = await server.metric("hiserve:ignored_request_parts_total", part="tool_grammar")
    fact = "the model sees the grammars of these tools, but they are not held"
    assert call.headers["x-hiserve-warning"] == f"{fact}: patch"
    assert counted == 1
    definition = "tools[1].custom.format.grammar.definition"
    assert [param for _, param in vetting.asked] == ["tools", "tools", definition, "tools"], "under auto too"
    assert "up|down [1-9]" in vetting.asked[0][0].text


async def test_rules_that_are_no_grammar_are_refused_at_their_field() -> None:
    class Refusing(Trusting):
        async def check(self, grammar: Grammar, param: str, **_: Any) -> tuple[Grammar, list[str]]:
            raise RequestError(f"{param} cannot be used as a grammar.", code="invalid_grammar", param=param)

    async with serving(TEXT, vetting=Refusing(), template=SOURCE) as server:
        for tool in (PATCH, with_grammar("regex", "a)(b"), with_grammar("lark", "start: /a)(b/")):
            call = await server.post("/v1/chat/completions", {"messages": [USER], "tools": [tool]})
            assert (call.status, server.engine.seen) == (400, [])
            assert call.json["error"]["param"] == "tools[0].custom.format.grammar.definition"


async def test_an_expression_that_closes_groups_of_others_is_tried_by_itself() -> None:
    vetting = Trusting()
    async with serving(TEXT, vetting=vetting, template=SOURCE) as server:
        tools = [with_grammar("regex", "a)(b")]
        await server.post("/v1/chat/completions", {"messages": [USER], "tools": tools})
    assert vetting.asked[0] == (Grammar.of("regex", "a)(b"), "tools[0].custom.format.grammar.definition")
    assert all("a)(b" not in grammar.text for grammar, _ in vetting.asked[1:]), "held with the brackets of others"


LONG = "too long " * 1000
RESPONSE_PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", **RULES}}
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER | {"content": LONG}], "tools": [PATCH]},
    "/v1/responses": {"input": LONG, "tools": [RESPONSE_PATCH]},
    "/v1/messages": {"messages": [USER | {"content": LONG}], "max_tokens": 1, "regex": "a"},
    "/v1/completions": {"prompt": LONG, "regex": "a"},
    "/generate": {"text": LONG, "sampling_params": {"regex": "a"}},
}


@pytest.mark.parametrize("path", TOO_LONG)
async def test_no_grammar_of_a_request_that_does_not_fit_is_tried(path: str) -> None:
    vetting = Trusting()
    async with serving(TEXT, vetting=vetting, template=SOURCE) as server:
        call = await server.post(path, TOO_LONG[path])
        short = {"max_tokens": 5000, "prompt": "Hi", "regex": "a"}
        reply = await server.post("/v1/completions", short)
    assert (call.status, vetting.asked) == (400, []), call.text
    assert ("context" in call.text or "too long" in call.text) and reply.json["error"][
        "code"
    ] == "context_length_exceeded"


async def test_a_custom_tool_whose_name_cannot_be_called_is_named() -> None:
    tool = {"type": "custom", "custom": {"name": "a b"}}
    async with serving(TEXT, template=SOURCE) as server:
        body = {"messages": [USER], "tools": [TOOL, tool], "tool_choice": "required"}
        call = await server.post("/v1/chat/completions", body)
    assert (call.status, call.json["error"]["param"]) == (400, "tools[1].custom.name")


async def test_a_custom_tool_with_the_name_of_a_function_is_refused() -> None:
    async with serving(TEXT, template=SOURCE) as server:
        tool = {"type": "custom", "custom": {"name": TOOL["function"]["name"]}}
        call = await server.post("/v1/chat/completions", {"messages": [USER], "tools": [TOOL, NOTE, NOTE, tool]})
    assert (call.status, call.json["error"]["param"]) == (400, "tools[3].custom.name")


async def test_an_allowed_tool_that_is_none_of_tools_is_named_by_its_place() -> None:
    allowed = [{"type": "custom", "custom": {"name": name}} for name in ("note", "none")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    async with serving(TEXT, template=SOURCE) as server:
        body = {"messages": [USER], "tools": [NOTE], "tool_choice": choice}
        call = await server.post("/v1/chat/completions", body)
    assert (call.status, call.json["error"]["param"]) == (400, "tool_choice.allowed_tools.tools[1]")


async def test_the_prompt_of_tokenize_is_that_of_the_chat() -> None:
    async with serving(TEXT, template=SOURCE, vetting=Trusting()) as server:
        body = {"messages": [USER], "tools": [with_grammar("regex", "up|down"), PATCH]}
        await server.post("/v1/chat/completions", body)
        tokenized = await server.post("/tokenize", body)
        (seen,) = server.engine.seen
    assert tokenized.json["tokens"] == seen.prompt.tolist()
