"""Each bound, at it and beyond it; the field is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.grammar import bounds


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def refused(make: Any, value: Any) -> str:
    with pytest.raises(RequestError) as caught:
        make(value, "guided")
    assert caught.value.param == "guided" and caught.value.message.startswith("guided ")
    return caught.value.message


def test_a_schema_is_bounded_in_bytes_depth_and_values() -> None:
    pad = bounds.MAX_SCHEMA_BYTES - len('{"title":""}')
    assert len(bounds.json_schema({"title": "x" * pad}, "guided").text) == bounds.MAX_SCHEMA_BYTES
    assert "262144" in refused(bounds.json_schema, {"title": "x" * (pad + 1)})
    assert bounds.json_schema(nested(31), "guided").kind == "json"
    assert "32 levels" in refused(bounds.json_schema, nested(34))
    assert "100000 values" in refused(bounds.json_schema, {"enum": [1] * 100_000})


def test_a_schema_may_be_a_text_or_true_and_nothing_else() -> None:
    assert bounds.json_schema('{"type": "object"}', "guided") == bounds.any_object()
    assert bounds.json_schema(True, "guided").text == "true"
    for value in (False, None, 7, [], "[]", "7"):
        assert "must be a JSON schema" in refused(bounds.json_schema, value)
    assert "not JSON" in refused(bounds.json_schema, "{")
    assert "not JSON" in refused(bounds.json_schema, "[" * 100_000)
    assert "262144" in refused(bounds.json_schema, " " * (bounds.MAX_SCHEMA_BYTES + 1))


def test_options_of_the_library_are_none_of_a_schema() -> None:
    assert (
        bounds.json_schema({"type": "object", "x-guidance": {"item_separator": "x"}}, "guided") == bounds.any_object()
    )


def test_a_regex_is_bounded() -> None:
    assert bounds.regex("é" * 4096, "guided").kind == "regex"
    assert "8192" in refused(bounds.regex, "é" * 4096 + "a")
    assert "surrogate" in refused(bounds.regex, "\ud800")


def test_rules_are_counted_in_either_form() -> None:
    for between in (": ", " ::= "):
        lines = [f'r{index}{between}"a"' for index in range(1001)]
        assert bounds.rules("\n".join(lines[:1000]), "guided").kind == "ebnf"
        assert "1001 rules" in refused(bounds.rules, "\n".join(lines))
    bounds.rules("\n" * 200_000 + " " * 50_000, "guided")  # in linear time


def test_choices_are_texts() -> None:
    assert json.loads(bounds.choice(['a"b', "é"], "guided").text) == ['a"b', "é"]
    for value in ([], [""], ["a", ""]):
        refused(bounds.choice, value)


def test_a_digest_is_of_kind_and_text() -> None:
    made = [Grammar.of("regex", "ab"), Grammar.of("lark", "ab"), Grammar.of("regex", "abc")]
    assert len({each.digest for each in made}) == 3
    assert Grammar.of("regex", "ab") == made[0]


def test_white_space_is_bounded_and_given_to_any_schema() -> None:
    anything = bounds.json_schema(True, "guided")
    spaced = bounds.with_whitespace(anything, " " * bounds.MAX_WHITESPACE_CHARS, "guided")
    assert json.loads(spaced.text) == {"x-guidance": {"whitespace_pattern": " " * bounds.MAX_WHITESPACE_CHARS}}
    words = refused(
        lambda pattern, param: bounds.with_whitespace(anything, pattern, param), " " * (bounds.MAX_WHITESPACE_CHARS + 1)
    )
    assert str(bounds.MAX_WHITESPACE_CHARS) in words
