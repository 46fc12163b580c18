"""When a draft head skips steps: its part in a step costs time, and gains nothing where no draft pays."""

from __future__ import annotations

from enum import Enum

COLD_AFTER = 64  # consecutive steps for which no drafts were the best
MIN_SHARE = 0.002  # of a step's time; a head that takes less never goes cold
TRIAL_SHARE = 0.01  # of the time of all steps, spent on trials at most
TRIAL_ROWS = 8  # rows that verify drafts in one trial, summed over its steps
MIN_TRIAL_STEPS = 2
LAG_STEPS = 2  # from a trial's last step to its results


class Phase(Enum):
    """A head's part in a step."""

    WARM = "warm"  # it takes part; the number of drafts is chosen
    COLD = "cold"  # it skips the step
    WARMING = "warming"  # it takes part; no drafts
    TRIAL = "trial"  # it takes part; the fewest drafts
    PENDING = "pending"  # it takes part; no drafts until the results of the trial arrive


class HeadSchedule:
    """Decides in which steps a head takes part: it goes cold after steps without drafts, and is tried again at a bounded cost.

    A trial begins with steps in which the head takes part and drafts nothing, since it has computed nothing of the tokens
    before them. Before a trial begins, cold steps must have saved its cost.

    Args:
        warm_steps: Steps in which the head takes part before its drafts are tried.
    """

    def __init__(self, warm_steps: int) -> None:
        self._warm_steps = warm_steps
        self.phase = Phase.WARM  # of the next step
        self._num_idle = 0
        self._left = 0  # steps of this phase
        self._trial_steps = 0
        self._saved = 0.0  # cost that trials may have, in steps

    def trial_cost(self, num_rows: int, update_share: float, draft_share: float) -> float:
        """Returns the cost of a trial, in steps without a head.

        Args:
            num_rows: Of a step.
            update_share: Cost of taking part, of a step.
            draft_share: Cost of the fewest drafts, likewise.
        """
        return (self._warm_steps + LAG_STEPS) * update_share + _trial_steps(num_rows) * draft_share

    def note_idle(self, *, is_idle: bool, update_share: float) -> bool:
        """Records a step of a warm head; returns whether the head goes cold.

        Args:
            is_idle: No number of drafts pays.
            update_share: Cost of taking part, of a step.
        """
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle > COLD_AFTER and update_share > MIN_SHARE:
            self.go_cold()
            return True
        return False

    def go_cold(self) -> None:
        """Lets the head go cold."""
        self.phase, self._saved = Phase.COLD, 0.0

    def note_cold(self, num_rows: int, cost: float) -> None:
        """Records a step of a cold head; begins a trial once enough is saved."""
        self._saved += TRIAL_SHARE
        if self._saved >= cost:
            self.wake(_trial_steps(num_rows))

    def wake(self, trial_steps: int = 0) -> None:
        """Ends the cold phase: with a trial, or without one where drafts are known to pay."""
        self.phase, self._left = Phase.WARMING, self._warm_steps
        self._trial_steps, self._num_idle = trial_steps, 0

    def advance(self) -> Phase:
        """Returns the head's phase after this step, between cold and warm."""
        while not self._left:
            match self.phase:
                case Phase.WARMING if self._trial_steps:
                    self.phase, self._left = Phase.TRIAL, self._trial_steps
                case Phase.TRIAL:
                    self.phase, self._left = Phase.PENDING, LAG_STEPS
                case _:
                    self.phase = Phase.WARM
                    return self.phase
        self._left -= 1
        return self.phase


def _trial_steps(num_rows: int) -> int:
    return max(MIN_TRIAL_STEPS, -(-TRIAL_ROWS // num_rows))
