"""The gate gives every step exactly one decision."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hiserve.core.plan import BatchPlan
from hiserve.runners.gate import (
    Action,
    Coverage,
    Decision,
    DecisionLog,
    FullGraphs,
    MixedGraphs,
    PendingLoads,
    PiecewiseGraphs,
    Reason,
    StepFacts,
    admit,
)
from tests.helpers.plans import make_plan

LOADS = (1, 2)
PAGE = 16
MAX_LEN = 8 * PAGE
DECODE = FullGraphs(buckets=(1, 2, 4, 8), max_len=MAX_LEN)
VERIFY = replace(DECODE, buckets=(2, 4))
COVERAGE = Coverage(full={1: DECODE, 4: VERIFY}, piecewise=PiecewiseGraphs((16, 32, 64)))
ONLY_FULL = replace(COVERAGE, piecewise=None)
ONLY_PIECEWISE = replace(COVERAGE, full={})


def facts_of(plan: BatchPlan, **others: Any) -> StepFacts:
    return StepFacts.of(plan, **{"sampling": "greedy"} | others)


def eager(reason: Reason, waits: tuple[int, ...] = (), sampling: str = "greedy") -> Decision:
    return Decision(Action.EAGER, reason, waits, sampling=sampling)


def pieces(bucket: int) -> Decision:
    return Decision(Action.REPLAY, Reason.PIECEWISE, bucket=bucket, sampling="greedy")


def decide(
    plan: BatchPlan,
    coverage: Coverage = COVERAGE,
    loads: PendingLoads = PendingLoads(),  # noqa: B008
    **others: Any,
) -> Decision:
    return admit(plan, loads, coverage, facts_of(plan, **others))


def decode(num_rows: int, **columns: Any) -> BatchPlan:
    return make_plan(list(range(1, num_rows + 1)), **columns)


MIXED = MixedGraphs(buckets=(16, 32), max_decode=3, max_width=2, max_prompts=2, max_len=MAX_LEN)


@pytest.mark.parametrize(
    ("num_new", "num_draft", "reason", "bucket"),
    [
        ((1, 1, 9), 0, Reason.MIXED, 16),
        ((1, 2, 9), (0, 1, 0), Reason.MIXED, 16),
        ((1, 1, 1, 9, 20), 0, Reason.MIXED, 32),
        ((9, 7), 0, Reason.MIXED, 16),
        ((1, 1, 1), 0, Reason.DECODE, 4),
        ((1, 2), (0, 1), Reason.MIXED, 16),
        ((1, 1, 1, 1, 9), 0, Reason.PIECEWISE, 16),  # too many rows that decode
        ((1, 3, 9), (0, 2, 0), Reason.PIECEWISE, 16),  # too wide
        ((1, 9, 1, 9), 0, Reason.PIECEWISE, 32),  # a prompt before a row that decodes
        ((1, 5, 5, 5), 0, Reason.PIECEWISE, 16),  # too many prompts
        ((1, 32), 0, Reason.PIECEWISE, 64),
        ((1, 15), 0, Reason.MIXED, 16),
        ((1, 16), 0, Reason.MIXED, 32),
    ],
)
def test_mixed_steps_are_one_graph_as_far_as_it_has_places(
    num_new: tuple[int, ...], num_draft: Any, reason: Reason, bucket: int
) -> None:
    coverage = replace(COVERAGE, mixed=MIXED)
    plan = decode(len(num_new), num_new=num_new, num_draft=num_draft, max_len=40)
    assert decide(plan, coverage) == Decision(Action.REPLAY, reason, (), bucket, "greedy")


def test_mixed_steps_whose_capture_failed_or_that_wait_for_layers_go_to_pieces() -> None:
    plan = decode(2, num_new=(1, 9))
    failed = replace(MIXED, failed=frozenset({16}))
    assert decide(plan, replace(COVERAGE, mixed=failed)) == pieces(16)
    waiting = replace(plan, waits=(1,))
    decision = decide(waiting, replace(COVERAGE, mixed=MIXED), PendingLoads(open=(1,), last_started=1))
    assert decision == replace(pieces(16), loads=(1,))
    arrived = decide(waiting, replace(COVERAGE, mixed=MIXED), PendingLoads(last_started=1))
    assert arrived.reason is Reason.MIXED


# --- what a step reads --------------------------------------------------------------------


def states() -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Every combination of: loads waited for, and how each load stands."""
    return list(itertools.product([(), (1,), (1, 2)], itertools.product(("open", "done", "failed"), repeat=2)))


