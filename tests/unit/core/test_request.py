"""Sampling parameters: ranges, and the words for the end of a request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.core.request import MAX_SEED, FinishReason, SamplingParams
from hiserve.errors import RequestError

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, INFINITY, NAN)),
        *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN)),
        *(("top_k", value) for value in (-2, 2**31)),
        *(("max_tokens", value) for value in (0, -1, 2**31)),
        *(("seed", value) for value in (-1, 2**63)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"seed": 0},
        {"seed": MAX_SEED},
    ],
)
def test_the_ends_of_each_range_are_taken_and_travel(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_field_that_is_not_known_is_refused_on_the_wire() -> None:
    with pytest.raises(msgspec.ValidationError, match="min_p"):
        msgspec.convert({"min_p": 0.5}, SamplingParams)


def test_finish_reasons_are_openai_s_words() -> None:
    assert [reason.text for reason in FinishReason] == [None, "stop", "length", "abort"]
