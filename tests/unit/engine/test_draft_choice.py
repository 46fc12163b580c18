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


class Cold(Scripted):
    """Goes cold with its third step; what stands behind the rows then is still verified."""

    num_steps = 0

    @property
    def is_cold(self) -> bool:
        return self.num_steps > 2

    def stays_cold(self, allowed: Int32Array) -> bool:
        self.num_steps += 1
        return self.is_cold


def test_a_cold_step_proposes_nothing_and_tells_of_drafts_alone() -> None:
    controller = Cold([2, 2])
    steps = Steps(num_pages=30, num_draft=3, controller=controller)
    steps.add(1, prompt(5), max_tokens=20)
    made = plans(steps, [[11], [12, 13], [14, 15, 16], [17], [18]])
    assert [plan.num_propose for plan in made] == [2, 2, 0, 0, 0]
    assert [plan.num_draft.tolist() for plan in made] == [[0], [2], [2], [0], [0]]
    assert [plan.is_cold for plan in made] == [False, False, True, True, True]
    # A step that the head takes no part in costs what a step with it does not: it tells nothing of that.
    assert [num_draft for num_draft, *_ in controller.told] == [[0], [2], [2]]


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


def with_drafts(drafted: list[int], most: list[int]) -> list[int]:
    """What rows verify behind which so many drafts stand, of at most so many."""
    steps = Steps(num_pages=60, num_draft=5)
    for uid in range(len(drafted)):
        steps.add(uid + 1, prompt(5, uid), max_tokens=20)
    steps.planner.plan()
    state, choice = steps.planner._rows, steps.planner._draft_choice
    rows = state.active
    state.drafted[rows], state.max_draft[rows] = drafted, most
    return choice.to_verify(rows).tolist()


def test_rows_that_a_choice_left_with_different_drafts_verify_the_least_of_them() -> None:
    """Rows of one width are one graph."""
    assert with_drafts([3, 1, 5], [5, 5, 5]) == [1, 1, 1]
    assert with_drafts([3, 3, 3], [5, 5, 5]) == [3, 3, 3]
    assert with_drafts([3, 0, 5], [5, 5, 5]) == [3, 0, 5]  # a graph is not to be had
    assert with_drafts([3, 1, 5], [5, 1, 5]) == [3, 1, 5]  # nor for requests that want different numbers
    assert with_drafts([], []) == []
