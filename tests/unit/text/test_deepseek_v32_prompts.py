"""DeepSeek-V3.2's prompts, to the letter, and the format of replies that its encoder stands for."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import RequestError
from hiserve.text.conversation import Conversation, Text, Turn
from hiserve.text.reader.formats import find_format
from hiserve.text.template import deepseek_v32
from hiserve.text.template.encoders import EncodedTemplate, load_template
from hiserve.text.template.probes import probe
from tests.helpers.deepseek_chats import ASSISTANT, BEGIN, CALLED, CALLS, END, FOUND, HI, MORE, SAID, SYSTEM, TOOL, USER

TEMPLATE = EncodedTemplate("DeepseekV32ForCausalLM")
CALLS_HERE = CALLS.replace("tool_calls", "function_calls")
RESULTS = "\n\n<function_results>\n<result>first</result>\n<result>second</result>\n</function_results>"


def prompt(*turns: Turn, tools: Any = None, ends: bool = True, goes_on: bool = False, **variables: Any) -> str:
    chat = Conversation(
        turns=turns, tools=tools, template_kwargs=variables, add_generation_prompt=ends, continue_final_message=goes_on
    )
    return TEMPLATE.render(chat)


def test_each_turn_of_the_user_begins_or_ends_the_thought_of_its_reply() -> None:
    expected = f"{BEGIN}Be brief.{USER}Hi{ASSISTANT}</think>Yes{END}{USER}More{ASSISTANT}</think>"
    for off in ({}, {"thinking": False}, {"enable_thinking": False}, {"thinking_mode": "chat"}):
        assert prompt(SYSTEM, HI, SAID, MORE, **off) == expected
    assert prompt(SYSTEM, HI, SAID, MORE, thinking=True) == expected.removesuffix("</think>") + "<think>"
    assert prompt(HI, SAID, ends=False, thinking=True) == f"{BEGIN}{USER}Hi{ASSISTANT}<think>hm</think>Yes{END}"
    assert prompt(HI, ends=False) == f"{BEGIN}{USER}Hi"
    assert prompt(HI, MORE, thinking=True) == f"{BEGIN}{USER}Hi{ASSISTANT}</think>{USER}More{ASSISTANT}<think>"
    assert prompt(HI, SAID) == f"{BEGIN}{USER}Hi{ASSISTANT}</think>Yes{END}{ASSISTANT}</think>"


def test_tools_stand_behind_the_system_text() -> None:
    head, _, tail = prompt(SYSTEM, HI, tools=[TOOL]).partition(USER)
    assert head.startswith(f"{BEGIN}Be brief.\n\n## Tools\nYou have access") and head.endswith("\n</functions>\n")
    assert '<functions>\n{"name": "look", "description": "Sieht nach: „ja“", "parameters": ' in head
    assert all(sign in head for sign in deepseek_v32.SIGNS) and tail == f"Hi{ASSISTANT}</think>"
    assert prompt(HI, tools=[TOOL]).startswith(f"{BEGIN}\n\n## Tools\n")


def test_the_format_of_replies_stands_behind_the_system_text_and_the_tools() -> None:
    asked = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    text = prompt(SYSTEM, HI, response_format={"type": "object"})
    assert text == f'{BEGIN}Be brief.{asked}{{"type": "object"}}{USER}Hi{ASSISTANT}</think>'
    head, _, _ = prompt(SYSTEM, HI, tools=[TOOL], response_format={"type": "object"}).partition(USER)
    assert head.endswith(f'\n</functions>\n{asked}{{"type": "object"}}')


def test_results_stand_in_the_order_of_the_calls_and_the_thought_goes_on() -> None:
    begin = f"{BEGIN}{USER}Hi{ASSISTANT}"
    called = f"So:{CALLS_HERE}{END}"
    assert prompt(HI, CALLED, *FOUND, thinking=True) == f"{begin}<think>look</think>{called}{RESULTS}\n\n<think>"
    assert prompt(HI, CALLED, *FOUND, SAID, MORE, thinking=True) == (
        f"{begin}</think>{called}{RESULTS}\n\n</think>Yes{END}{USER}More{ASSISTANT}<think>"
    )
    assert prompt(HI, CALLED, *FOUND, ends=False) == f"{begin}</think>{called}{RESULTS}"


def test_a_reply_is_continued_within_its_text_and_what_has_no_place_is_refused() -> None:
    text = prompt(HI, Turn("assistant", (Text("Ye"),)), ends=False, goes_on=True)
    assert text == f"{BEGIN}{USER}Hi{ASSISTANT}</think>Ye"
    with pytest.raises(RequestError, match="thinking_mode is 'deep', neither thinking nor chat"):
        prompt(HI, thinking_mode="deep")


def test_it_stands_for_the_format_of_its_replies(tmp_path: Any) -> None:
    found = load_template(tmp_path, "DeepseekV32ForCausalLM")
    assert isinstance(found, EncodedTemplate)
    row = find_format(found.sources.source)
    assert row is not None and row.name == "deepseek_v32"
    abilities = probe(TEMPLATE)
    assert abilities.tools and not abilities.later_system and abilities.thinking_switch == "enable_thinking"
    assert abilities.turn_end == END and not TEMPLATE.shows_errors and TEMPLATE.takes_spoken_calls
