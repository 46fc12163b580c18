"""Bodies as typed values: each fault is named by its field, with the value if it is a number, and the limit."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from hiserve.errors import RequestError
from hiserve.text.body.json import allowed_values, components, decode, union

Ratio = Annotated[float, Meta(gt=0, le=1, description="1 is all")]


class Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct):
    role: Literal["user", "system"]
    content: str | list[Part]


class Options(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, Meta(ge=0, le=9)] | None = None


class Body(msgspec.Struct, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    ratio: Ratio | None = None
    count: Annotated[int, Meta(ge=0)] | None = None
    names: Annotated[list[Annotated[str, Meta(max_length=3)]], Meta(max_length=2)] | None = None
    options: Options | list[Options] | None = None
    ids: Annotated[Any, union("a list of ids", list[int])] = None
    label: str | None = None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"ratio": 2}, "ratio", "ratio is 2; it must be a number above 0 and at most 1 (1 is all)."),
        ({"ratio": 10**400}, "ratio", "ratio must be a number above 0 and at most 1 (1 is all)."),
        ({"ratio": float("nan")}, "ratio", "ratio is nan; it must be a number above 0 and at most 1 (1 is all)."),
        ({"ratio": True}, "ratio", "ratio must be a number above 0 and at most 1 (1 is all)."),
        ({"count": 1.0}, "count", "count is 1.0; it must be a whole number of at least 0."),
        ({"names": ["a", "long"]}, "names", "names must be a list of at most 2 entries, each a string of at most 3 characters."),
        ({"names": [5]}, "names", "names must be a list of at most 2 entries, each a string of at most 3 characters."),
        ({"options": {"steps": 10}}, "options.steps", "options.steps is 10; it must be a whole number between 0 and 9."),
        ({"options": [{"steps": 10}]}, "options.steps", "options.steps must be a whole number between 0 and 9."),
        ({"options": {"size": 1}}, "options", "options has a field 'size', which is not known; it must be a list"),
        ({"messages": []}, "messages", "messages must be a list that is not empty, each an object with role, content."),
        ({"messages": ["x"]}, "messages[0]", "messages[0] must be an object with role, content."),
        ({"messages": [{}]}, "messages[0].role", 'messages[0].role must be one of "system", "user".'),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content[0].type",
            'messages[0].content[0].type must be "text".',
        ),
        ({"label": "a\ud800"}, "label", "label is not valid Unicode: a lone surrogate at character 1."),
        ({"options": {"\ud800": 1}}, "options", "options is not valid Unicode: it has a lone surrogate."),
        ({"messages": [{"role": "\ud800"}]}, "messages[0].role", "messages[0].role is not valid Unicode"),
        ({"messages": [{"role": "user", "\ud800": 1}]}, "messages[0]", "messages[0] is not valid Unicode"),
        ({"messages": [{"z": {"\ud800": "\ud800"}, "role": "\ud800"}]}, "messages[0].role", "messages[0].role is not"),
        ({"messages": [{"role": "user", "content": []}, {"z": [["\ud800"]], "role": "\ud800"}]}, "messages[1].role", "messages[1].role"),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_a_fault_is_named_by_its_field_and_its_limit(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode(body, Body)
    assert refused.value.param == param
    assert refused.value.message.startswith(message)


def test_a_text_that_is_not_unicode_is_found_at_once_whatever_lies_beside_it() -> None:
    """Work for each level of a client's nested value would hold the event loop: 300 levels took 100 times as long."""

    def cost_s(depth: int) -> float:
        begin_s = time.thread_time()
        beside: Any = "x" * 900_000
        for _ in range(depth):
            beside = {"a": beside, "b": "\ud800"}
        for _ in range(5):
            with pytest.raises(RequestError):
                decode({"messages": [{"z": beside, "role": "\ud800"}]}, Body)
        return time.thread_time() - begin_s

    deep_s, plain_s = min(cost_s(300) for _ in range(3)), min(cost_s(1) for _ in range(3))
    assert deep_s < 10 * plain_s + 0.05


def test_other_fields_of_a_body_and_nulls_are_left_alone() -> None:
    body = {"ratio": None, "other": "\ud800", "\ud800": {}, "ids": [1, "x"], "count": 3}
    assert decode(body, Body) == Body(count=3, ids=[1, "x"])


def test_the_words_of_a_schema_are_those_of_the_message() -> None:
    _, schemas = components(Body)
    shown = {name: allowed_values(schema, schemas) for name, schema in schemas["Body"]["properties"].items()}
    assert shown["ids"] == "a list of ids"
    assert shown["label"] == "a string"
    assert allowed_values({"enum": [False, None]}, {}) == "false"
    assert allowed_values({"type": "null"}, {}) == allowed_values({"enum": [None]}, {}) == "null"
    assert json.dumps(shown)
