"""The number of drafts per step, and whether they are a tree: those with the most expected tokens per second, which may be none."""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.startup_measurements import FloatArray, StepCosts
from hiserve.spec.acceptance import TierAcceptance

COLD_AFTER = 64  # consecutive steps for which no drafts were the best
MIN_SHARE = 0.002  # of a step's time; a head that takes less never goes cold
TRIAL_SHARE = 0.01  # of the time of all steps, spent on trials at most
TRIAL_ROWS = 8  # rows that verify drafts in one trial, summed over its steps
MIN_TRIAL_STEPS = 2
LAG_STEPS = 2  # from a trial's last step to its results
MIN_GAIN = 0.05  # of a change, as a share of the tokens per second
LEAST_GAIN = 0.01  # likewise, once nothing has changed for long
DWELL_STEPS = 20  # from one change to the next
PROBE_SHARE = 0.01  # of the time of all steps, for other numbers of drafts than the best known
MIN_PROBE_LOSS = 0.1  # steps; assumed cost of a probe at least, so that equal numbers are not probed all the time
MAX_CREDIT = 2.0  # steps; most credit that successful probes build up
TIME_RATE = 0.01  # of a new time, against those before it
DRAFT_RATE = 0.2  # likewise, of drafts after the first: only probes measure their time
MIN_S = 1e-9  # of a step, where the clock did not advance
MAX_ERROR = 0.5  # of the logarithm of a time: a stall weighs no more


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


