"""A changed token is noticed; where arithmetic rounds, only one that is as likely is let pass."""

from __future__ import annotations

import pytest

from hiserve.bench.equality import EqualityChecker, are_kept, over_all
from hiserve.bench.spec_engine import Tokens
from tests.unit.bench.spec_fakes import FakeEngine, counting

PROMPTS = [[10], [20], [30]]
EXPECTED = [counting(prompt)[:400] for prompt in PROMPTS]
ROUNDING = 0.01  # between a token's score as it is drawn, and as it is read


def changed(row: int, at: int, token: int) -> list[Tokens]:
    replies = [list(reply) for reply in EXPECTED]
    replies[row][at] = token
    return replies


def judge(dtype: str, near: float = 0.0) -> tuple[EqualityChecker, FakeEngine]:
    """Token 7 is short of the best one by ``near``, token 8 by 1; all others are the best."""

    def score(before: Tokens, token: int) -> tuple[float, float]:
        best = -0.5 if engine.log[-1].endswith("100 tokens at 0") else -0.5 - ROUNDING
        return best - {7: near, 8: 1.0}.get(token, 0.0), best

    engine = FakeEngine(counting, dtype=dtype, score=score)
    return EqualityChecker(engine), engine


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_same_tokens_are_the_same(dtype: str) -> None:
    ours, engine = judge(dtype)
    found = ours.compare(PROMPTS, EXPECTED, [list(reply) for reply in EXPECTED], 0.0)
    assert (found.verdict, found.is_kept, found.num_differing) == ("same", True, 0)
    assert not engine.log


@pytest.mark.parametrize(("dtype", "temperature"), [("float64", 0.0), ("float64", 0.8), ("float32", 0.8)])
def test_one_changed_token_is_a_difference_where_arithmetic_is_exact(dtype: str, temperature: float) -> None:
    found = judge(dtype)[0].compare(PROMPTS, EXPECTED, changed(1, 5, 7), temperature)
    assert (found.verdict, found.is_kept) == ("different", False)
    assert (found.num_replies, found.num_differing, found.first_difference) == (3, 1, (1, 5))


def test_a_reply_that_ends_early_differs() -> None:
    found = judge("float64")[0].compare(PROMPTS, EXPECTED, [EXPECTED[0][:9], *EXPECTED[1:]], 0.0)
    assert (found.verdict, found.first_difference) == ("different", (0, 9))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_near_tie_is_within_the_margin_and_anything_else_is_not(dtype: str) -> None:
    kept = judge(dtype, near=8 * ROUNDING * 0.99)[0].compare(PROMPTS, EXPECTED, changed(2, 3, 7), 0.0)
    assert (kept.verdict, kept.is_kept) == ("within the margin", True)
    assert kept.margin is not None
    assert kept.margin.epsilon == pytest.approx(8 * ROUNDING)
    assert (kept.margin.num_needed, kept.margin.num_positions) == (1, 300)
    far = judge(dtype, near=8 * ROUNDING * 1.01)[0].compare(PROMPTS, EXPECTED, changed(2, 3, 7), 0.0)
    assert (far.verdict, far.is_kept) == ("different", False)


def test_more_than_a_few_near_ties_over_all_comparisons_are_a_difference() -> None:
    ours, _ = judge("bfloat16", near=ROUNDING)
    replies = changed(0, 3, 7)
    replies[0][10] = replies[0][20] = 7
    found = ours.compare(PROMPTS, EXPECTED, replies, 0.0)
    assert (found.verdict, found.num_tokens) == ("within the margin", 300)
    same = ours.compare(PROMPTS, EXPECTED, EXPECTED, 0.0)
    assert over_all([same]) is None and are_kept([same])
    few = over_all([found, same])
    assert few is not None and (few.num_needed, few.num_positions) == (3, 600)
    assert are_kept([found, same])  # 0.5 % of 600 are 3
    assert not are_kept([found])
    far = judge("bfloat16", near=1.0)[0].compare(PROMPTS, EXPECTED, changed(0, 3, 7), 0.0)
    assert not are_kept([far, *[same] * 9])


def test_drawn_tokens_of_a_coarse_type_are_told_and_not_judged() -> None:
    found = judge("bfloat16")[0].compare(PROMPTS, EXPECTED, changed(1, 5, 7), 0.8)
    assert (found.verdict, found.is_kept, found.num_differing) == ("not judged", True, 1)


def test_what_rounding_does_is_measured_once() -> None:
    ours, engine = judge("bfloat16")
    for _ in range(3):
        ours.compare(PROMPTS, EXPECTED, changed(1, 5, 7), 0.0)
    assert engine.log == ["1 prompts, 100 tokens at 0", *["1 prompts, 1 tokens at 0"] * 4]
