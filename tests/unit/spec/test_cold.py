"""A head that is never right costs next to nothing: simulated devices, against one that nothing drafts for."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from hiserve.core.startup_measurements import StepCosts
from hiserve.spec import adaptive
from hiserve.spec.adaptive import COLD_AFTER, TRIAL_SHARE, DraftController, HeadSchedule, Phase
from tests.helpers.step_costs import step_costs

K, CONTEXT, WARM_STEPS = 5, 500.0, 32
ROWS = np.array([1, 4, 16, 32, 128])
GOOD, NEVER = (0.8,) * K, (0.0,) * K
BAR = 0.97


def device(update_share: float) -> StepCosts:
    """A step takes 5 ms, and the head's part without drafts a share of that."""
    tiers = np.arange(K + 1)
    tokens = ROWS[:, None] * (tiers + 1.0)
    verify = 5e-3 + 6e-5 * np.maximum(tokens - 32, 0)
    follow = update_share * verify[:, :1] * np.where(tiers, 1.5, 1.0)
    return step_costs(ROWS, tiers, verify, follow, 2e-4 + 1e-6 * ROWS)


@dataclass
class Run:
    """Serves steps with drafts that are right by chance, and notes what each took and what the head did.

    Args:
        costs: Of the device.
        warm_steps: As ``DraftController`` takes it.
        depth: Results that are out when a step is planned.
        noise: Of times, the deviation of their logarithm.
    """

    costs: StepCosts
    warm_steps: int | None = WARM_STEPS
    depth: int = 1
    noise: float = 0.03
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # tokens that a device without a head emits in that time
    did: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = DraftController(self.costs, self.warm_steps)
        self._rng = np.random.default_rng(3)
        self._flying: deque[tuple[np.ndarray, np.ndarray, float, bool]] = deque()
        self._following = 0

    def serve(self, steps: int, rows: int, chances: tuple[float, ...]) -> None:
        costs, controller, rng = self.costs, self.controller, self._rng
        allowed, bucket = np.full(rows, K, np.int32), self.costs.bucket(rows)
        for _ in range(steps):
            num_draft = self._following
            stays_cold = controller.stays_cold(allowed)
            self._following = 0 if stays_cold else controller.choose(allowed, CONTEXT)
            assert not (stays_cold and not controller.is_cold)
            assert not (controller.is_cold and self._following)
            whole = costs.verify[bucket][num_draft]
            if not controller.is_cold:
                whole = float(costs.seconds(bucket, rows * CONTEXT)[num_draft])
            counts = 1 + np.cumprod(rng.random((rows, num_draft)) < chances[:num_draft], 1).sum(1)
            self.seconds.append(whole)
            self.tokens.append(float(counts.sum()))
            self.plain.append(rows * whole / costs.verify[bucket][0])
            self.did.append("cold" if controller.is_cold else f"drafts {self._following}")
            told = whole * float(np.exp(self.noise * rng.standard_normal()))
            self._flying.append((np.full(rows, num_draft, np.int32), counts.astype(np.int32), told, controller.is_cold))
            if len(self._flying) > self.depth:
                verified, accepted, told, was_cold = self._flying.popleft()
                if not was_cold or verified.any():
                    controller.record(verified, accepted, int(verified.max()), CONTEXT, told)

    def share(self, begin: int, end: int | None = None) -> float:
        """Tokens of some steps, of what a device without a head emits in their time."""
        return sum(self.tokens[begin:end]) / sum(self.plain[begin:end])


@pytest.mark.parametrize("update_share", [0.02, 0.07, 0.27])
@pytest.mark.parametrize("rows", ROWS.tolist())
def test_a_head_that_is_never_right_costs_next_to_nothing(rows: int, update_share: float) -> None:
    run = Run(device(update_share))
    run.serve(400, rows, NEVER)
    run.serve(6000, rows, NEVER)
    assert run.share(400) >= BAR
    assert Counter(run.did[400:])["cold"] > 0.6 * 6000
    assert set(run.did[400:]) >= {"cold", "drafts 0", "drafts 1"}, "it was not tried again"


@pytest.mark.parametrize("rows", [1, 16])
def test_a_head_that_always_takes_part_costs_that_for_ever(rows: int) -> None:
    run = Run(device(0.07), warm_steps=None)
    run.serve(2000, rows, NEVER)
    assert run.share(400) < 0.95
    assert "cold" not in run.did


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_it_comes_back_where_drafts_are_accepted_again(rows: int, depth: int) -> None:
    run = Run(device(0.05), depth=depth)
    run.serve(600, rows, NEVER)
    assert run.did[-1] == "cold"
    run.serve(3000, rows, GOOD)
    price = WARM_STEPS * 0.05 + 12
    back = next(at for at in range(600, 3600) if run.did[at] not in ("cold", "drafts 0", "drafts 1"))
    assert back - 600 < price / TRIAL_SHARE
    assert run.share(back + 50) > (1.3 if rows == 1 else 1.2)
    assert "cold" not in run.did[back:]


