"""A chat template in the manner of Gemma-3: no role for instructions, no tools, and turns that must alternate."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import RequestError
from hiserve.text.conversation import Call, Conversation, Result, Text, Thought, Turn
from hiserve.text.reader.formats import find_format
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.probes import TemplateAbilities, probe
from tests.helpers.reply_formats import TOOLS

SOURCE = """\
{{- bos_token -}}
{%- set ns = namespace(told='', turns=messages) -%}
{%- if messages[0].role == 'system' -%}
    {%- set ns.told = (messages[0].content if messages[0].content is string else messages[0].content[0].text) ~ '\\n\\n' -%}
    {%- set ns.turns = messages[1:] -%}
{%- endif -%}
{%- for m in ns.turns -%}
    {%- if (m.role == 'user') == (loop.index0 % 2 == 1) -%}{{- raise_exception('turns of user and assistant must alternate') -}}{%- endif -%}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ (ns.told if loop.first else '') -}}
    {%- if m.content is string -%}{{- m.content | trim -}}
    {%- else -%}{%- for part in m.content -%}{{- part.text | trim if part.type == 'text' else '<start_of_image>' -}}{%- endfor -%}{%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
TEMPLATE = ChatTemplate(SOURCE, {"bos_token": "<bos>"})
USER, SAID = Turn("user", (Text("Where?"),)), Turn("assistant", (Text("There."),))
SYSTEM = Turn("system", (Text("Be brief."),))
ASKED, ANSWERED = "<start_of_turn>user\nWhere?<end_of_turn>\n", "<start_of_turn>model\nThere.<end_of_turn>\n"
START = "<start_of_turn>model\n"


def rendered(*turns: Turn, **options: Any) -> str:
    return TEMPLATE.render(Conversation(turns=turns, **options))


def test_it_shows_neither_tools_nor_thoughts_and_has_no_switches() -> None:
    assert find_format(SOURCE) is None
    assert probe(TEMPLATE) == TemplateAbilities(turn_end="<end_of_turn>\n")
    assert rendered(USER, tools=TOOLS) == rendered(USER) == f"<bos>{ASKED}{START}"
    thought = Turn("assistant", (Thought("so"), Text("There.")))
    assert rendered(USER, thought, USER) == rendered(USER, SAID, USER) == f"<bos>{ASKED}{ANSWERED}{ASKED}{START}"


def test_instructions_are_the_users_wherever_they_stand() -> None:
    first = "<start_of_turn>user\nBe brief.\n\nWhere?<end_of_turn>\n"
    assert rendered(SYSTEM, USER) == f"<bos>{first}{START}"
    reminded = "<start_of_turn>user\nWhere?\n\n<system-reminder>\nBe brief.\n</system-reminder><end_of_turn>\n"
    assert rendered(USER, SYSTEM) == f"<bos>{reminded}{START}"
    assert rendered(SYSTEM, USER, SAID, USER, SYSTEM) == f"<bos>{first}{ANSWERED}{reminded}{START}"


def test_instructions_behind_a_reply_begin_the_users_next_turn() -> None:
    """A turn of their own would be one more of the user, which the template refuses."""
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    both = f"<start_of_turn>user\n{reminder}\n\n{reminder}\n\nWhere?<end_of_turn>\n"
    assert (
        rendered(USER, SAID, SYSTEM, SYSTEM, USER, SAID, USER)
        == f"<bos>{ASKED}{ANSWERED}{both}{ANSWERED}{ASKED}{START}"
    )
    alone = f"<start_of_turn>user\n{reminder}<end_of_turn>\n"
    assert rendered(USER, SAID, SYSTEM) == f"<bos>{ASKED}{ANSWERED}{alone}{START}"


def test_a_reply_that_goes_on_is_open_behind_its_own_white_space() -> None:
    begun = Turn("assistant", (Text("There, "),))
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(USER, begun, **options) == f"<bos>{ASKED}{START}There, "


@pytest.mark.parametrize(
    "turns",
    [
        (USER, USER),
        (SAID, USER),
        (USER, SAID, SAID),
        (USER, Turn("assistant", (Text(""), Call("1", "look", "{}"))), Turn("tool", (Result("1", "here"),))),
    ],
    ids=["users", "a reply first", "replies", "a result"],
)
def test_turns_that_do_not_alternate_are_the_callers_fault(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages: turns of user and assistant"):
        rendered(*turns)
