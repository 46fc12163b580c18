"""The measure of unprompted calls: which turns it asks for, and how it judges replies."""

import json
import random
from typing import Any

import pytest

from tools.nano.calls import Turn, judge, tool_turns
from tools.nano.sources import Document

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": SCHEMA}}
TURN = Turn([], [WEATHER], {"name": "get_weather", "arguments": {"city": "Oakland"}})
DIALOGUE = Document(
    "services",
    messages=(
        ("user", "Weather?"),
        ("assistant", "Where?"),
        ("user", "I am in Oakland."),
        ("assistant", "It will be 80 degrees with a 15 percent chance of rain."),
    ),
)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call("get_weather", {"city": "Oakland"})], ["called", "name", "valid", "equal"]),
        ([call("get_weather", {"city": "Berkeley"})], ["called", "name", "valid"]),
        ([call("get_weather", {"city": 1})], ["called", "name"]),
        ([call("get_weather", {})], ["called", "name"]),
        ([call("get_weather", '{"city": ')], ["called", "name"]),
        ([call("book_table", {"city": "Oakland"})], ["called"]),
        ([call("get_weather", {"city": "Oakland"})] * 2, []),
        ([], []),
    ],
)
def test_a_reply_is_judged_by_name_schema_and_arguments(calls: list[dict[str, Any]], right: list[str]) -> None:
    assert [name for name, is_right in judge(TURN, calls).items() if is_right] == right


def test_a_turn_without_a_call_only_counts_calls() -> None:
    other = Turn([], [WEATHER], None)
    assert judge(other, [])["called"] is False
    assert judge(other, [call("get_weather", {"city": "Oakland"})]) == {
        "called": True,
        "name": False,
        "valid": False,
        "equal": False,
    }


@pytest.mark.parametrize("seed", range(10))
def test_every_turn_of_the_assistant_is_asked_for(seed: int) -> None:
    turns = list(tool_turns([DIALOGUE], 1, random.Random(seed)))
    assert [turn.call is not None for turn in turns][-2:] == [True, False]
    for turn in turns:
        assert turn.messages[-1]["role"] == ("user" if turn is not turns[-1] else "tool")
    call_turn = turns[-2].call
    assert call_turn is not None
    assert list(call_turn["arguments"].values()) == ["Oakland"]
    assert call_turn["name"] in {tool["function"]["name"] for tool in turns[-2].tools}
