"""Sampling parameters: ranges, and the words for the end of a request."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.core.plan import Scores
from hiserve.core.request import MAX_SEED, MAX_STOP_CHARS, NOT_ZERO, RANGES, FinishReason, SamplingParams
from hiserve.errors import RequestError

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, INFINITY, NAN)),
        *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN)),
        *(("top_k", value) for value in (-2, 2**31)),
        *(("max_tokens", value) for value in (0, -1, 2**31)),
        *(("seed", value) for value in (-(2**63) - 1, 2**63)),
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
        {"seed": -(2**63)},
        {"seed": 0},
        {"seed": MAX_SEED},
    ],
)
def test_the_ends_of_each_range_are_taken_and_travel(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_field_that_is_not_known_is_refused_on_the_wire() -> None:
    with pytest.raises(msgspec.ValidationError, match="min_q"):
        msgspec.convert({"min_q": 0.5}, SamplingParams)


def test_finish_reasons_are_openai_s_words() -> None:
    assert [reason.text for reason in FinishReason] == [None, "stop", "length", "abort", "stop"]


@pytest.mark.parametrize("name", sorted(RANGES))
def test_every_number_is_taken_up_to_its_ends_and_refused_beyond(name: str) -> None:
    least, most = RANGES[name]
    step = 1 if "int" in SamplingParams.__annotations__[name] else 0.1
    for end, beyond in ((least, least - step), (most, most + step)):
        if end != 0 or name not in NOT_ZERO:
            assert getattr(SamplingParams(**{name: end}), name) == end
        with pytest.raises(RequestError, match=name) as refused:
            SamplingParams(**{name: beyond})
        assert refused.value.param == name
    with pytest.raises(RequestError):
        SamplingParams(**{name: float("nan")})


@pytest.mark.parametrize("name", sorted(NOT_ZERO))
def test_some_numbers_must_not_be_zero(name: str) -> None:
    with pytest.raises(RequestError, match="greater than 0") as refused:
        SamplingParams(**{name: 0.0})
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * (MAX_STOP_CHARS + 1),)}, "stop"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_lists_and_pairs_of_fields_are_bounded(field: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**field)
    assert refused.value.param == param


@pytest.mark.parametrize("field", [{"stop_token_ids": (9, 10)}, {"logit_bias": {10: 1.0}}, {"stop_token_ids": (-1,)}])
def test_tokens_must_be_in_the_vocabulary(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="between 0 and 9") as refused:
        SamplingParams(**field).check_vocabulary(10)
    assert refused.value.param == next(iter(field))
    SamplingParams(stop_token_ids=(0, 9), logit_bias={9: -100.0}).check_vocabulary(10)


def test_scores_are_packed_word_for_word() -> None:
    rng = np.random.default_rng(3)
    scores = Scores(
        logprobs=rng.normal(size=5).astype(np.float32),
        top_tokens=rng.integers(0, 99, (5, 4)).astype(np.int32),
        top_logprobs=rng.normal(size=(5, 4)).astype(np.float32),
    )
    for num_top in (0, 1, 4):
        packed = b"".join(scores.pack(index, num_top) for index in range(5))
        assert len(packed) == 4 * 5 * (1 + 2 * num_top)
        found = Scores.unpack(packed, num_top)
        np.testing.assert_array_equal(found.logprobs, scores.logprobs)
        np.testing.assert_array_equal(found.top_tokens, scores.top_tokens[:, :num_top])
        np.testing.assert_array_equal(found.top_logprobs, scores.top_logprobs[:, :num_top])


def test_a_negative_seed_is_one_of_the_engines() -> None:
    """OpenAI's seeds have 64 bits with a sign, random numbers here 63."""
    seeds = [SamplingParams(seed=seed).seeded().seed for seed in (-1, -2, -(2**63), 5)]
    assert seeds == [MAX_SEED, MAX_SEED - 1, 0, 5]