@pytest.mark.parametrize(
    "coverage", [Coverage(), COVERAGE, replace(COVERAGE, is_strict=True)], ids=["off", "on", "strict"]
)
@pytest.mark.parametrize("rows", [[1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("has_moved", [False, True], ids=["calm", "moved"])
def test_a_step_runs_exactly_when_all_it_reads_is_there_or_on_its_way(
    rows: list[int], coverage: Coverage, has_moved: bool
) -> None:
    deferred = set()
    for waits, stands in states():
        how = dict(zip(LOADS, stands, strict=True))
        plan = make_plan(rows, waits)
        loads = PendingLoads(
            open={op for op in LOADS if how[op] == "open"},
            failed={op for op in LOADS if how[op] == "failed"},
            last_started=max(LOADS),
        )
        decision = admit(plan, loads, coverage, facts_of(plan), has_moved=has_moved)
        assert (decision.action is Action.DEFER) == any(how[op] == "failed" for op in waits), (waits, how)
        if decision.action is Action.DEFER:
            assert not decision.loads
            deferred.add(decision.reason)
        else:
            assert decision.loads == tuple(op for op in waits if how[op] == "open")
    assert deferred == {Reason.LOAD_FAILED}


def test_a_step_waits_for_no_load_that_was_never_started() -> None:
    """To wait for it would be to wait for nothing."""
    with pytest.raises(AssertionError, match="waits for loads that never started"):
        decide(make_plan([1], waits=(2,)), loads=PendingLoads(open={1}, last_started=1))


def test_a_strict_gate_replays_nothing_behind_a_page_that_moved() -> None:
    """The step before, which may still run, reads where it was."""
    for coverage, wanted in (
        (COVERAGE, Decision(Action.REPLAY, Reason.DECODE, (), 1, "greedy")),
        (replace(COVERAGE, is_strict=True), eager(Reason.STRICT_RELOCATION)),
        (Coverage(is_strict=True), eager(Reason.GRAPHS_OFF)),
    ):
        assert admit(decode(1), PendingLoads(), coverage, facts_of(decode(1)), has_moved=True) == wanted


def test_what_follows_a_row_s_last_token_is_never_scored() -> None:
    with pytest.raises(AssertionError, match="scores"):
        facts_of(decode(2, num_scored=[0, 1]))


def test_a_step_that_reads_a_load_is_replayed_behind_it() -> None:
    loads = PendingLoads(open={1, 2, 3}, last_started=3)
    assert decide(make_plan([1], waits=(2,)), loads=loads) == Decision(Action.REPLAY, Reason.DECODE, (2,), 1, "greedy")


def test_a_strict_gate_replays_nothing_while_any_load_is_under_way() -> None:
    strict, plan = replace(COVERAGE, is_strict=True), make_plan([1], waits=(1,))
    assert decide(decode(1), strict, PendingLoads(open={9}, last_started=9)) == eager(Reason.STRICT_LOAD)
    assert decide(plan, strict, PendingLoads(open={1}, last_started=1)) == eager(Reason.STRICT_LOAD, (1,))
    assert decide(plan, strict, PendingLoads(open={9}, failed={1}, last_started=9)).reason is Reason.LOAD_FAILED
    assert decide(plan, strict, PendingLoads(failed={9}, last_started=9)).action is Action.REPLAY


def test_a_step_that_may_not_be_replayed_runs_eagerly() -> None:
    for coverage in (COVERAGE, ONLY_FULL, ONLY_PIECEWISE):
        assert decide(replace(decode(1), may_replay=False), coverage) == eager(Reason.STEP_FAILED)
    plan = replace(make_plan([1], waits=(1,)), may_replay=False)
    assert decide(plan, loads=PendingLoads(open={1}, last_started=1)) == eager(Reason.STEP_FAILED, (1,))


def test_a_plan_without_rows_gets_a_decision_too() -> None:
    for coverage in (Coverage(), COVERAGE, ONLY_FULL, ONLY_PIECEWISE):
        assert (
            decide(make_plan([]), coverage, PendingLoads(open={1}, failed={2}, last_started=2)).action is Action.EAGER
        )


# --- what graphs cover --------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)])
def test_a_decode_step_is_replayed_in_the_smallest_graph_that_holds_its_rows(num_rows: int, bucket: int) -> None:
    for sampling in ("greedy", "any"):
        decision = decide(decode(num_rows), sampling=sampling)
        assert decision == Decision(Action.REPLAY, Reason.DECODE, (), bucket, sampling)


def test_a_verify_step_is_replayed_by_the_graphs_of_its_own_width() -> None:
    assert decide(decode(3, num_new=4, num_draft=3)) == Decision(Action.REPLAY, Reason.VERIFY, (), 4, "greedy")
    assert decide(decode(3, num_new=3, num_draft=2), ONLY_FULL) == eager(Reason.WIDTH)


@pytest.mark.parametrize(
    "columns",
    [
        {"num_new": [1, 4], "num_draft": [0, 3]},  # rows differ
        {"num_new": [1, 5]},  # one comes to the end of its prompt
        {"num_new": 4, "num_draft": [3, 2]},  # one has a draft less
        {"num_new": 4, "num_draft": 0},  # part of a prompt
        {"samples": [True, False]},  # the last chunk but one ends short of the prompt's end
    ],
    ids=str,
)
def test_rows_that_differ_or_do_not_sample_are_no_decode_or_verify_step(columns: dict[str, Any]) -> None:
    assert decide(decode(2, **columns), ONLY_FULL) == eager(Reason.WIDTH)
    assert decide(decode(2, **columns)) == pieces(16)


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 16), (15, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 0)])
def test_prefill_is_replayed_in_pieces_up_to_the_most_tokens_captured(num_tokens: int, bucket: int) -> None:
    plan = decode(1, num_new=num_tokens, samples=False, max_len=64 * MAX_LEN)
    refused = eager(Reason.TOKENS)
    assert decide(plan) == (pieces(bucket) if bucket else refused)