def test_it_never_comes_back_without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "TRIAL_SHARE", 0.0)
    run = Run(device(0.05))
    run.serve(600, 1, NEVER)
    run.serve(3000, 1, GOOD)
    assert set(run.did[600:]) == {"cold"}


def test_before_a_trial_the_head_takes_part_in_as_many_steps_as_it_is_to_see() -> None:
    run = Run(device(0.05))
    run.serve(4000, 4, NEVER)
    at = max(at for at in range(4000) if run.did[at] == "drafts 1" != run.did[at - 1])
    assert run.did[at - WARM_STEPS - 1 : at] == ["cold", *["drafts 0"] * WARM_STEPS]


def test_where_drafts_are_known_to_pay_it_comes_back_at_once() -> None:
    """Right, but of no use beside many rows; of use to the few that are left."""
    run = Run(device(0.05))
    run.serve(300, 1, GOOD)
    run.serve(600, 128, GOOD)
    assert run.did[-1] == "cold"
    run.serve(200, 1, GOOD)
    assert run.did[900 : 900 + WARM_STEPS] == ["drafts 0"] * WARM_STEPS
    assert run.share(900 + WARM_STEPS + 20) > 1.3


def test_it_comes_back_in_the_first_cold_step_of_a_batch_that_it_came_back_for_before() -> None:
    run = Run(device(0.05))
    run.serve(300, 1, GOOD)
    run.serve(600, 128, GOOD)
    run.serve(200, 1, GOOD)
    while not run.controller.is_cold:
        run.serve(1, 128, GOOD)
    run.serve(WARM_STEPS, 1, GOOD)
    assert run.did[-WARM_STEPS:] == ["drafts 0"] * WARM_STEPS


def test_a_head_whose_part_costs_nothing_stays_warm() -> None:
    run = Run(device(0.001))
    run.serve(1000, 32, NEVER)
    assert run.did.count("drafts 0") > 500 and "cold" not in run.did


def test_a_trial_whose_times_are_those_of_stalls_changes_nothing() -> None:
    """Steps that take no time with drafts: by times alone they would pay."""
    costs = device(0.05)
    controller = DraftController(costs, WARM_STEPS)
    allowed = np.full(1, K, np.int32)
    following, trials, was_cold = 0, 0, False
    for _ in range(6000):
        num_draft, following = following, 0 if controller.stays_cold(allowed) else controller.choose(allowed, CONTEXT)
        was_cold = was_cold or controller.is_cold
        assert not was_cold or controller.num_draft == 0
        trials += following > 0 and was_cold
        if not controller.is_cold:
            told = float(costs.seconds(0, CONTEXT)[num_draft]) * (0.3 if num_draft and was_cold else 1.0)
            controller.record(np.array([num_draft], np.int32), np.ones(1, np.int32), num_draft, CONTEXT, told)
    assert trials > 10


def test_rows_that_want_no_drafts_ask_for_nothing() -> None:
    controller = DraftController(device(0.05), WARM_STEPS)
    nobody = np.zeros(2, np.int32)
    for _ in range(2 * COLD_AFTER):
        assert not controller.stays_cold(nobody)
        assert controller.choose(nobody, CONTEXT) == 0
    assert not controller.is_cold


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_the_price_of_a_trial_is_what_its_steps_cost(rows: int) -> None:
    update_share, draft_share = 0.01, 0.3
    schedule = HeadSchedule(WARM_STEPS)
    price = schedule.trial_cost(rows, update_share, draft_share)
    schedule.go_cold()
    num_saved = 0
    while schedule.phase is Phase.COLD:
        schedule.note_cold(rows, price)
        num_saved += 1
    cost, num_tried = 0.0, 0
    while (phase := schedule.advance()) is not Phase.WARM:
        cost += draft_share if phase is Phase.TRIAL else update_share
        num_tried += rows * (phase is Phase.TRIAL)
    assert num_tried >= adaptive.TRIAL_ROWS
    assert cost == pytest.approx(price)
    assert num_saved * TRIAL_SHARE == pytest.approx(cost, abs=2 * TRIAL_SHARE)


def test_phases_follow_each_other() -> None:
    schedule = HeadSchedule(2)
    for _ in range(COLD_AFTER):
        schedule.note_idle(is_idle=True, update_share=0.1)
    schedule.note_idle(is_idle=False, update_share=0.1)
    assert schedule.phase is Phase.WARM
    assert [schedule.note_idle(is_idle=True, update_share=0.1) for _ in range(COLD_AFTER + 1)] == [
        False
    ] * COLD_AFTER + [True]
    assert schedule.phase is Phase.COLD
    for _ in range(round(1 / TRIAL_SHARE)):
        assert schedule.phase is Phase.COLD
        schedule.note_cold(8, 1.0)
    phases = [schedule.advance() for _ in range(7)]
    assert phases == [*[Phase.WARMING] * 2, *[Phase.TRIAL] * 2, *[Phase.PENDING] * 2, Phase.WARM]
    schedule.wake()
    assert [schedule.advance() for _ in range(3)] == [Phase.WARMING, Phase.WARMING, Phase.WARM]
    assert not any(schedule.note_idle(is_idle=True, update_share=0.1) for _ in range(COLD_AFTER))
