"""The input of a custom tool, read from the arguments that the model writes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiserve.text.custom_tools import InputReader, input_arguments, input_of


def in_parts(arguments: str, seed: int) -> str:
    reader, rng, at, found = InputReader(), random.Random(seed), 0, ""
    while at < len(arguments):
        size = rng.choice((1, 1, 2, 3, 7))
        found += reader.push(arguments[at : at + size])
        at += size
    return found + reader.end()


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\\"/\n\U0001f600'), max_size=12),
    is_ascii=st.booleans(),
    spaces=st.lists(st.sampled_from(["", " ", "\n"]), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_an_input_is_read_back_from_any_partition_of_its_arguments(
    text: str, is_ascii: bool, spaces: list[str], seed: int
) -> None:
    first, second, third, fourth, fifth = spaces
    spelled = json.dumps(text, ensure_ascii=is_ascii)
    assert in_parts(f'{first}{{{second}"input"{third}:{fourth}{spelled}{fifth}}}', seed) == text


def test_an_input_of_the_history_is_read_back() -> None:
    assert input_of(input_arguments('a "b"\né')) == 'a "b"\né'


def test_an_input_is_shown_as_it_comes() -> None:
    reader = InputReader()
    parts = ['{"in', 'put": "on', "e\\", "n\\ud83d", "\\ude00t", 'wo"', "}"]
    assert [reader.push(part) for part in parts] == ["", "on", "e", "\n", "\U0001f600t", "wo", ""]
    assert reader.end() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"x": 1, "input": "a"}', "a"),  # other arguments come first
        ('{"x": 1}', '{"x": 1}'),
        ("[1]", "[1]"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "cut', "cut"),
        ('{"input": "cut \\ud8', "cut \\ud8"),
        ('{"input": "a\\qb"}', 'a\\qb"}'),  # no JSON
        ('{"input": "\\ud83d"}', "\ufffd"),  # half of a pair
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "\ufffd\U0001f600"),
        ('{"input": "\\ude00\\ud83dx"}', "\ufffd\ufffdx"),
        ('{"input": ["\\ud800"]}', '{"input": ["\\ud800"]}'),
        ("", ""),
        ("[" * 20_000, "[" * 20_000),
    ],
)
def test_other_arguments_are_the_input_as_they_are(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    if len(arguments) < 100:
        assert {in_parts(arguments, seed) for seed in range(20)} == {text}
