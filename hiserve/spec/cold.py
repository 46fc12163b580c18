"""When what drafts does nothing at all: its part in a step costs, and where no draft pays it gains nothing."""

from __future__ import annotations

from enum import Enum

COLD_AFTER = 64  # steps in a row for which no drafts were the best
MIN_SHARE = 0.002  # of a step's time; a part that takes less goes on
TRIAL_SHARE = 0.01  # of all time, for trials
TRIAL_ROWS = 8  # that verify drafts in a trial, in all its steps together
MIN_TRIAL_STEPS = 2
LAG_STEPS = 2  # until the results of a trial are in


class Phase(Enum):
    """What a head does behind a step."""

    WARM = "warm"  # takes part; drafts are chosen
    COLD = "cold"  # nothing
    WARMING = "warming"  # takes part; no drafts
    TRIAL = "trial"  # takes part; the fewest drafts
    VERDICT = "verdict"  # takes part; no drafts, until results are in


class Warmth:
    """Lets a head go cold after steps without drafts, and tries it again as often as trials may cost.

    A trial begins with steps in which the head only takes part: of tokens before them it has computed nothing. A cold
    head saves the time of those steps, and of the drafts behind them, before they begin.

    Args:
        warm_steps: In which the head takes part before its drafts are tried.

    Attributes:
        phase: Of the next step.
    """

    def __init__(self, warm_steps: int) -> None:
        self._warm_steps = warm_steps
        self.phase = Phase.WARM
        self._num_idle = 0
        self._left = 0  # steps of this phase
        self._trial_steps = 0
        self._saved = 0.0  # steps that trials may cost

    def price(self, num_rows: int, keep_share: float, draft_share: float) -> float:
        """Returns what a trial costs, in steps without a head.

        Args:
            num_rows: Of a step.
            keep_share: What taking part costs.
            draft_share: What the fewest drafts cost.
        """
        return (self._warm_steps + LAG_STEPS) * keep_share + _trial_steps(num_rows) * draft_share

    def rest(self, *, is_idle: bool, keep_share: float) -> bool:
        """Takes in a step of a warm head, whose drafts pay or do not; returns whether it goes cold.

        Args:
            is_idle: They do not.
            keep_share: What taking part costs, of a step.
        """
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle > COLD_AFTER and keep_share > MIN_SHARE:
            self.chill()
            return True
        return False

    def chill(self) -> None:
        """Lets the head go cold."""
        self.phase, self._saved = Phase.COLD, 0.0

    def save(self, num_rows: int, price: float) -> None:
        """Takes in a step of a cold head, and begins a trial if enough is saved."""
        self._saved += TRIAL_SHARE
        if self._saved >= price:
            self.wake(_trial_steps(num_rows))

    def wake(self, trial_steps: int = 0) -> None:
        """Ends the cold: with a trial, or without one where it is known that drafts pay."""
        self.phase, self._left = Phase.WARMING, self._warm_steps
        self._trial_steps, self._num_idle = trial_steps, 0

    def advance(self) -> Phase:
        """Returns what the head does behind this step, between the cold and the next choice."""
        while not self._left:
            match self.phase:
                case Phase.WARMING if self._trial_steps:
                    self.phase, self._left = Phase.TRIAL, self._trial_steps
                case Phase.TRIAL:
                    self.phase, self._left = Phase.VERDICT, LAG_STEPS
                case _:
                    self.phase = Phase.WARM
                    return self.phase
        self._left -= 1
        return self.phase


def _trial_steps(num_rows: int) -> int:
    return max(MIN_TRIAL_STEPS, -(-TRIAL_ROWS // num_rows))