class Times:
    """Expected times of steps: the table measured at start, corrected by the steps since."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        shape = len(costs.rows), len(costs.tiers)
        self._factors = np.zeros(shape)  # logarithms
        self._num_measured = np.zeros(shape, dtype=np.int64)
        self._draft_factors = np.zeros(shape[0])  # logarithms
        self._num_probed = np.zeros(shape[0], dtype=np.int64)

    def expect(self, num_rows: int, mean_context: float) -> FloatArray:
        """Returns the seconds of making and verifying each tier, float64 ``[C]``."""
        bucket = self._costs.bucket(num_rows)
        by_table, factors = self._costs.seconds(bucket, num_rows * mean_context), self._known_factors(bucket)
        return np.multiply(by_table, np.exp(factors))

    def add(self, num_rows: int, mean_context: float, tier: int, seconds: float) -> None:
        """Records the time of a step that verified one of the C tiers."""
        bucket = self._costs.bucket(num_rows)
        expected = self.expect(num_rows, mean_context)[tier]
        rate = max(TIME_RATE, 1.0 / (1 + self._num_measured[bucket, tier]))
        self._factors[bucket, tier] = self._known_factors(bucket)[tier] + rate * _error(seconds, expected)
        self._num_measured[bucket, tier] += 1

    def extend_s(self, num_rows: int, mean_context: float) -> FloatArray:
        """Returns the seconds of making all drafts of a tier but the first, float64 ``[C]``."""
        bucket = self._costs.bucket(num_rows)
        factor = float(np.exp(self._draft_factors[bucket]))
        extend_s: FloatArray = factor * self._costs.extend_s(bucket, num_rows * mean_context)
        return extend_s

    def add_extend(self, num_rows: int, mean_context: float, tier: int, made: int, seconds: float) -> None:
        """Records the time of a step that verified a tier of known time, and after which another tier was drafted."""
        bucket, extend_s = self._costs.bucket(num_rows), self.extend_s(num_rows, mean_context)
        expected = float(extend_s[made] - extend_s[tier])
        if not expected:
            return
        took = (seconds - self.expect(num_rows, mean_context)[tier]) / expected
        rate = max(DRAFT_RATE, 1.0 / (1 + self._num_probed[bucket]))
        self._draft_factors[bucket] += rate * _error(took, 1.0)
        self._num_probed[bucket] += 1

    def _known_factors(self, bucket: int) -> FloatArray:
        """Tiers that were never measured are taken to be as wrong in the table as those that were."""
        factors: FloatArray = self._factors[bucket]
        is_measured = self._num_measured[bucket] > 0
        if is_measured.all() or not is_measured.any():
            return factors
        return np.where(is_measured, factors, factors[is_measured].mean())


def _error(seconds: float, expected: float) -> float:
    """Returns the logarithm of a time over the expected one, within bounds."""
    return min(max(float(np.log(max(seconds, MIN_S) / expected)), -MAX_ERROR), MAX_ERROR)


class DraftController:
    """Picks how many drafts each row makes and verifies; the last tiers may be trees.

    The choice is the tier of most expected tokens per expected second. It changes where a change gains enough, and then
    stays for a while, separately for each size of batch. Single steps probe other tiers from a budget of 1 % of the time, so
    that stale or wrong estimates are corrected: a tier is probed when its credit covers the expected loss. A probe that
    gains more than expected adds credit, so that probes follow each other once drafts are accepted again.

    A choice may be verified any number of steps later; the recorded step need not be the last chosen one.

    Where no drafts are best for long, the head goes cold: it skips steps. ``HeadSchedule`` says when it is tried again.

    Args:
        costs: Measured at start, for at least one draft.
        warm_steps: Steps that a cold head takes part in before its drafts are of use; None if it never goes cold.
    """

    def __init__(self, costs: StepCosts, warm_steps: int | None = None) -> None:
        self._costs = costs
        self._schedule = None if warm_steps is None else HeadSchedule(warm_steps)
        self._num_rows, self._trial_cost = 0, 0.0  # of a trial, for batches of so many rows
        self._times = Times(costs)
        self._acceptance = TierAcceptance(costs)
        self._credit = np.zeros(len(costs.tiers))  # steps that may be lost to probes
        # By the measured sizes of batches: the best tier of one says little about another.
        self._chosen = [0] * len(costs.rows)
        self._age = [DWELL_STEPS] * len(costs.rows)
        self._bucket = 0

    @property
    def costs(self) -> StepCosts:
        """The costs given, as measured at start."""
        return self._costs

    @property
    def times_own_drafts(self) -> bool:
        """As ``StepCosts``."""
        return self._costs.times_own_drafts

    @property
    def num_draft(self) -> int:
        """The choice for batches like the last, probes aside."""
        return self._costs.tiers[self._chosen[self._bucket]]

    @property
    def is_cold(self) -> bool:
        """Whether the head skips the next step."""
        return self._schedule is not None and self._schedule.phase is Phase.COLD

    def stays_cold(self, allowed: Int32Array) -> bool:
        """Records a step before drafts are chosen for it; while it returns True there are none to choose.

        Args:
            allowed: As in ``choose``.
        """
        schedule = self._schedule
        if schedule is None or schedule.phase is not Phase.COLD:
            return False
        if allowed.size != self._num_rows:
            self._num_rows, bucket = allowed.size, self._costs.bucket(allowed.size)
            shares = self._costs.shares(bucket)
            self._trial_cost = schedule.trial_cost(allowed.size, float(shares[0]), float(shares[1]))
            if bucket != self._bucket:
                self._bucket = bucket
                if self._pays(allowed, self._times.expect(allowed.size, 0.0)):  # as far as is known
                    schedule.wake()
                    return False
        schedule.note_cold(allowed.size, self._trial_cost)
        return schedule.phase is Phase.COLD

    def choose(self, allowed: Int32Array, mean_context: float) -> int:
        """Returns how many drafts to make for the next step, at most.

        Args:
            allowed: int32 ``[S]``. The most that each row may have.
            mean_context: Tokens stored of a row.
        """
        most = int(allowed.max(initial=0))
        if most == 0 or self.is_cold:
            return 0
        bucket, schedule = self._costs.bucket(allowed.size), self._schedule
        self._bucket = bucket
        if schedule is not None and schedule.phase is not Phase.WARM:
            was, phase = schedule.phase, schedule.advance()
            if phase is Phase.TRIAL and was is not Phase.TRIAL:
                self._acceptance.forget()
                self._age[bucket] = DWELL_STEPS  # a trial's results count at once
            if phase is not Phase.WARM:
                return min(most, self._costs.tiers[1]) if phase is Phase.TRIAL else 0
            # By the table alone: the few times of a trial may be those of stalls.
            if was is Phase.PENDING and not self._pays(
                allowed, self._costs.seconds(bucket, allowed.size * mean_context)
            ):
                schedule.go_cold()
                return 0
        seconds = self._times.expect(allowed.size, mean_context)
        chosen = self._choose(bucket, allowed, seconds)
        if schedule is not None:
            self._num_rows = 0
            update_share = float(self._costs.shares(bucket)[0])
            if schedule.note_idle(is_idle=not self._pays(allowed, seconds), update_share=update_share):
                self._chosen[bucket] = chosen = 0
        return chosen

    def _choose(self, bucket: int, allowed: Int32Array, seconds: FloatArray) -> int:
        """As ``choose``, where each of the C tiers takes so many seconds."""
        self._age[bucket] += 1
        tokens = self._acceptance.tokens(allowed)[: self._num_tiers(allowed)]
        seconds = seconds[: tokens.size]
        rates = tokens / seconds
        best = int(rates.argmax())
        current, age = self._chosen[bucket], self._age[bucket]
        current = current if current < tokens.size else best
        needed = max(LEAST_GAIN, MIN_GAIN * min(1.0, 5 * DWELL_STEPS / age))
        if age >= DWELL_STEPS and rates[best] > (1 + needed) * rates[current]:
            self._chosen[bucket], self._age[bucket] = best, 0
            return self.num_draft
        return self._costs.tiers[self._probe(current, seconds / seconds[current] - tokens / tokens[current])]

    def _pays(self, allowed: Int32Array, seconds: FloatArray) -> bool:
        """Whether any of the C tiers, which take so many seconds, gives more tokens per second than there are without a head."""
        num_tiers, update_share = self._num_tiers(allowed), self._costs.shares(self._bucket)[0]
        rates = self._acceptance.tokens(allowed)[:num_tiers] / seconds[:num_tiers]
        return bool(rates[1:].max(initial=0.0) > (1 + update_share) * rates[0])

    def _num_tiers(self, allowed: Int32Array) -> int:
        """Returns how many of the C tiers some row may have."""
        return bisect_right(self._costs.tiers, allowed.max(initial=0))

    def record(
        self, num_draft: Int32Array, counts: Int32Array, num_made: int, mean_context: float, seconds: float | None
    ) -> None:
        """Records a step.

        Args:
            num_draft: int32 ``[S]``. Drafts that each row verified; rows that failed their check are left out.
            counts: int32 ``[S]``. Those accepted + 1, before any stop.
            num_made: Drafts of each row that were made within ``seconds``: those after the previous step where a step ends
                with its verification, those after this one where it ends with its drafts.
            mean_context: As in ``choose``.
            seconds: From the end of the previous step to the end of this one; None if something else ran in between.
        """
        if not counts.size:
            return
        tier, made = self._costs.tier(int(num_draft.max())), self._costs.tier(num_made)
        if seconds is not None and made != tier:
            if tier == self._chosen[self._costs.bucket(counts.size)]:
                self._times.add_extend(counts.size, mean_context, tier, made, seconds)
            extend_s = self._times.extend_s(counts.size, mean_context)
            seconds += float(extend_s[tier] - extend_s[made])
        if tier != self._chosen[self._costs.bucket(counts.size)]:
            gained = self._gain(tier, num_draft, counts, mean_context, seconds)
            self._credit[tier] = min(max(self._credit[tier] + gained, -MAX_CREDIT), MAX_CREDIT)
        self._acceptance.add(tier, num_draft, counts)
        if seconds is not None:
            self._times.add(counts.size, mean_context, tier, seconds)

    def _gain(
        self, tier: int, num_draft: Int32Array, counts: Int32Array, mean_context: float, seconds: float | None
    ) -> float:
        """Returns by how much a step was better than expected, in steps of the current tier."""
        tokens, current = self._acceptance.tokens(num_draft), self._chosen[self._costs.bucket(counts.size)]
        gained = float((counts.sum() - tokens[tier]) / tokens[current])
        if seconds is not None:
            expected = self._times.expect(counts.size, mean_context)
            gained += float((expected[tier] - seconds) / expected[current])
        return gained

    def _probe(self, current: int, losses: FloatArray) -> int:
        """Returns another tier than ``current`` if one can be afforded; ``losses``, in steps, are of those to choose from."""
        losses = np.maximum(losses, MIN_PROBE_LOSS)
        credit = self._credit[: losses.size]
        credit += PROBE_SHARE / (self._credit.size - 1)
        credit[current] = 0.0
        most = int((credit / losses).argmax())
        if credit[most] < losses[most]:
            return current
        credit[most] -= losses[most]
        return most
