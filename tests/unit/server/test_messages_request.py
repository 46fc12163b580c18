"""Messages in Anthropic's form become turns; what cannot be shown is refused by its place, or left out and counted."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import RequestError
from hiserve.server.messages.request import NO_THREADS, MessagesPrompt, read_messages
from hiserve.server.messages.types import MessagesFields
from hiserve.server.reply.seals import Seals
from hiserve.text.abilities import Thinking
from hiserve.text.body.json import MAX_VALUES, decode
from hiserve.text.conversation import Call, Result, Text, Thought, ToolChoice, Turn

SEALS = Seals("s")
HI: Any = {"role": "user", "content": "Hi"}
LONE = "\ud800"


def read(*messages: Any, keeps_volatile: bool = False, **fields: Any) -> MessagesPrompt:
    given = decode({"messages": list(messages or [HI]), **fields}, MessagesFields)
    return read_messages(given, SEALS.open, keeps_volatile=keeps_volatile)


def turns(*messages: Any, **fields: Any) -> list[Turn]:
    return list(read(*messages, **fields).chat.turns)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(**given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "1", "name": "look", "input": given}


def result(content: Any, name: str = "1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


USER, RESULT = Turn("user", (Text("Hi"),)), {"role": "user", "content": [result("ok")]}


def test_text_is_a_turn_in_either_form() -> None:
    assert turns(HI) == turns({"role": "user", "content": [text("H"), text("i")]}) == [USER]
    assert turns(system="Be short.") == turns(system=[text("Be "), text("short.")])
    assert turns(system="Be short.")[0] == Turn("system", (Text("Be short."),))
    for empty in (None, "", [], [text("")]):
        assert turns(system=empty) == [USER]


def test_a_system_turn_in_the_middle_keeps_its_place() -> None:
    for content in ("Later.", [text("Later.")]):
        found = turns(HI, {"role": "system", "content": content}, said(text("Yes.")), HI, system="First.")
        assert [turn.role for turn in found] == ["system", "user", "system", "assistant", "user"]
        assert found[2] == Turn("system", (Text("Later."),))


def test_results_are_turns_of_the_tool_in_their_order() -> None:
    content = [result("one"), result([text("t"), text("wo")], "2"), text("And?"), result(None, "3"), text("Well?")]
    found = turns(HI, {"role": "user", "content": content})
    assert found[1:] == [
        Turn("tool", (Result("1", "one"),)),
        Turn("tool", (Result("2", "two"),)),
        Turn("user", (Text("And?"),)),
        Turn("tool", (Result("3", ""),)),
        Turn("user", (Text("Well?"),)),
    ]


@pytest.mark.parametrize("is_error", [True, False, None])
def test_a_result_says_whether_its_call_failed(is_error: bool | None) -> None:
    given = {"role": "user", "content": [result("gone") | {"is_error": is_error}]}
    assert turns(HI, given)[1] == Turn("tool", (Result("1", "gone", bool(is_error)),))


def test_an_assistant_has_thought_said_and_called() -> None:
    thinking = {"type": "thinking", "thinking": "shown", "signature": SEALS.seal("so")}
    hidden = {"type": "redacted_thinking", "data": SEALS.seal(" it is")}
    found = turns(HI, said(thinking, hidden, text("Wait"), use(where="é"), text("."), use()), RESULT)
    assert found[1] == Turn(
        "assistant",
        (
            Thought("so"), Thought(" it is"), Text("Wait."),
            Call("1", "look", '{"where": "é"}'), Call("1", "look", "{}"),
        ),
    )  # fmt: skip


def test_only_what_is_sealed_here_is_a_thought() -> None:
    """Not the text that is shown: nobody can say that the model thought it."""
    for signature in ("", "x", SEALS.seal("so")[:-4], Seals("other").seal("so"), LONE):
        asked = read(HI, said({"type": "thinking", "thinking": "so", "signature": signature}, text("Yes.")), HI)
        assert asked.chat.turns[1] == Turn("assistant", (Text("Yes."),))
        assert asked.ignored["thought"] == 1
        redacted = {"type": "redacted_thinking", "data": signature}
        assert read(HI, said(redacted, text("Yes.")), HI).ignored["thought"] == 1


def test_arguments_that_were_no_object_are_the_text_again() -> None:
    (call,) = (part for part in turns(HI, said(use(INVALID_JSON='{"a')), RESULT)[1].parts if isinstance(part, Call))
    assert call.arguments == '{"a'
    (call,) = (part for part in turns(HI, said(use(INVALID_JSON=5)), RESULT)[1].parts if isinstance(part, Call))
    assert call.arguments == '{"INVALID_JSON": 5}'


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    open_chat, closed = read(HI, said(text("I am"))).chat, read(HI, said(text("I am")), HI).chat
    assert (open_chat.continue_final_message, open_chat.add_generation_prompt) == (True, False)
    assert (closed.continue_final_message, closed.add_generation_prompt) == (False, True)


TOOL: dict[str, Any] = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SHOWN = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


def test_tools_are_those_that_the_client_runs() -> None:
    tools = [
        TOOL | {"cache_control": {"type": "ephemeral"}, "strict": True, "input_examples": [{}]},
        {"type": "custom", "name": "plain", "input_schema": {}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "browser_toolset_20260801"},
    ]
    asked = read(tools=tools)
    plain = {"type": "function", "function": {"name": "plain", "parameters": {}}}
    assert asked.chat.tools == [{"type": "function", "function": SHOWN}, plain]
    assert asked.ignored["hosted_tool"] == 3
    assert read(tools=tools[2:]).chat.tools is None
    assert read(tools=[]).chat.tools is None


def test_a_deferred_tool_is_shown_from_the_search_on_that_found_it() -> None:
    tools = [TOOL | {"defer_loading": True}, TOOL | {"name": "b", "defer_loading": True}]
    before = read(tools=tools)
    assert (before.chat.tools, before.ignored["deferred_tool"]) == (None, 2)
    found = result([text("found"), {"type": "tool_reference", "tool_name": "look"}])
    after = read(HI, said(use()), {"role": "user", "content": [found]}, tools=tools)
    assert after.chat.tools == [{"type": "function", "function": SHOWN}]
    assert after.ignored["deferred_tool"] == 1
    assert after.chat.turns[2] == Turn("tool", (Result("1", "found"),))


def test_a_choice_of_tools() -> None:
    assert read(tools=[TOOL], tool_choice={"type": "none"}).chat.tools is None
    for choice in (None, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}):
        chat = read(tools=[TOOL], tool_choice=choice).chat
        assert (len(chat.tools or ()), chat.is_single) == (1, False)
    assert read(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).chat.is_single
    other = TOOL | {"name": "b", "strict": True}
    for asked, choice, is_single in (
        ({"type": "auto"}, ToolChoice(strict=("b",)), False),
        ({"type": "any"}, ToolChoice(True, None, ("b",)), False),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(True, None, ("b",)), True),
        ({"type": "tool", "name": "look"}, ToolChoice(True, ("look",), ("b",)), True),
        ({"type": "none"}, ToolChoice(), False),
    ):
        chat = read(tools=[TOOL, other], tool_choice=asked).chat
        assert (chat.choice, chat.is_single) == (choice, is_single)


@pytest.mark.parametrize(
    ("fields", "thinking", "ignored"),
    [
        ({}, Thinking(), {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Thinking(True, budget=2048), {}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking(True), {}),
        ({"thinking": {"type": "disabled"}}, Thinking(False), {}),
        ({"output_config": {"effort": "low"}}, Thinking(None, "low"), {}),
        ({"output_config": {"effort": "max"}}, Thinking(None, "high"), {}),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            Thinking(keeps=True),
            {},
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
            Thinking(keeps=True),
            {},
        ),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, Thinking(), {}),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, Thinking(), {"context_edit": 1}),
        ({"context_management": {}}, Thinking(), {}),
    ],
)
def test_what_is_asked_of_thoughts(fields: dict[str, Any], thinking: Thinking, ignored: dict[str, int]) -> None:
    asked = read(**fields)
    assert asked.thinking == thinking
    assert {name: number for name, number in asked.ignored.items() if number} == ignored
    shows = decode({"messages": [HI], **fields}, MessagesFields).shows_thoughts
    assert shows == (fields.get("thinking", {}).get("display") != "omitted")


IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}
WIDE = {"a": [0] * MAX_VALUES}
FAULTS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([{"role": "user", "content": [IMAGE]}], {}, "messages[0].content[0].type"),
    ([HI, {"role": "user", "content": [text("x"), {"type": "document"}]}], {}, "messages[1].content[1].type"),
    ([{"role": "user", "content": [{"type": "container_upload"}]}], {}, "messages[0].content[0].type"),
    ([{"role": "user", "content": [result([IMAGE])]}], {}, "messages[0].content[0].content[0].type"),
    ([{"role": "user", "content": [use()]}], {}, "messages[0].content[0]"),
    ([said(result("x"))], {}, "messages[0].content[0]"),
    ([HI, {"role": "system", "content": [result("x")]}], {}, "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "thinking", "signature": "x"}]}], {}, "messages[0].content[0]"),
    ([said({"type": "thinking", "thinking": "x"})], {}, "messages[0].content[0].signature"),
    ([said({"type": "tool_use", "id": "", "name": "x", "input": {}})], {}, "messages[0].content[0].id"),
    ([said({"type": "tool_use", "id": "1", "name": "x", "input": "{}"})], {}, "messages[0].content[0].input"),
    ([said(use(**WIDE)), RESULT], {}, "messages[0].content[0]"),
    ([said(use(a=LONE)), RESULT], {}, "messages[0].content[0]"),
    ([HI, said(use())], {}, "messages[1]"),
    ([{"role": "user", "content": LONE}], {}, "messages[0].content"),
    ([{"role": "user", "content": [text("x" + LONE)]}], {}, "messages[0].content"),
    ([said(text(LONE)), HI], {}, "messages[0].content"),
    ([{"role": "user", "content": [result(LONE)]}], {}, "messages[0].content[0].content"),
    ([{"role": "user", "content": [result("x", LONE)]}], {}, "messages[0].content[0].tool_use_id"),
    ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
    ([HI], {"system": [text(LONE)]}, "system"),
    ([HI], {"system": [IMAGE]}, "system[0].type"),
    ([HI], {"system": [text("x"), text("y") | {"cache_control": 5}]}, "system[1].cache_control"),
    ([{"role": "user", "content": [text("x") | {"cache_control": 5}]}], {}, "messages[0].content[0].cache_control"),
    ([HI], {"tools": [TOOL | {"cache_control": {"type": "x"}}]}, "tools[0].cache_control.type"),
    ([HI], {"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ([HI], {"tools": [TOOL, {"input_schema": {}}]}, "tools[1].name"),
    ([HI], {"tools": [TOOL | {"input_schema": WIDE}]}, "tools[0]"),
    ([HI], {"tools": [TOOL | {"description": LONE}]}, "tools[0]"),
    ([HI], {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ([HI], {"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ([HI], {"thread": {"type": "create"}}, "thread"),
    ([HI], {"thinking": {"type": "sometimes"}}, "thinking.type"),
]


@pytest.mark.parametrize(("messages", "fields", "param"), FAULTS, ids=lambda value: ascii(value)[:60])
def test_a_fault_names_its_place(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(*messages, **fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 300
    assert (caught.value.code == NO_THREADS) == ("thread" in fields)
    if param.endswith("content[0].type"):
        assert '"text"' in caught.value.message
