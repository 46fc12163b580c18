"""How many drafts follow a step: as many as were asked for, or as the controller says; rows may want fewer."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.core.request import SpecParams
from hiserve.spec.adaptive import DraftController, StepCosts
from tests.helpers.steps import Steps


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


class Scripted(DraftController):
    """Chooses what it is told to; notes what it is asked and told."""

    def __init__(self, chosen: list[int], *, times_own_drafts: bool = False) -> None:
        tiers, each = np.arange(4), np.ones((1, 4))
        super().__init__(StepCosts(np.ones(1), tiers, each, each, np.ones(1), times_own_drafts=times_own_drafts))
        self._chosen = chosen
        self.allowed: list[list[int]] = []
        self.told: list[tuple[list[int], list[int], int, bool]] = []

    def choose(self, allowed: Int32Array, mean_context: float) -> int:
        assert mean_context > 0
        self.allowed.append(allowed.tolist())
        return self._chosen.pop(0)

    def record(
        self, num_draft: Int32Array, counts: Int32Array, num_made: int, mean_context: float, seconds: float | None
    ) -> None:
        self.told.append((num_draft.tolist(), counts.tolist(), num_made, seconds is None))


def plans(steps: Steps, emitted: list[list[int]]) -> list[BatchPlan]:
    """Plans and commits one step for each list of emitted tokens."""
    made = []
    for tokens in emitted:
        plan = steps.planner.plan()
        assert plan is not None
        made.append(plan)
        steps.emit(plan, tokens)
    return made


@pytest.mark.parametrize("times_own_drafts", [False, True])
def test_each_step_proposes_what_is_chosen_for_it_and_verifies_what_was_chosen_before(times_own_drafts: bool) -> None:
    controller = Scripted([2, 0, 3, 1], times_own_drafts=times_own_drafts)
    steps = Steps(num_pages=30, num_draft=3, controller=controller)
    steps.add(1, prompt(5), max_tokens=20)
    made = plans(steps, [[11], [12, 13], [14], [15, 16, 17, 18]])
    assert [plan.num_propose for plan in made] == [2, 0, 3, 1]
    assert [plan.num_draft.tolist() for plan in made] == [[0], [2], [0], [3]]
    assert controller.allowed == [[3]] * 4
    num_made = [2, 0, 3, 1] if times_own_drafts else [0, 2, 0, 3]
    has_prompt = [True, False, False, False]
    assert controller.told == [
        ([0], [1], num_made[0], has_prompt[0]),
        ([2], [2], num_made[1], has_prompt[1]),
        ([0], [1], num_made[2], has_prompt[2]),
        ([3], [4], num_made[3], has_prompt[3]),
    ]


def test_a_row_has_no_more_drafts_than_it_wants() -> None:
    steps = Steps(num_pages=30, num_draft=3, controller=Scripted([3, 3, 3]))
    steps.add(1, prompt(5, seed=1), max_tokens=20, spec=SpecParams(num_steps=1))
    steps.add(2, prompt(5, seed=2), max_tokens=20)
    first = steps.planner.plan()
    assert first is not None and first.num_propose == 3
    steps.emit(first, [11], [21])
    second = steps.planner.plan()
    assert second is not None
    assert dict(zip(second.rows.tolist(), second.num_draft.tolist(), strict=True)) == {1: 1, 2: 3}


def test_nothing_is_chosen_for_a_step_that_draws_nothing() -> None:
    controller = Scripted([1])
    steps = Steps(num_pages=30, budget=4, num_draft=3, controller=controller)
    steps.add(1, prompt(7), max_tokens=4)
    first = steps.planner.plan()
    assert first is not None and (first.num_propose, controller.allowed) == (0, [])
