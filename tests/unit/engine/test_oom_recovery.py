"""Steps that were given up: no request loses a token, a page or its place; step sizes fall at once and grow slowly."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.loop import Engine
from hiserve.engine.oom_recovery import GROW_AFTER, MAX_GROW_AFTER, MAX_SMALLEST, MAX_UNDONE, StepBackoff
from hiserve.errors import ResourceError
from hiserve.ipc.messages import Admit
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine
from tests.helpers.steps import Steps
from tests.invariants.page_checks import check_pages

MOST = 4096


def pass_steps(backoff: StepBackoff, count: int) -> None:
    for _ in range(count):
        backoff.passed()


def fall(backoff: StepBackoff, num_tokens: int) -> list[int]:
    """Fails until nothing is smaller; returns the sizes of the steps that failed."""
    sizes = [num_tokens]
    while backoff.shrink(sizes[-1], was_replay=False):
        sizes.append(min(sizes[-1], backoff.num_tokens))
    return sizes


def test_steps_shrink_to_a_quarter_of_the_one_that_failed_down_to_one_token() -> None:
    backoff = StepBackoff(MOST)
    assert not backoff.is_reduced
    assert fall(backoff, 600) == [600, 150, 37, 9, 2, 1]
    assert backoff.is_reduced


def test_a_step_planned_before_the_fault_was_known_shrinks_nothing_further_than_its_own_quarter() -> None:
    backoff = StepBackoff(MOST)
    assert backoff.shrink(400, was_replay=False)
    assert backoff.shrink(800, was_replay=False)
    assert backoff.num_tokens == 100


def test_one_token_is_tried_again_without_a_graph() -> None:
    backoff = StepBackoff(MOST)
    backoff.shrink(2, was_replay=True)
    assert backoff.may_replay and backoff.num_tokens == 1
    assert backoff.shrink(1, was_replay=True)
    assert not backoff.may_replay
    assert not backoff.shrink(1, was_replay=False)


def test_steps_grow_back_after_so_many_that_passed() -> None:
    backoff = StepBackoff(MOST)
    fall(backoff, MOST)
    backoff.shrink(1, was_replay=True)
    sizes = []
    while backoff.is_reduced:
        sizes.append(backoff.num_tokens)
        pass_steps(backoff, GROW_AFTER - 1)
        assert backoff.num_tokens == sizes[-1]
        backoff.passed()
        assert backoff.may_replay
    assert sizes == [1, 4, 16, 64, 256, 1024]
    assert backoff.num_tokens == MOST


def test_a_fault_between_starts_the_count_anew() -> None:
    backoff = StepBackoff(MOST)
    backoff.shrink(400, was_replay=False)
    pass_steps(backoff, GROW_AFTER - 1)
    backoff.shrink(100, was_replay=False)
    pass_steps(backoff, GROW_AFTER - 1)
    assert backoff.num_tokens == 25


def test_where_growing_fails_again_and_again_it_is_tried_ever_more_rarely_and_forgotten_at_last() -> None:
    backoff = StepBackoff(1000)
    backoff.shrink(1000, was_replay=False)
    waits = []
    for _ in range(8):
        count = 0
        while backoff.is_reduced:
            backoff.passed()
            count += 1
        waits.append(count)
        backoff.shrink(1000, was_replay=False)
    assert waits == [min(GROW_AFTER * 2**i, MAX_GROW_AFTER) for i in range(8)]
    pass_steps(backoff, MAX_GROW_AFTER)  # grown
    pass_steps(backoff, MAX_GROW_AFTER)  # and sound for as long
    backoff.shrink(1000, was_replay=False)
    pass_steps(backoff, GROW_AFTER)
    assert not backoff.is_reduced


PROMPTS = {uid: np.arange(3 + 20 * uid, 14 + 22 * uid, dtype=np.int32) for uid in range(1, 6)}


def fail_once(steps: Steps) -> BatchPlan:
    """Plans a step that is given up, and takes its result in."""
    steps.executor.runs_out = lambda plan: True
    plan = steps.plan()
    steps.executor.runs_out = lambda plan: False
    steps.commit()
    return plan


def test_a_step_given_up_leaves_its_requests_as_they_were_and_gives_their_pages_back() -> None:
    steps = Steps(num_pages=60, budget=64)
    for uid, prompt in PROMPTS.items():
        steps.add(uid, prompt, max_tokens=12)
    for _ in range(3):
        steps.step()
    known = {uid: steps.rows.known[steps.row(uid)] for uid in PROMPTS}
    said = {uid: list(tokens) for uid, tokens in steps.said.items()}
    fail_once(steps)
    waiting = list(steps.planner._waiting)
    assert [request.uid for request in waiting] == list(PROMPTS)  # in the order in which they ran
    assert {request.uid: request.tokens.size for request in waiting} == known
    assert steps.said == said
    assert steps.rows.active.size == 0
    stats = steps.planner.stats()
    assert stats.free_pages + stats.evictable_pages == 59
    check_pages(steps.planner, steps.cache)
    steps.finish()
    assert steps.said == {uid: oracle(prompt, 12) for uid, prompt in PROMPTS.items()}
    assert stats.step_faults == {"out_of_memory": 1}


def test_the_next_steps_are_smaller_and_have_no_drafts_until_so_many_have_passed() -> None:
    steps = Steps(num_pages=400, budget=64, num_draft=2, max_len=200)
    for uid, prompt in PROMPTS.items():
        steps.add(uid, prompt, max_tokens=120)
    steps.step()
    steps.step()
    failed = fail_once(steps)
    assert failed.num_draft.any()
    limit = failed.num_tokens // 4
    for _ in range(GROW_AFTER):
        plan = steps.step()
        assert 0 < plan.num_tokens <= limit
        assert not plan.num_draft.any() and not plan.num_propose
    sizes = [steps.step().num_tokens for _ in range(2 * GROW_AFTER)]
    assert max(sizes) > limit
    steps.finish()
    assert steps.said == {uid: oracle(prompt, 120) for uid, prompt in PROMPTS.items()}


def test_the_smallest_step_is_planned_without_a_graph_once_a_replay_of_it_has_failed() -> None:
    steps = Steps(num_pages=60, budget=64)
    steps.add(1, PROMPTS[1], max_tokens=8)
    steps.step()
    plan = steps.planner.plan()
    assert plan is not None and plan.num_tokens == 1 and plan.may_replay
    steps.planner.commit(steps.executor.given_up_of(plan, was_replay=True))
    retried = steps.step()
    assert not retried.may_replay
    steps.finish()
    assert steps.said[1] == oracle(PROMPTS[1], 8)


def run(engine: Engine, prompts: dict[int, np.ndarray], max_tokens: int) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Runs all; returns the tokens of each, and the codes of those that failed."""
    for uid, prompt in prompts.items():
        engine.add(Admit(uid, prompt.size, SamplingParams(seed=1, max_tokens=max_tokens), b"", 0), prompt)
    said: dict[int, list[int]] = {uid: [] for uid in prompts}
    failed: dict[int, str] = {}
    for _ in range(20_000):
        if not engine.has_work:
            return said, failed
        updates = engine.step()
        if updates is None:
            continue
        at = 0
        for uid, count, finish in zip(updates.uids, updates.counts, updates.finishes, strict=True):
            said[uid] += updates.tokens[at : at + count].tolist()
            at += count
            assert finish != int(FinishReason.ABORT)
        for uid, code, message in updates.failed:
            assert uid not in failed and "memory" in message
            failed[uid] = code
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_requests_that_fit_only_in_small_steps_get_through_in_them(depth: int, most: int) -> None:
    """Whatever is larger fails each time, also when steps are tried to grow again."""
    engine, planner, executor, cache = echo_engine(num_pages=200, budget=64, depth=depth, num_draft=2, eos=())
    executor.runs_out = lambda plan: plan.num_tokens > most
    said, failed = run(engine, PROMPTS, 40)
    assert not failed
    assert said == {uid: oracle(prompt, 40) for uid, prompt in PROMPTS.items()}
    assert engine.stats().step_faults == {"out_of_memory": len(executor.given_up)}
    check_pages(planner, cache)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("culprit", [1, 3, 5])
