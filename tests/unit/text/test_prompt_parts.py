"""The part of a conversation at which a cached prefix ends is told from the text before it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.text.conversation import Turn
from hiserve.text.prompt.parts import place_after, retained
from hiserve.text.prompt.reply_tokens import with_thoughts
from hiserve.text.template.chat_template import ChatTemplate
from tests.helpers.chats import chat_of
from tests.helpers.reply_formats import NAMES, TOOLS, template_of
from tests.helpers.thinking_templates import FAMILIES

WORDS = st.text("abc de.\n", min_size=1, max_size=30).filter(str.strip)
CALL = {"function": {"name": "look", "arguments": '{"text": "the harbour in the north"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Where are the ships?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "They are at sea."},
    {"role": "assistant", "content": "Out at sea.", "reasoning_content": "The result says so."},
    {"role": "user", "content": "When will they be back?"},
]
PARTS = [
    (0, "system", "terse"),
    (0, "tools", "look"),
    (1, "text", "are the"),
    (2, "thought", "must look"),
    (2, "text", "me see"),
    (2, "call", "look"),
    (2, "call", "harbour"),
    (3, "text", "at sea"),
    (4, "thought", "result"),
    (4, "text", "at sea"),
    (5, "text", "will they"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_found_by_the_text_before_it(name: str) -> None:
    template = template_of(name)
    chat = chat_of(HISTORY, tools=TOOLS)
    text, at = template.render(chat), 0
    parts = list(PARTS)
    if "reasoning_content" not in template.sources.source:
        parts = [part for part in parts if part[1] != "thought"]
    if text.index("look") < text.index("terse"):
        parts[:2] = parts[1::-1]
    for turn, part, words in parts:
        at = text.index(words, at) + 3
        if part == "tools" or (part == "system" and parts[0][1] == "tools"):
            continue  # tools before or within the system turn: either is told
        place = place_after(chat, text[:at])
        assert place == (turn, part, turn == 5), (words, text[max(0, at - 60) : at])
    assert place_after(chat, text) == (6, "text", True)
    assert place_after(chat, "<|system|>You are te")[:2] == (0, "system")
    assert place_after(chat, "<|system|>You are terse.\nTools: [")[:2] == (0, "tools")


@pytest.mark.parametrize("name", ["hybrid", "last_reply", "clearing"])
def test_a_thought_that_the_template_drops_is_the_part_that_is_lost(name: str) -> None:
    template = ChatTemplate(FAMILIES[name].source)
    chat = chat_of(HISTORY, tools=TOOLS)
    before, now = (
        template.render(chat_of(HISTORY[:-1], tools=TOOLS, add_generation_prompt=False)),
        template.render(chat),
    )
    same = next(at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other)
    assert place_after(chat, now[:same]) == (4 if name == "last_reply" else 2, "thought", False)
    begun = now.index("me see")
    assert place_after(chat, now[:begun])[:2] == (2, "text"), "the words after it have begun: nothing of it was lost"


def test_a_call_in_any_spelling_is_behind_a_later_result() -> None:
    chat = chat_of(HISTORY, tools=TOOLS)
    text = "You are terse. Where are the ships? I must look. Let me see. look(text: the harbour in the north)|They"
    assert place_after(chat, text)[:2] == (3, "text")


@given(st.lists(WORDS, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_the_place_never_goes_back_as_the_text_grows(words: list[str], data: st.DataObject) -> None:
    roles = ["user", "assistant"]
    chat = chat_of({"role": roles[at % 2], "content": f"{at}: {text}"} for at, text in enumerate(words))
    text = ChatTemplate(FAMILIES["silent"].source).render(chat)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    turns = [place_after(chat, text[:cut]).turn for cut in cuts]
    assert turns == sorted(turns)


def test_thoughts_are_those_that_the_template_was_given() -> None:
    chat = chat_of(HISTORY)
    assert with_thoughts(chat, {}) is chat


@pytest.mark.parametrize("name", NAMES)
def test_a_marked_part_is_retained_up_to_the_next_one(name: str) -> None:
    template = template_of(name)
    chat = chat_of(HISTORY, tools=TOOLS)
    text = template.render(chat)
    ends = {
        (1, 0): "are the ships?",
        (2, 1): "me see.",
        (2, 2): "in the north",
        (3, 0): "are at sea.",
        (5, 0): "be back?",
    }
    befores = {(1, 0): "me see", (2, 1): "harbour", (2, 2): "are at sea", (3, 0): "Out at sea", (5, 0): "\0"}
    if "tool_calls" not in template.sources.source:
        del ends[2, 2]
    for (turn, part), words in ends.items():
        marked = [
            msgspec.structs.replace(each, retain_s=300) if i == part else each
            for i, each in enumerate(chat.turns[turn].parts)
        ]
        turns = [
            Turn(each.role, tuple(marked), each.fields) if i == turn else each for i, each in enumerate(chat.turns)
        ]
        ((end, ttl_s),) = retained(msgspec.structs.replace(chat, turns=tuple(turns)), text)
        assert ttl_s == 300 and words in text[:end], (name, words)
        assert befores[turn, part] not in text[:end][text.index(words) :], (name, words)
    ((end, _),) = retained(msgspec.structs.replace(chat, tools_retain_s=60), text)
    assert '"look"' in text[:end] and "are the ships" not in text[:end]
