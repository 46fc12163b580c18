"""A chat template in the manner of gpt-oss: what its probes find, and conversations that it would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.request import SamplingParams
from hiserve.errors import RequestError
from hiserve.text.conversation import Call, Conversation, Result, Text, Thought, Turn
from hiserve.text.reader.buffer import Kind
from hiserve.text.reader.formats import BY_NAME, find_format
from hiserve.text.reader.marks import ReplySyntax
from hiserve.text.reader.reader import Reader, ReplyStart
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.probes import TemplateAbilities, probe
from hiserve.text.tokens.detokenizer import TokenBytes
from tests.helpers.reply_formats import STOP, TEMPLATES, TOOLS, read, tokenizer_of

SOURCE = (TEMPLATES / "gpt_oss.jinja").read_text()
TEMPLATE = ChatTemplate(SOURCE)
USER = Turn("user", (Text("Where?"),))
FOUND = Turn("tool", (Result("1", "here"),))
START = "<|start|>assistant"


def calling(*parts: Any) -> Turn:
    return Turn("assistant", (*parts, Call("1", "look", '{"text": "a"}')))


def rendered(*turns: Turn, **options: Any) -> str:
    return TEMPLATE.render(Conversation(turns=turns, tools=TOOLS, **options))


def test_its_format_and_switches_are_found() -> None:
    assert find_format(SOURCE).name == "harmony"  # type: ignore[union-attr]
    assert probe(TEMPLATE) == TemplateAbilities(
        tools=True, thoughts="turn", effort_switch="reasoning_effort", turn_end="<|return|>"
    )


def test_the_effort_is_the_requests_or_medium() -> None:
    assert "\n\nReasoning: medium\n" in rendered(USER)
    assert "\n\nReasoning: high\n" in rendered(USER, template_kwargs=probe(TEMPLATE).variables(effort="high"))


def test_a_thought_before_a_call_is_shown_until_the_answer() -> None:
    turns = (USER, calling(Thought("so"), Text("")), FOUND)
    called = f'{START} to=functions.look<|channel|>commentary json<|message|>{{"text": "a"}}<|call|>'
    result = '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"here"<|end|>'
    shown = f"{START}<|channel|>analysis<|message|>so<|end|>{called}{result}"
    assert rendered(*turns).endswith(shown + START)
    later = rendered(*turns, Turn("assistant", (Thought("then"), Text("There."))), USER)
    assert "analysis<|message|>" not in later
    assert f"{called}{result}{START}<|channel|>final<|message|>There.<|end|>" in later


def test_a_text_between_thought_and_call_is_the_end_of_the_thought() -> None:
    """The template refuses all three; a client that keeps its messages would never get another reply."""
    assert not TEMPLATE.takes_spoken_calls
    turns = (USER, calling(Thought("so"), Text("I look.")), FOUND)
    assert f"{START}<|channel|>analysis<|message|>so\n\nI look.<|end|>{START} to=functions.look" in rendered(*turns)
    assert f"analysis<|message|>I look.<|end|>{START} to=" in rendered(USER, calling(Text("I look.")), FOUND)
    with pytest.raises(RequestError, match="a result without a call"):
        rendered(USER, FOUND)


@pytest.mark.parametrize("name", ["harmony", "hermes", "mistral", "llama3_json"])
def test_templates_that_take_all_three_show_them_apart(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())
    assert template.takes_spoken_calls and template.takes_bare_tools


def test_instructions_are_the_developers_wherever_they_stand() -> None:
    text = rendered(Turn("system", (Text("Be brief."),)), USER)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools" in text
    later = rendered(USER, Turn("system", (Text("Be brief."),)))
    assert "Where?\n\n<system-reminder>\nBe brief.\n</system-reminder><|end|>" in later


def test_a_tool_without_a_description_has_an_empty_one() -> None:
    """The template adds it to a text, which fails without one."""
    assert not TEMPLATE.takes_bare_tools
    assert "namespace functions {\n\n// \ntype look = (_: {\n" in rendered(USER)
    described = [{"type": "function", "function": TOOLS[0]["function"] | {"description": "Looks."}}]  # type: ignore[operator]
    assert "// Looks.\ntype look" in TEMPLATE.render(Conversation(turns=(USER,), tools=described))


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>"])
def test_marks_that_are_end_tokens_end_a_reply(end: str) -> None:
    """The model's files name both among its end tokens."""
    row = BY_NAME["harmony"]
    tokenizer = tokenizer_of("harmony", by_token=True)
    said = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    last = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"text": "a"}'
    text = said + (last if end == "<|call|>" else "<|channel|>final<|message|>There.")
    ids = tokenizer.encode(text + end, add_special_tokens=False).tolist()
    reading = Reader(
        ReplySyntax(row, tokenizer, is_named=True), TokenBytes(tokenizer), SamplingParams(), ReplyStart(TOOLS)
    )
    events = read(reading, ids, [1] * len(ids), STOP)[0]
    shown = [(event.kind, event.text) for event in events if event.text or event.kind is Kind.CALL_END]
    called = [(Kind.CALL, "look"), (Kind.ARGUMENTS, '{"text": "a"}'), (Kind.CALL_END, "")]
    assert shown == [(Kind.THOUGHT, "so"), *(called if end == "<|call|>" else [(Kind.CONTENT, "There.")])]
