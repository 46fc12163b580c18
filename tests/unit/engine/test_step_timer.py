"""How long the next plan can wait: steps of a size take as long as those before them."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan
from hiserve.engine.step_timer import LEAD_S, RATE, StepTimer


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
