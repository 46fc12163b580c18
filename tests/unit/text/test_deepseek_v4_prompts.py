"""DeepSeek-V4's prompts, to the letter, and its replies read back by the format that its encoder stands for."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.conversation import Call, Conversation, Text, Turn
from hiserve.text.reader.formats import find_format
from hiserve.text.template import deepseek_v4
from hiserve.text.template.encoders import ENCODERS, EncodedTemplate, load_template, template_of
from hiserve.text.template.probes import probe
from tests.helpers.deepseek_chats import ASSISTANT, BEGIN, CALLED, CALLS, END, FOUND, HI, MORE, SAID, SYSTEM, TOOL, USER

TEMPLATE = EncodedTemplate("DeepseekV4ForCausalLM")


def prompt(*turns: Turn, tools: Any = None, ends: bool = True, goes_on: bool = False, **variables: Any) -> str:
    chat = Conversation(
        turns=turns,
        tools=tools,
        template_kwargs=variables,
        add_generation_prompt=ends,
        continue_final_message=goes_on,
    )
    return TEMPLATE.render(chat)


def test_without_thoughts_each_reply_ends_its_thought_at_once() -> None:
    expected = f"{BEGIN}Be brief.{USER}Hi{ASSISTANT}</think>Yes{END}{USER}More{ASSISTANT}</think>"
    assert prompt(SYSTEM, HI, SAID, MORE) == expected
    for off in ({"thinking": False}, {"enable_thinking": False}, {"thinking_mode": "chat"}):
        assert prompt(SYSTEM, HI, SAID, MORE, **off) == expected


def test_thoughts_before_the_last_turn_of_the_user_are_left_out() -> None:
    kept, dropped = f"{ASSISTANT}<think>hm</think>Yes{END}", f"{ASSISTANT}</think>Yes{END}"
    assert prompt(HI, SAID, MORE, thinking=True) == f"{BEGIN}{USER}Hi{dropped}{USER}More{ASSISTANT}<think>"
    for keep in ({"drop_thinking": False}, {"preserve_thinking": True}):
        assert prompt(HI, SAID, MORE, thinking_mode="thinking", **keep) == (
            f"{BEGIN}{USER}Hi{kept}{USER}More{ASSISTANT}<think>"
        )
    assert prompt(HI, SAID, ends=False, thinking=True) == f"{BEGIN}{USER}Hi{kept}"


def test_tools_stand_behind_the_system_text_and_keep_all_thoughts() -> None:
    text = prompt(SYSTEM, HI, SAID, MORE, tools=[TOOL], thinking=True)
    head, _, tail = text.partition(USER)
    assert head.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\n") and head.endswith("to invoke tool calls.\n")
    assert '### Available Tool Schemas\n\n{"name": "look", "description": "Sieht nach: „ja“", "parameters": ' in head
    assert all(sign in head for sign in deepseek_v4.SIGNS)
    assert tail == f"Hi{ASSISTANT}<think>hm</think>Yes{END}{USER}More{ASSISTANT}<think>"
    assert prompt(HI, tools=[TOOL]).startswith(f"{BEGIN}\n\n## Tools\n\n")


def test_results_are_one_turn_of_the_user_in_the_order_of_the_calls() -> None:
    results = "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>"
    text = prompt(HI, CALLED, *FOUND, thinking=True)
    assert text == (f"{BEGIN}{USER}Hi{ASSISTANT}<think>look</think>So:{CALLS}{END}{USER}{results}{ASSISTANT}<think>")
    assert prompt(HI, CALLED, *FOUND, MORE).endswith(f"{USER}{results}\n\nMore{ASSISTANT}</think>")


def test_arguments_that_are_no_object_are_one_text() -> None:
    called = Turn("assistant", (Text(""), Call("a", "look", "[1")))
    shown = '<｜DSML｜parameter name="arguments" string="true">[1</｜DSML｜parameter>'
    assert shown in prompt(HI, called, FOUND[1])


def test_the_largest_effort_stands_before_all_else() -> None:
    text = prompt(SYSTEM, HI, thinking=True, reasoning_effort="max")
    assert text.startswith(f"{BEGIN}Reasoning Effort: Absolute maximum") and f"\n\nBe brief.{USER}Hi" in text
    assert prompt(SYSTEM, HI, reasoning_effort="max") == prompt(SYSTEM, HI)
    assert prompt(SYSTEM, HI, thinking=True, reasoning_effort="low") == prompt(SYSTEM, HI, thinking=True)


ASKED = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def test_the_format_of_replies_stands_behind_the_system_text_and_the_tools() -> None:
    wanted = {"type": "object", "title": "„ja“"}
    text = prompt(SYSTEM, HI, response_format=wanted)
    assert text == f'{BEGIN}Be brief.{ASKED}{{"type": "object", "title": "„ja“"}}{USER}Hi{ASSISTANT}</think>'
    head, _, _ = prompt(SYSTEM, HI, tools=[TOOL], response_format=wanted).partition(USER)
    assert head.endswith(f'to invoke tool calls.\n{ASKED}{{"type": "object", "title": "„ja“"}}')
    assert prompt(SYSTEM, HI, response_format=None) == prompt(SYSTEM, HI)


def ask_for(task: str, text: str = "Hi") -> Turn:
    return Turn("user", (Text(text),), {"task": task})


@pytest.mark.parametrize("thinking", [False, True])
def test_a_task_of_the_user_is_the_mark_before_its_reply(thinking: bool) -> None:
    ending = "<think>" if thinking else "</think>"
    for task in ("query", "authority", "domain", "title", "read_url"):
        assert prompt(ask_for(task), thinking=thinking) == f"{BEGIN}{USER}Hi<｜{task}｜>"
    assert prompt(ask_for("action"), thinking=thinking) == f"{BEGIN}{USER}Hi{ASSISTANT}{ending}<｜action｜>"
    told = prompt(ask_for("title"), SAID, ask_for("action", "More"), SAID, MORE, thinking=thinking, drop_thinking=False)
    assert told == (
        f"{BEGIN}{USER}Hi<｜title｜>Yes{END}{USER}More{ASSISTANT}{ending}<｜action｜>Yes{END}{USER}More{ASSISTANT}{ending}"
    )


def test_a_task_that_is_not_known_or_has_no_reply_is_refused() -> None:
    with pytest.raises(RequestError, match="the task 'joke' is none of action, query, authority"):
        prompt(ask_for("joke"))
    with pytest.raises(RequestError, match="a task of a turn that no reply follows"):
        prompt(ask_for("title"), MORE)
    assert prompt(ask_for("title"), ends=False) == f"{BEGIN}{USER}Hi"


def test_results_and_words_before_a_task_are_its_turn() -> None:
    results = "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>"
    assert prompt(HI, CALLED, *FOUND, ask_for("query", "So?")).endswith(f"{END}{USER}{results}\n\nSo?<｜query｜>")


def test_a_reply_is_continued_within_its_text() -> None:
    text = prompt(HI, Turn("assistant", (Text("Ye"),)), ends=False, goes_on=True)
    assert text == f"{BEGIN}{USER}Hi{ASSISTANT}</think>Ye"


def test_what_has_no_place_is_refused_or_said_otherwise() -> None:
    """A later system turn becomes a reminder, as with templates that do not show it."""
    assert "<system-reminder>\nBe brief.\n</system-reminder>" in prompt(HI, SYSTEM)
    with pytest.raises(RequestError, match="thinking_mode is 'deep', neither thinking nor chat"):
        prompt(HI, thinking_mode="deep")
    with pytest.raises(ContextLengthError, match="more than 20 characters"):
        TEMPLATE.render(Conversation(turns=(HI,)), max_chars=20)
    with pytest.raises(RequestError, match="may not set messages"):
        prompt(HI, messages=[])


def test_it_takes_the_place_of_a_template_that_is_not_there(tmp_path: Any) -> None:
    found = load_template(tmp_path, "DeepseekV4ForCausalLM")
    assert isinstance(found, EncodedTemplate) and load_template(tmp_path, "LlamaForCausalLM") is None
    again = template_of(found.sources)  # as in a helper process
    chat = Conversation(turns=(SYSTEM, HI), tools=[TOOL])
    assert again.render(chat) == found.render(chat)
    row = find_format(found.sources.source)
    assert row is not None and row.name == "deepseek_v4" and "DeepseekV4ForCausalLM" in ENCODERS
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shown = load_template(tmp_path, "DeepseekV4ForCausalLM")
    assert shown is not None and shown.render(Conversation(turns=(HI,))) == "Hi"


def test_its_abilities_are_found_as_those_of_a_template() -> None:
    abilities = probe(TEMPLATE)
    assert abilities.tools and not abilities.later_system and abilities.thinking_switch == "enable_thinking"
    assert abilities.effort_switch == "reasoning_effort"  # shown with thoughts alone
    assert abilities.turn_end == END and not TEMPLATE.shows_errors and TEMPLATE.takes_spoken_calls