def test_a_uniform_step_outside_its_graphs_is_replayed_in_pieces_if_it_can_be() -> None:
    long = decode(2, max_len=MAX_LEN + 1)
    assert decide(long) == pieces(16)
    assert decide(long, ONLY_FULL) == eager(Reason.CONTEXT)
    many = decode(65)
    assert decide(many) == eager(Reason.ROWS)  # what kept it from its own graphs


def test_a_mixed_step_with_a_row_longer_than_those_captured_goes_to_pieces() -> None:
    coverage = replace(COVERAGE, mixed=MIXED)
    for max_len, reason in ((MAX_LEN, Reason.MIXED), (MAX_LEN + 1, Reason.PIECEWISE)):
        assert decide(decode(2, num_new=(1, 9), max_len=[9, max_len]), coverage).reason is reason


@pytest.mark.parametrize(
    ("reason", "coverage", "plan", "others"),
    [
        (Reason.GRAPHS_OFF, Coverage(), decode(1), {}),
        (Reason.WIDTH, ONLY_FULL, decode(1, num_new=9), {}),
        (Reason.ROWS, ONLY_FULL, decode(9), {}),
        (Reason.CONTEXT, ONLY_FULL, decode(1, max_len=MAX_LEN + 1), {}),
        (Reason.TOKENS, COVERAGE, decode(1, num_new=65, samples=False), {}),
        (
            Reason.CAPTURE_FAILED,
            replace(ONLY_FULL, full={1: replace(DECODE, failed=frozenset({4}))}),
            decode(3),
            {},
        ),
        (
            Reason.CAPTURE_FAILED,
            replace(COVERAGE, piecewise=PiecewiseGraphs((16, 32), frozenset({32}))),
            decode(1, num_new=17, samples=False),
            {},
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_a_step_that_no_graph_covers_runs_eagerly_and_waits_for_its_loads_all_the_same(
    reason: Reason, coverage: Coverage, plan: BatchPlan, others: dict[str, Any]
) -> None:
    sampling = others.get("sampling", "greedy")
    assert decide(plan, coverage, **others) == eager(reason, sampling=sampling)
    behind = decide(replace(plan, waits=(1,)), coverage, PendingLoads(open={1}, last_started=1), **others)
    assert behind == eager(reason, (1,), sampling)


def test_a_capture_that_failed_leaves_the_other_graphs_alone() -> None:
    coverage = replace(ONLY_FULL, full={1: replace(DECODE, failed=frozenset({4}))})
    assert decide(decode(2), coverage).bucket == 2
    assert decide(decode(5), coverage).bucket == 8
    assert decide(decode(3), replace(coverage, piecewise=COVERAGE.piecewise)).reason is Reason.PIECEWISE


def test_a_step_is_replayed_exactly_when_every_limit_of_some_graph_holds() -> None:
    """Against conditions written down once more, over all combinations of a small space."""
    num_replayed = 0
    for is_broken, max_tokens in itertools.product((False, True), (0, 4)):
        full = FullGraphs((2,), max_len=20, failed=frozenset({2} if is_broken else ()))
        coverage = Coverage(full={2: full}, piecewise=PiecewiseGraphs((max_tokens,)) if max_tokens else None)
        for rows, width, max_len, drawing in itertools.product(
            (1, 2, 3), (1, 2, 3), (15, 19, 20, 21), ("greedy", "any")
        ):
            plan = decode(rows, num_new=width, num_draft=width - 1, max_len=max_len)
            fits = rows <= 2 and width == 2 and not is_broken and max_len <= 20
            should = fits or rows * width <= max_tokens
            decision = decide(plan, coverage, sampling=drawing)
            assert (decision.action is Action.REPLAY) == should, (coverage, plan, decision)
            num_replayed += should
    assert num_replayed > 100


def test_the_log_counts_all_decisions_and_tells_the_latest_ones() -> None:
    log = DecisionLog(2)
    assert log.last() == (0, "") and log.of(1) == ("", "")
    for step_id, decision in enumerate((eager(Reason.WIDTH), eager(Reason.ROWS), eager(Reason.WIDTH, (7,))), start=1):
        log.add(step_id, decision)
    assert log.last() == (3, "eager: width greedy after loads (7,)")
    assert [log.of(step_id) for step_id in (1, 2, 3)] == [("", ""), ("eager", "rows"), ("eager", "width")]
    assert log.counts() == {"eager": {"width": 2, "rows": 1}}
