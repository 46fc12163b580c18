"""What somebody who watches sees: steps are recorded under a lease, each once; without one, nothing is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, StepFault, StepResult
from hiserve.core.request import SamplingParams
from hiserve.engine.loop import Engine, StepTimer
from hiserve.engine.watching import StepLog
from hiserve.ipc.messages import Admit
from hiserve.ipc.watching import LEASE_S, MAX_STEPS
from tests.helpers.clock import Clock
from tests.helpers.engines import echo_engine

PROMPT = np.arange(3, 23, dtype=np.int32)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def add(engine: Engine, uid: int, max_tokens: int, prompt: np.ndarray = PROMPT) -> None:
    engine.add(Admit(uid, prompt.size, SamplingParams(seed=1, max_tokens=max_tokens), b"", 0), prompt)


def plan_of(step_id: int, num_new: list[int], num_draft: list[int], samples: list[bool]) -> BatchPlan:
    new, drafts = np.array(num_new, dtype=np.int32), np.array(num_draft, dtype=np.int32)
    rows = np.arange(1, new.size + 1, dtype=np.int32)
    return BatchPlan(step_id, rows, new, drafts, np.array(samples, dtype=np.bool_), num_scored=0 * rows, max_len=new)


def result_of(step_id: int, *counts: int, fault: StepFault | None = None) -> StepResult:
    each = np.array(counts, dtype=np.int32)
    return StepResult(step_id, counts=each, tokens=each[:, None], fault=fault)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_are_recorded_from_the_first_question_on_each_once(depth: int, clock: Clock) -> None:
    engine, _, _, _ = echo_engine(num_pages=40, depth=depth, eos=(), budget=16, timer=StepTimer(clock))
    add(engine, 1, max_tokens=30)
    for _ in range(4):
        engine.step()
    assert engine._log is None, "steps were recorded that nobody asked for"
    assert engine.watch("steps", 0.0) == (clock.now_s, [], [])
    seen, since_s = [], clock.now_s
    while engine.has_work:
        clock.now_s += 0.25
        engine.step()
        since_s, _, steps = engine.watch("steps", since_s)
        seen += steps
    first = 5 - depth
    assert [step.step for step in seen] == list(range(first, first + len(seen)))
    assert [step.num_emitted for step in seen] == [1] * len(seen) and len(seen) > 20
    assert {(step.num_rows, step.decision, step.reason) for step in seen} == {(1, "eager", "graphs_off")}
    assert all(before.end_s <= step.begin_s <= step.end_s for before, step in itertools.pairwise(seen))
    assert len({step.end_s for step in seen}) == len(seen)
    assert engine.watch("steps", 0.0)[2] == seen


def test_without_a_question_the_lease_ends_and_the_records_with_it(clock: Clock) -> None:
    engine, _, _, _ = echo_engine(num_pages=40, eos=(), timer=StepTimer(clock))
    add(engine, 1, max_tokens=30)
    engine.watch("rows", 0.0)  # any question begins it
    for _ in range(3):
        engine.step()
    clock.now_s += LEASE_S
    engine.step()
    assert len(engine.watch("steps", 0.0)[2]) == 4, "the lease had not ended"
    clock.now_s += LEASE_S + 0.001
    engine.step()
    assert engine._log is None
    assert engine.watch("steps", 0.0)[2] == []
    engine.step()
    clock.now_s += LEASE_S + 0.001  # an engine without work notices with the next question
    assert engine.watch("steps", 0.0)[2] == []


def test_each_question_begins_the_lease_anew(clock: Clock) -> None:
    engine, _, _, _ = echo_engine(num_pages=40, eos=(), timer=StepTimer(clock))
    add(engine, 1, max_tokens=30)
    for number in range(4):
        assert len(engine.watch("steps", 0.0)[2]) == number
        clock.now_s += 0.75 * LEASE_S
        engine.step()


def test_rows_show_lengths_and_state_and_no_tokens() -> None:
    engine, _, _, _ = echo_engine(num_pages=60, page_size=4, eos=(), budget=12)
    add(engine, 7, max_tokens=9)
    engine.step()
    _, (row,), steps = engine.watch("rows", 0.0)
    assert not steps
    assert (row.uid, row.state, row.num_prompt, row.num_computed, row.num_generated) == (7, "prefill", 20, 12, 0)
    for _ in range(3):
        engine.step()
    _, (row,), _ = engine.watch("rows", 0.0)
    assert (row.state, row.num_computed, row.num_generated, row.num_left) == ("decode", 22, 3, 6)
    assert (row.num_cached, row.source, row.num_pages, row.has_grammar) == (0, "cold", 6, False)
    while engine.has_work:
        engine.step()
    assert engine.watch("rows", 0.0)[1] == []
    add(engine, 8, max_tokens=9)
    engine.step()
    _, (row,), _ = engine.watch("rows", 0.0)
    assert (row.uid, row.num_cached, row.source) == (8, 16, "device")


def test_a_row_that_waits_for_its_load_is_shown_so() -> None:
    engine, _, _, _ = echo_engine(num_pages=40, num_host_pages=40, eos=())
    add(engine, 1, max_tokens=2)
    while engine.has_work:
        engine.step()
    engine.flush(("device",))
    add(engine, 2, max_tokens=2)
    states = []
    while engine.has_work:
        engine.step()
        states += [(row.state, row.source) for row in engine.watch("rows", 0.0)[1]]
    assert ("load", "host") in states, states


def test_a_step_is_recorded_with_its_tokens_drafts_and_the_wait_for_its_masks() -> None:
    log = StepLog(mask_s=5.0)
    plan = plan_of(1, [4, 1, 9, 3], [3, 0, 0, 2], [True, True, False, True])
    log.add(plan, result_of(1, 3, 1, 1), (1.0, 1.5), ("replay", "verify"), 5.25)
    log.add(plan_of(2, [8], [0], [True]), result_of(2), (1.5, 1.75), ("defer", "load_failed"), 5.25)
    failed = result_of(3, fault=StepFault("out_of_memory", "no"))
    log.add(plan_of(3, [], [], []), failed, (1.75, 2.0), ("", ""), 6.0)
    first, second, third = log.since(0.0)
    assert (first.num_rows, first.num_tokens, first.num_prefill, first.num_emitted) == (4, 17, 9, 5)
    assert (first.num_drafts, first.num_accepted, first.mask_s) == (5, 2, 0.25)
    assert (first.begin_s, first.end_s, first.decision, first.reason, first.fault) == (1.0, 1.5, "replay", "verify", "")
    assert (second.num_emitted, second.num_accepted, second.mask_s, second.num_prefill) == (0, 0, 0.0, 8)
    assert (third.num_rows, third.mask_s, third.fault) == (0, 0.75, "out_of_memory")
    assert log.since(1.5) == [second, third]
    assert log.since(2.0) == []


def test_the_last_steps_are_kept() -> None:
    log = StepLog(mask_s=0.0)
    plan, result = plan_of(1, [1], [0], [True]), result_of(1, 1)
    for step in range(MAX_STEPS + 3):
        log.add(plan, result, (float(step), step + 1.0), ("replay", "decode"), 0.0)
    assert [step.begin_s for step in log.since(0.0)] == list(map(float, range(3, MAX_STEPS + 3)))
