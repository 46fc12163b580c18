"""The one loop: order of plans and results at each depth, and what overlap hides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.loop import MAX_ACK_WAIT_S, Engine
from hiserve.errors import InvariantError
from hiserve.ipc.messages import Admit
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


def test_the_verdicts_over_steps_are_among_the_stats(monkeypatch: pytest.MonkeyPatch) -> None:
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
