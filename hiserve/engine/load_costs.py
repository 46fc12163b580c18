"""What loading or fetching a prefix costs and what computing it costs, as measured while serving."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from hiserve.core.transfers import STORE_LANES

DECAY = 0.9  # weight of what was known before, at each measurement
MIN_MEASUREMENTS = 4  # of each kind before they are believed
MAX_LEFT = 32  # requests that computed what a tier had, before copies from it are measured anew


class LinearFit:
    """Fits seconds = fixed + slope * amount to measurements, the latest weighing most.

    Attributes:
        num_measurements: So far.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.num_measurements = 0

    def add(self, amount: float, seconds: float) -> None:
        """Takes in a measurement."""
        self.num_measurements += 1
        self._weight = DECAY * self._weight + 1.0
        self._x = DECAY * self._x + amount
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + amount * amount
        self._xy = DECAY * self._xy + amount * seconds

    def fit(self) -> tuple[float, float]:
        """Returns (fixed, slope), neither below 0. Amounts that were all alike are taken as proportional."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        proportional = mean_y / mean_x
        if variance < 0.01 * mean_x * mean_x:
            return 0.0, proportional
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        if slope <= 0.0:
            return mean_y, 0.0
        fixed = mean_y - slope * mean_x
        return (fixed, slope) if fixed > 0.0 else (0.0, proportional)


class TransferCost:
    """What bringing tokens from a slower tier takes."""

    def __init__(self) -> None:
        self._line = LinearFit()
        self._num_left = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Takes in a measurement."""
        self._line.add(num_tokens, seconds)

    def leave(self) -> None:
        """A request does without. Where nothing is brought, nothing tells that a stall has passed."""
        self._num_left += 1
        if self._num_left == MAX_LEFT:
            self._num_left = 0
            self._line = LinearFit()

    def fit(self) -> tuple[float, float] | None:
        """Returns (seconds, seconds per token); None until there are measurements enough."""
        return None if self._line.num_measurements < MIN_MEASUREMENTS else self._line.fit()


class LoadCostModel:
    """Tells whether loading or fetching is faster than computing again. Until both were measured, it is.

    A step's time is counted from its submission, or from the end of the step before it if that is later: what it
    took of the device. Steps of one token a row tell nothing of prefill and are left out.

    Args:
        step_tokens: Most tokens that one step computes.
        clock: Seconds.
    """

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._step_tokens = step_tokens
        self._clock = clock
        self._submitted: deque[tuple[float, int]] = deque()
        self._ended = 0.0
        self._loads = TransferCost()
        self._fetches = TransferCost()
        self._prefills = LinearFit()

    def begin_step(self, num_rows: int, num_tokens: int) -> None:
        """A step was planned, of so many tokens, drafts not counted; steps end in this order."""
        self._submitted.append((self._clock(), num_tokens if num_tokens > num_rows else 0))

    def end_step(self, *, has_run: bool = True) -> float | None:
        """The oldest step has ended; returns the seconds that it took, None if it computed prompts, or did not run."""
        began, num_tokens = self._submitted.popleft()
        now = self._clock()
        seconds = now - max(began, self._ended)
        self._ended = now
        if not has_run:
            return None
        if not num_tokens:
            return seconds
        self._prefills.add(num_tokens, seconds)
        return None

    def end_load(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens took so long, its waits not counted."""
        self._loads.add(num_tokens, seconds)

    def leave(self) -> None:
        """A request computes what the host has."""
        self._loads.leave()

    def end_fetch(self, num_tokens: int, seconds: float) -> None:
        """A prefetch of so many tokens took so long, its waits not counted."""
        self._fetches.add(num_tokens, seconds)

    def leave_fetch(self) -> None:
        """A request computes what the store has."""
        self._fetches.leave()

    def is_worth_loading(self, num_tokens: int, num_before: int) -> bool:
        """Whether these tokens are sooner there by a load than by computing them.

        Args:
            num_tokens: Tokens that the host has.
            num_before: Tokens of loads that are under way and come first.
        """
        fit = self._loads.fit()
        if fit is None:
            return True
        fixed, per_token = fit
        return fixed + (num_before + num_tokens) * per_token < self._prefill_s(num_tokens)

    def num_in_time(self, num_tokens: int, num_before: int, wait_s: float) -> int:
        """Returns how many of these tokens a store can bring within ``wait_s`` seconds; the leading ones.

        Args:
            num_tokens: Tokens that the store has.
            num_before: Tokens of prefetches that are under way and come first.
            wait_s: Seconds from now.
        """
        fit = self._fetches.fit()
        if fit is None:
            return num_tokens
        fixed, per_token = fit
        left_s = wait_s - fixed - num_before * per_token / STORE_LANES
        if left_s <= 0.0:
            return 0
        return num_tokens if num_tokens * per_token <= left_s else int(left_s / per_token)

    def is_worth_fetching(self, num_tokens: int, num_before: int) -> bool:
        """Whether these tokens are sooner here from a store than by computing them; see ``num_in_time``."""
        return self.num_in_time(num_tokens, num_before, self._prefill_s(num_tokens)) == num_tokens

    def _prefill_s(self, num_tokens: int) -> float:
        """Returns how long computing takes; for ever until it was measured."""
        if self._prefills.num_measurements < MIN_MEASUREMENTS:
            return math.inf
        step_fixed, per_token = self._prefills.fit()
        return -(-num_tokens // self._step_tokens) * step_fixed + num_tokens * per_token