def test_a_request_that_never_fits_ends_alone_and_soon(depth: int, culprit: int) -> None:
    engine, planner, executor, cache = echo_engine(num_pages=200, budget=64, depth=depth, eos=())
    rows = planner._rows
    executor.runs_out = lambda plan: culprit in rows.uid[rows.active[np.isin(rows.active, plan.rows)]]
    said, failed = run(engine, PROMPTS, 40)
    assert failed == {culprit: ResourceError.code}
    assert said == {uid: oracle(prompt, 40) if uid != culprit else [] for uid, prompt in PROMPTS.items()}
    assert len(executor.given_up) <= MAX_UNDONE + 2 * depth
    check_pages(planner, cache)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_never_fits_keeps_others_waiting_for_two_ladders_at_most(depth: int) -> None:
    engine, planner, executor, _ = echo_engine(num_pages=2000, budget=64, depth=depth, max_len=1100, eos=())
    rows, culprit = planner._rows, max(PROMPTS)
    executor.runs_out = lambda plan: culprit in rows.uid[rows.active[np.isin(rows.active, plan.rows)]]
    for uid, prompt in PROMPTS.items():
        engine.add(Admit(uid, prompt.size, SamplingParams(seed=1, max_tokens=1000), b"", 0), prompt)
    for _ in range(2 * GROW_AFTER):
        updates = engine.step()
        if updates is not None and updates.failed:
            return
    raise AssertionError(f"request {culprit} is still tried after {engine.stats().steps} steps")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_where_nothing_fits_each_request_ends_with_what_to_do(depth: int) -> None:
    engine, planner, executor, cache = echo_engine(num_pages=200, budget=64, depth=depth, eos=())
    executor.runs_out = lambda plan: True
    said, failed = run(engine, PROMPTS, 40)
    assert failed == dict.fromkeys(PROMPTS, ResourceError.code)
    assert not any(said.values())
    assert len(executor.given_up) <= 8 + (3 + depth) * len(PROMPTS)
    check_pages(planner, cache)


