"""What a chat request says is checked, and brought to the form that templates expect, before it reaches one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hiserve.errors import RequestError
from hiserve.text.body.chat import MAX_MESSAGES, join_parts, parse_chat
from hiserve.text.body.json import MAX_DEPTH, MAX_VALUES, check_text
from hiserve.text.body.tools import MAX_TOOLS
from hiserve.text.conversation import Conversation, ToolChoice
from tests.helpers.slowness import least_cpu_s

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"where": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def assistant(*calls: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": list(calls), **more}]


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a template sees them."""
    return [turn.message for turn in parse_chat({"messages": messages}).turns]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_text_parts_are_joined_and_other_strings_kept() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = plain_messages(
        [{"role": "developer", "content": parts, "name": "ann", "tool_calls": [], "refusal": None, "x": 1}]
    )
    assert messages == [{"role": "system", "content": "one two", "name": "ann"}]


def test_a_message_that_refuses_is_text() -> None:
    assert plain_messages([{"role": "assistant", "content": None, "refusal": "I will not."}]) == [
        {"role": "assistant", "content": "I will not."}
    ]


def test_a_part_that_refuses_is_text_in_large_bodies_too() -> None:
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I will not."}]
    messages: list[Any] = [{"role": "assistant", "content": parts}]
    assert plain_messages(messages) == [{"role": "assistant", "content": "No. I will not."}]
    join_parts(messages)
    assert messages == [{"role": "assistant", "content": "No. I will not."}]


