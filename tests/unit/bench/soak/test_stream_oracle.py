"""What a soak calls a violation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hiserve.bench.soak.faults import Window
from hiserve.bench.soak.soak_summary import StreamOracle, judge_bad
from hiserve.bench.soak.users import Reference, SentQuestion, Way
from hiserve.bench.workload import Sample

REFERENCE = Reference([1, 2, 3, 4], "length")
STRUCK = Window(10.0, 20.0, may_fail=True)
FELT = Window(10.0, 20.0, may_fail=False)


def asked(
    way: Way = "read", *, ids: list[int], begin_s: float = 0.0, end_s: float = 5.0, **fields: Any
) -> SentQuestion:
    fields = {"num_ends": int("finish" in fields)} | fields
    return SentQuestion(question=0, way=way, sample=Sample(output_ids=ids, begin_s=begin_s, end_s=end_s, **fields))


def judged(one: SentQuestion, *windows: Window, is_exact: bool = True) -> tuple[str, bool]:
    verdict = StreamOracle([REFERENCE], is_exact=is_exact).judge(one, windows)
    return verdict.outcome, bool(verdict.violation)


def test_the_recorded_reply_is_an_answer() -> None:
    assert judged(asked(ids=[1, 2, 3, 4], finish="length")) == ("answered", False)


@pytest.mark.parametrize("ids", [[1, 2, 9, 4], [9], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("way", ["read", "slow", "cancelled", "burst"])
def test_another_token_is_a_violation_however_the_stream_ended(ids: list[int], way: Way) -> None:
    assert judged(asked(way, ids=ids, finish="length")) == ("other tokens", True)
    assert judged(asked("cancelled", ids=ids)) == ("other tokens", True)
    failed = asked(way, ids=ids, error="error event", begin_s=12, end_s=15)
    assert judged(failed, STRUCK) == ("other tokens", True)


def test_other_tokens_are_counted_where_arithmetic_is_not_exact() -> None:
    assert judged(asked(ids=[1, 2, 9, 4], finish="length"), is_exact=False) == ("answered, other tokens", False)
    assert judged(asked(ids=[1, 2], finish="stop"), is_exact=False) == ("answered", False)


@pytest.mark.parametrize(("ids", "finish"), [([1, 2], "length"), ([1, 2, 3, 4], "stop"), ([], "length")])
def test_a_reply_that_ends_otherwise_is_a_violation(ids: list[int], finish: str) -> None:
    assert judged(asked(ids=ids, finish=finish)) == ("cut short", True)


def test_a_stream_ends_once() -> None:
    assert judged(asked(ids=[1, 2, 3, 4], finish="length", num_ends=2)) == ("ended again", True)


def test_who_leaves_has_seen_a_beginning() -> None:
    assert judged(asked("cancelled", ids=[1, 2])) == ("left by the user", False)
    assert judged(asked("cancelled", ids=[1, 2, 3, 4], finish="length")) == ("answered", False)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("http 429", "refused, the queue was full (429)"),
        ("http 503", "refused, the engine was not ready (503)"),
    ],
)
def test_a_refusal_says_why_and_is_none_once_there_were_tokens(error: str, outcome: str) -> None:
    assert judged(asked(ids=[], error=error)) == (outcome, False)
    assert judged(asked(ids=[1], error=error)) == (error, True)


@pytest.mark.parametrize(
    ("begin_s", "end_s", "is_excused"), [(0, 9, False), (0, 10, True), (20, 30, True), (21, 30, False)]
)
def test_an_error_event_is_excused_by_a_fault_that_the_request_met(
    begin_s: float, end_s: float, is_excused: bool
) -> None:
    failed = asked(ids=[1], error="error event", begin_s=begin_s, end_s=end_s)
    assert judged(failed, STRUCK)[1] is not is_excused
    assert judged(failed, FELT)[1]
    assert judged(failed)[1]


@pytest.mark.parametrize("error", ["connection", "incomplete", "timeout", "http 500", "malformed event"])
def test_nothing_else_is_excused(error: str) -> None:
    assert judged(asked(ids=[1], error=error, begin_s=12, end_s=15), Window(10, math.inf, may_fail=True)) == (
        error,
        True,
    )


def test_a_slow_reader_may_be_cut_off_but_not_told_lies() -> None:
    assert judged(asked("slow", ids=[1, 2], error="connection")) == ("slow reader cut off", False)
    assert judged(asked("slow", ids=[1, 2], error="http 500")) == ("http 500", True)


@pytest.mark.parametrize(
    ("status", "is_violation"), [(400, False), (404, False), (429, False), (503, False), (200, True), (500, True)]
)
def test_nonsense_is_told_so(status: int, is_violation: bool) -> None:
    assert bool(judge_bad(Sample(status=status)).violation) is is_violation


def test_nonsense_is_answered() -> None:
    assert judge_bad(Sample(error="connection")).violation
