"""What a chat template shows of thoughts, tools and system turns is found by rendering it."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import ConfigError
from hiserve.text.abilities import Abilities, Thinking
from hiserve.text.conversation import Conversation
from hiserve.text.prompt.reply_tokens import ReplyTokenCache
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.probes import probe
from hiserve.text.tokens.detokenizer import TokenBytes
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of
from tests.helpers.thinking_templates import FAMILIES

TOKENIZER = tiny_text.byte_level()
BYTES = TokenBytes(TOKENIZER)
USER = {"role": "user", "content": "Hi"}
LEFT = Thinking()
HISTORY = [USER, {"role": "assistant", "content": "Yes", "reasoning_content": "secret"}, USER]


def abilities(name: str, *, keeps_thoughts: bool = False) -> tuple[Abilities, ChatTemplate]:
    template = ChatTemplate(FAMILIES[name].source)
    return Abilities(TOKENIZER, BYTES, template, keeps_thoughts=keeps_thoughts), template


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probes_find_what_a_template_shows(name: str) -> None:
    family = FAMILIES[name]
    assert probe(ChatTemplate(family.source)) == family.shows


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_are_kept_where_the_template_can_and_refused_where_it_cannot(name: str) -> None:
    shows = FAMILIES[name].shows
    if not shows.keep_switch and shows.thoughts != "always":
        with pytest.raises(ConfigError, match="--thoughts keep"):
            abilities(name, keeps_thoughts=True)
        return
    made, template = abilities(name, keeps_thoughts=True)

    def shown(thinking: Thinking = LEFT, **variables: Any) -> bool:
        chat = made.prepared(chat_of(HISTORY, template_kwargs=variables), thinking)
        return "secret" in template.render(chat)

    assert shown()
    if shows.keep_switch:
        assert not shown(Thinking(keeps=False)), "a request may let them go"
        value = shows.keep_switch == "clear_thinking"
        assert not shown(**{shows.keep_switch: value}), "what a request sets itself stays"
    made, template = abilities(name)
    assert shown() == (shows.thoughts == "always")
    assert shown(Thinking(keeps=True))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.shows.thinking_switch])
def test_a_request_turns_thoughts_on_and_off_in_the_words_of_the_template(name: str) -> None:
    made, template = abilities(name)
    on, off = (template.render(made.prepared(chat_of([USER]), Thinking(is_on))) for is_on in (True, False))
    assert on != off
    assert off.endswith("</think>")


def test_an_effort_reaches_templates_that_show_it_and_no_other() -> None:
    for name, family in FAMILIES.items():
        made, template = abilities(name)
        chat = chat_of([USER])
        prepared = made.prepared(chat, Thinking(effort="high"))
        assert (prepared == chat) == (not family.shows.effort_switch)
        if family.shows.effort_switch:
            assert "high" in template.render(prepared)


def test_a_thought_goes_where_the_template_looks_for_it() -> None:
    for field in ("reasoning_content", "thinking", "reasoning"):
        template = ChatTemplate(FAMILIES["whole"].source.replace("reasoning_content", field))
        assert template.render(chat_of(HISTORY)).count("<think>secret</think>") == 1


@pytest.mark.parametrize("name", ["strict", "silent"])
def test_a_later_system_turn_stays_behind_what_it_follows(name: str) -> None:
    _, template = abilities(name)
    turns = [{"role": "system", "content": "first"}, USER, {"role": "system", "content": "later"}, *HISTORY[1:]]
    text = template.render(chat_of(turns))
    head = template.render(chat_of(turns[:2], add_generation_prompt=False)).removesuffix("<|end|>\n")
    assert text.startswith(head)
    assert head.count("later") == 0 < text.count("later")
    assert ("<system-reminder>" in text) == (name == "strict")


def test_switches_do_not_part_a_reply_from_its_conversation() -> None:
    replies = ReplyTokenCache()
    first = chat_of([USER], template_kwargs={"enable_thinking": True})
    replies.remember(b"", first, "Yes", [7, 8])
    for variables, is_found in (({"enable_thinking": False}, True), ({}, True), ({"style": "short"}, False)):
        chat: Conversation = chat_of(HISTORY, template_kwargs=variables)
        assert bool(replies.recall(b"", chat)) == is_found
