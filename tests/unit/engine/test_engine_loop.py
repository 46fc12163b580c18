"""The step loop: order of plans and results at each depth, what overlap hides, and how long a plan can wait for a load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.loop import LEAD_S, MAX_ACK_WAIT_S, RATE, Engine, StepTimer
from hiserve.engine.planner import Planner
from hiserve.errors import InvariantError
from hiserve.ipc.messages import Admit
from tests.helpers.clock import Clock
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine

PROMPT = np.arange(3, 12, dtype=np.int32)
NUM_STEPS = 30
PATIENCE_S = 60  # for what happens at once unless it never does


def add(engine: Engine, uid: int, max_tokens: int) -> None:
    engine.add(Admit(uid, PROMPT.size, SamplingParams(seed=1, max_tokens=max_tokens), b"", 0), PROMPT)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_is_planned_while_depth_steps_are_in_flight(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, planner, executor, _ = echo_engine(num_pages=30, depth=depth, eos=())
    events: list[str] = []

    def submit(plan: BatchPlan, run: Callable[[BatchPlan], Future[StepResult]] = executor.submit) -> Future[StepResult]:
        events.append(f"plan {plan.step_id}")
        return run(plan)

    def commit(result: StepResult, take: Callable[[StepResult], None] = planner.commit) -> None:
        events.append(f"commit {result.step_id}")
        take(result)

    monkeypatch.setattr(executor, "submit", submit)
    monkeypatch.setattr(planner, "commit", commit)
    add(engine, 1, max_tokens=6)
    said: list[int] = []
    ends: list[int] = []
    while engine.has_work:
        updates = engine.step()
        if updates is not None:
            said += updates.tokens.tolist()
            ends += [finish for finish in updates.finishes if finish]
    assert said == oracle(PROMPT, 6)
    assert ends == [FinishReason.LENGTH]
    for step_id in range(1, 4):
        assert events.index(f"plan {step_id + depth}") < events.index(f"commit {step_id}")
        assert events.index(f"commit {step_id}") < events.index(f"plan {step_id + depth + 1}")
    assert [event for event in events if event.startswith("commit")] == [f"commit {i}" for i in range(1, 7)]


@pytest.mark.parametrize("has_persistent_tiers", [False, True])
def test_copies_to_tiers_that_end_with_the_process_are_not_waited_for(
    has_persistent_tiers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, planner, executor, _ = echo_engine(num_pages=30)
    monkeypatch.setattr(Planner, "is_copying", True)
    engine = Engine(planner, executor, 0, made.facts, has_persistent_tiers=has_persistent_tiers)
    assert engine.is_copying == has_persistent_tiers
    if not has_persistent_tiers:
        engine.finish_copies(1e9)  # at once


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_fails_ends_the_engine(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, executor, _ = echo_engine(num_pages=30, depth=depth, eos=())

    def submit(plan: BatchPlan, run: Callable[[BatchPlan], Future[StepResult]] = executor.submit) -> Future[StepResult]:
        done = run(plan)
        if plan.step_id == 3:
            done = Future()
            done.set_exception(InvariantError("a page holds something else"))
        return done

    monkeypatch.setattr(executor, "submit", submit)
    add(engine, 1, max_tokens=6)
    with pytest.raises(InvariantError, match="something else"):
        drain(engine)
    engine.abort([1])
    assert not engine.has_work
    with pytest.raises(AssertionError, match="has failed"):
        engine.step()


def test_a_step_without_work_does_nothing() -> None:
    engine, *_ = echo_engine(num_pages=30)
    assert not engine.has_work
    assert engine.step() is None


def test_the_decisions_over_steps_are_among_the_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, executor, _ = echo_engine(num_pages=30)
    counts = {"replay": {"decode": 2}, "eager": {"width": 1}}
    monkeypatch.setattr(executor, "gate_counts", lambda: counts)
    assert engine.stats().graph_gate == counts


class ScriptedPace:
    """Says what the test wants; counts steps that began and did not end."""

    def __init__(self, *slack_s: float) -> None:
        self.slack = list(slack_s)
        self.num_in_flight = 0

    def begin(self, plan: BatchPlan) -> None:
        self.num_in_flight += 1

    def end(self) -> None:
        self.num_in_flight -= 1

    def time_left_s(self) -> float:
        return self.slack.pop(0) if self.num_in_flight and self.slack else 0.0


@pytest.mark.parametrize("is_loading", [True, False])
def test_while_rows_wait_for_loads_the_next_plan_is_made_as_late_as_can_be(
    is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are taken in meanwhile: each wait is a turn of its own."""
    pace: Any = ScriptedPace(0.0125, 0.0005, 0.0, 0.0)
    engine, planner, executor, _ = echo_engine(num_pages=30, depth=1, eos=(), timer=pace)
    waits: list[float] = []
    plans: list[int] = []

    def submit(plan: BatchPlan, run: Callable[[BatchPlan], Future[StepResult]] = executor.submit) -> Future[StepResult]:
        plans.append(plan.step_id)
        return run(plan)

    monkeypatch.setattr(executor, "submit", submit)
    monkeypatch.setattr(executor, "take_acks", lambda wait_s=0.0: waits.append(wait_s) or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(type(planner), "is_loading", property(lambda self: is_loading))
    add(engine, 1, max_tokens=4)
    engine.step()
    assert plans == [1] and waits == [0.0]
    if is_loading:
        for waited in (MAX_ACK_WAIT_S, 0.0005):
            assert engine.step() is None
            assert plans == [1] and waits[-1] == waited
    engine.step()
    assert plans == [1, 2]
    drain(engine)
    assert plans == [1, 2, 3, 4]


def test_the_draw_of_a_step_does_not_wait_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has nothing to do after the forward of a step that awaits its masks."""
    pace: Any = ScriptedPace(0.0125, 0.0)
    engine, planner, executor, _ = echo_engine(num_pages=30, depth=1, eos=(), timer=pace)
    add(engine, 1, max_tokens=4)
    engine.step()
    done: list[object] = []
    engine._masks = lambda: (None, {})
    monkeypatch.setattr(executor, "draw", lambda masks: done.append("draw"), raising=False)
    monkeypatch.setattr(executor, "take_acks", lambda wait_s=0.0: done.append(wait_s) or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(type(planner), "is_loading", property(lambda self: True))
    assert engine.step() is None
    assert done == [0.0, "draw", MAX_ACK_WAIT_S]


def test_the_executors_exception_comes_out_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, executor, _ = echo_engine(num_pages=30)
    failed: Future[StepResult] = Future()
    failed.set_exception(RuntimeError("the device is gone"))
    monkeypatch.setattr(executor, "submit", lambda plan: failed)
    add(engine, 1, max_tokens=2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


# --- what overlap hides -------------------------------------------------------------------


def test_overlap_plans_a_step_while_the_one_before_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step ends only when the plan after it has been made, for which an engine without overlap would wait for ever."""
    engine, planner, executor, _ = echo_engine(num_pages=30, depth=1, eos=(), threaded=True)
    num_planned, changed = 0, threading.Condition()

    def plan(inner: Callable[[], BatchPlan | None] = planner.plan) -> BatchPlan | None:
        nonlocal num_planned
        made = inner()
        with changed:
            num_planned += 1
            changed.notify_all()
        return made

    def run(plan: BatchPlan, inner: Callable[[BatchPlan], StepResult] = executor._run) -> StepResult:
        with changed:
            assert changed.wait_for(lambda: num_planned > plan.step_id, PATIENCE_S), (
                f"step {plan.step_id} was waited for"
            )
        return inner(plan)

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(executor, "_run", run)
    add(engine, 1, max_tokens=NUM_STEPS)
    drain(engine)
    assert num_planned >= NUM_STEPS
    engine.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plan_of(*num_new: int, waits: tuple[int, ...] = ()) -> BatchPlan:
    rows = np.arange(1, len(num_new) + 1, dtype=np.int32)
    new, zeros = np.array(num_new, dtype=np.int32), np.zeros_like(rows)
    return BatchPlan(1, rows, new, num_draft=zeros, samples=rows > 0, num_scored=zeros, max_len=new, waits=waits)


def run(timer: StepTimer, clock: Clock, plan: BatchPlan, seconds: float) -> None:
    timer.begin(plan)
    clock.now_s += seconds
    timer.end()


def test_a_step_goes_on_for_as_long_as_one_of_its_size_took(clock: Clock) -> None:
    timer = StepTimer(clock)
    run(timer, clock, plan_of(1, 1), 0.010)
    run(timer, clock, plan_of(1, 300), 0.050)
    for plan, seconds in ((plan_of(1, 1, 1), 0.010), (plan_of(1, 310), 0.050)):
        timer.begin(plan)
        assert timer.time_left_s() == pytest.approx(seconds - LEAD_S)
        clock.now_s += 0.004
        assert timer.time_left_s() == pytest.approx(seconds - LEAD_S - 0.004)
        clock.now_s += seconds
        assert timer.time_left_s() == 0.0
        clock.now_s -= 0.004
        timer.end()


def test_nobody_knows_how_long_a_new_size_takes_or_one_that_waits(clock: Clock) -> None:
    timer = StepTimer(clock)
    assert timer.time_left_s() == 0.0
    run(timer, clock, plan_of(5, waits=(3,)), 0.5)  # what it took says nothing of others
    for plan in (plan_of(5), plan_of(300)):
        timer.begin(plan)
        assert timer.time_left_s() == 0.0
        clock.now_s += 0.02
        timer.end()
    timer.begin(plan_of(5, waits=(4,)))
    assert timer.time_left_s() == 0.0


def test_a_step_begins_when_the_one_before_it_ends(clock: Clock) -> None:
    timer = StepTimer(clock)
    run(timer, clock, plan_of(1), 0.010)
    timer.begin(plan_of(1))
    clock.now_s += 0.002
    timer.begin(plan_of(1))
    assert timer.time_left_s() == 0.0  # two are in flight
    clock.now_s += 0.008
    timer.end()
    clock.now_s += 0.001
    assert timer.time_left_s() == pytest.approx(0.010 - LEAD_S - 0.001)
    clock.now_s += 0.009
    timer.end()
    timer.begin(plan_of(1))
    assert timer.time_left_s() == pytest.approx(0.010 - LEAD_S)  # each of them took as long as the first


def test_times_follow_what_steps_take_now(clock: Clock) -> None:
    timer = StepTimer(clock)
    run(timer, clock, plan_of(1), 0.010)
    run(timer, clock, plan_of(1), 0.020)
    timer.begin(plan_of(1))
    assert timer.time_left_s() == pytest.approx(0.010 + RATE * 0.010 - LEAD_S)