def test_a_request_alone_is_tried_again_before_it_ends_and_each_time_it_got_through() -> None:
    steps = Steps(num_pages=60, budget=64)
    steps.add(1, PROMPTS[1], max_tokens=8)
    steps.step()
    for _ in range(3):
        for _ in range(MAX_SMALLEST):
            assert fail_once(steps).num_tokens == 1
        steps.step()
    steps.finish()
    assert steps.said[1] == oracle(PROMPTS[1], 8)


def test_a_step_of_which_nobody_is_left_shrinks_nothing() -> None:
    engine, planner, executor, _ = echo_engine(num_pages=200, budget=64, depth=0, eos=())
    engine.add(Admit(1, 11, SamplingParams(seed=1, max_tokens=9), b"", 0), PROMPTS[1])
    executor.runs_out = lambda plan: True
    plan = planner.plan()
    assert plan is not None
    engine.abort([1])
    planner.commit(executor.submit(plan).result())
    assert not planner._backoff.is_reduced


def test_a_fault_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(num_pages=60, budget=64)
    steps.add(1, PROMPTS[1], max_tokens=8)
    with caplog.at_level(logging.WARNING):
        fail_once(steps)
    assert caplog.messages == [
        "a step failed (out_of_memory, requests: 1, tokens: 13): no memory for it. Steps have at most 3 tokens now; "
        "requests that ended: 0"
    ]