def user(content: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": "fine"}, {"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (user(None), "messages[1].content"),
        (user(7), "messages[1].content"),
        (user([]), "messages[1].content"),
        (user(["hi"]), "messages[1].content[0].type"),
        (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[1].content[1].type"),
        (user([{"type": "text"}]), "messages[1].content[0].text"),
        (user([{"type": "text", "text": 5}]), "messages[1].content[0].text"),
        (user([{"type": "refusal", "text": "no"}]), "messages[1].content[0].refusal"),
        (user([{"type": "refusal", "refusal": "a\udfff"}]), "messages[1].content"),
        (user("\ud800"), "messages[1].content"),
        (user([{"type": "text", "text": "a\udfff"}]), "messages[1].content"),
        (user("hi", name="\ud800"), "messages[1].name"),
        (user("hi", tool_calls=[CALL]), "messages[1].tool_calls"),
        (user("hi", name=7), "messages[1].name"),
        (user("hi", tool_call_id={}), "messages[1].tool_call_id"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
        (assistant(), "messages[0].content"),
        (assistant(CALL, content=7), "messages[0].content"),
        (assistant(content="x", function_call={"name": "f"}), "messages[0].function_call"),
        (assistant(content="x", refusal="no"), "messages[0].refusal"),
        (user(None, refusal="no"), "messages[1].refusal"),
        (assistant(refusal="\ud800"), "messages[0].content"),
        (assistant(content="x", audio={"id": "1"}), "messages[0].audio"),
        (assistant(content="x", reasoning_content=["hm"]), "messages[0].reasoning_content"),
        (assistant("find"), "messages[0].tool_calls[0].type"),
        (assistant(CALL, {**CALL, "type": "other"}), "messages[0].tool_calls[1].type"),
        (assistant(CALL, {**CALL, "type": "custom"}), "messages[0].tool_calls[1].custom"),
        (assistant({"type": "custom", "custom": {"name": "f", "input": 5}}), "messages[0].tool_calls[0].custom.input"),
        (assistant({"type": "custom", "custom": {"name": "f", "input": "\ud800"}}), "messages[0].tool_calls[0]"),
        (assistant({**CALL, "id": 1}), "messages[0].tool_calls[0].id"),
        (assistant({**CALL, "function": None}), "messages[0].tool_calls[0].function"),
        (assistant({**CALL, "function": {"name": ""}}), "messages[0].tool_calls[0].function.name"),
        (assistant({**CALL, "function": {"name": "\ud800"}}), "messages[0].tool_calls[0]"),
        (
            assistant({**CALL, "function": {"name": "f", "arguments": 1}}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (assistant({**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}), "messages[0].tool_calls[0]"),
        (assistant(*[CALL] * (MAX_TOOLS + 1)), "messages[0].tool_calls"),
        ([{**USER, "\ud800": "x"}], "messages[0]"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": messages})
    assert caught.value.param == param


def test_only_lone_surrogates_are_invalid_text() -> None:
    check_text("a😀\x00\uffff\ue000", "prompt")
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        check_text("a\udc00", "prompt")


def test_calls_of_tools_take_the_form_that_templates_expect() -> None:
    (message,) = plain_messages(assistant(CALL, content=None))
    function = {"name": "find", "arguments": {"where": "Oslo"}}
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function, "id": "c1"}],
    }


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", "[" * 20_000])
def test_arguments_that_spell_no_object_stay_as_the_model_wrote_them(arguments: str) -> None:
    (message,) = plain_messages(assistant({"function": {"name": "f", "arguments": arguments}}))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_arguments_of_all_calls_together_have_a_bounded_number_of_values() -> None:
    def call(text: str) -> dict[str, Any]:
        return assistant({"function": {"name": "f", "arguments": text}})[0]

    half = json.dumps({"a": [0] * (MAX_VALUES // 2 - 2)})
    code = json.dumps({"code": "f(a, [b], {c})\n" * MAX_VALUES})
    assert len(parse_chat({"messages": [call(half), call(code), call(half)]}).turns) == 3, (
        "what stands in strings is no value"
    )
    with pytest.raises(RequestError, match="arguments of the tool calls") as caught:
        parse_chat({"messages": [call(half), call(half), call(half)]})
    assert caught.value.param == "messages[2].tool_calls"


def test_reasoning_and_results_of_tools_are_kept() -> None:
    given = [
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    assert plain_messages(given) == given


def test_a_chat_has_everything_that_the_template_sees() -> None:
    kwargs = {"enable_thinking": False}
    body = {"messages": [USER], "tools": [TOOL], "documents": [{"text": "d"}], "chat_template_kwargs": kwargs, "x": 1}
    chat = parse_chat(body)
    assert (chat.messages, chat.tools, chat.documents, chat.template_kwargs) == (
        [USER],
        [TOOL],
        [{"text": "d"}],
        kwargs,
    )
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)


@pytest.mark.parametrize(
    "name", ["tools", "documents", "chat_template_kwargs", "chat_template", "continue_final_message"]
)
def test_null_and_empty_are_as_nothing(name: str) -> None:
    plain = parse_chat({"messages": [USER]})
    assert parse_chat({"messages": [USER], name: None}) == plain
    if name in ("tools", "documents"):
        assert parse_chat({"messages": [USER], name: []}) == plain


def test_a_tool_looks_the_same_to_the_template_whatever_the_order_of_its_fields() -> None:
    function = {"strict": True, "parameters": {"type": "object"}, "return": {"type": "string"}, "name": "find"}
    (shown,) = parse_chat({"messages": [USER], "tools": [{"type": "function", "function": function}]}).tools or ()
    assert list(shown["function"]) == ["name", "parameters", "return"]
    assert shown["function"].items() <= function.items()


def test_tools_that_must_not_be_called_are_left_out() -> None:
    assert parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).tools is None
    assert parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}).tools == [TOOL]


def test_a_continued_message_has_no_generation_prompt() -> None:
    chat = parse_chat({"messages": [USER], "continue_final_message": True})
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    assert parse_chat({"messages": [USER], "add_generation_prompt": False}).add_generation_prompt is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [TOOL, "x"]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "flat"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": 7}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH)}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": ["\ud800"]}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": [2**63]}}]}, "tools"),
        ({"documents": [{"x": -(2**63)}]}, "documents"),
        ({"chat_template_kwargs": {"x": 10**4000}}, "chat_template_kwargs"),
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents"),
        ({"documents": [{"x": [0] * MAX_VALUES}]}, "documents"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"\udfff": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": nested(MAX_DEPTH)}, "chat_template_kwargs"),
    ],
)
def test_malformed_fields_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": [USER], **fields})
    assert caught.value.param == param


NAMED = {"type": "function", "function": {"name": "find"}}


FIRST_ALLOWED = "tool_choice.allowed_tools.tools[0]"


def some(mode: str, *names: str) -> dict[str, Any]:
    """Some of the tools, as OpenAI spells them."""
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.mark.parametrize(
    ("given", "choice", "is_single"),
    [
        (None, ToolChoice(), False),
        ("auto", ToolChoice(), False),
        ("required", ToolChoice(True), False),
        (NAMED, ToolChoice(True, ("find",)), True),
        (some("auto", "find"), ToolChoice(False, ("find",), fields=(FIRST_ALLOWED,)), False),
        (some("required", "find"), ToolChoice(True, ("find",), fields=(FIRST_ALLOWED,)), False),
    ],
)
def test_a_choice_of_tools_is_read(given: Any, choice: ToolChoice, is_single: bool) -> None:
    chat = parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": given})
    assert (chat.choice, chat.is_single, chat.tools) == (choice, is_single, [TOOL])


@pytest.mark.parametrize(
    "given",
    [5, "any", {}, {"type": "function"}, {"type": "allowed_tools"}, some("required"), some("all", "find"),
     {"type": "function", "function": {}}],
)  # fmt: skip
def test_a_choice_of_tools_that_says_nothing_is_refused(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": given})
    assert (caught.value.param or "").startswith("tool_choice")


def test_a_null_is_no_object_of_another_type() -> None:
    """Clients with one type for all calls and tools write the fields that they do not use."""
    function, custom = {"name": "find"}, {"name": "note"}
    unused: dict[str, dict[str, Any]] = {"function": {"custom": None}, "custom": {"function": None}}

    def read(extra: dict[str, dict[str, Any]]) -> Conversation:
        tools = [{"type": "function", "function": function, **extra["function"]}, {"type": "custom", "custom": custom, **extra["custom"]}]  # fmt: skip
        calls = [
            {"type": "function", "function": {**function, "arguments": "{}"}, **extra["function"]},
            {"type": "custom", "custom": {**custom, "input": "a"}, **extra["custom"]},
        ]
        chosen = {"type": "custom", "custom": custom, **extra["custom"]}
        messages = [USER, {"role": "assistant", "tool_calls": calls}]
        return parse_chat({"messages": messages, "tools": tools, "tool_choice": chosen})

    assert read(unused) == read({"function": {}, "custom": {}})


def test_many_messages_are_read_in_bounded_time() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 100}] * MAX_MESSAGES}
    assert least_cpu_s(lambda: parse_chat(body), 2.0) < 2.0
    assert parse_chat(body).num_chars >= 100 * MAX_MESSAGES
