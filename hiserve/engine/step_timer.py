"""How long steps take, and so how long the next plan can wait for a load without the device waiting for the plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from hiserve.core.plan import BatchPlan

LEAD_S = 0.003  # from the begin of planning a step to its launch, at most
RATE = 0.3  # of what a step took, against those before it
_FINE_TOKENS = 64  # steps of fewer differ by little, but for their rows


class StepTimer:
    """Watches steps begin and end, in their order.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}  # by size
        self._in_flight: deque[tuple[int | None, float]] = deque()  # size, begin
        self._last_end_s = 0.0

    def begin(self, plan: BatchPlan) -> None:
        """A step is launched; how long it takes is nobody's guess if it waits for loads itself."""
        self._in_flight.append((None if plan.waits else _size(plan.num_tokens), self._clock()))

    def end(self) -> None:
        """The oldest step in flight has ended."""
        size, begin_s = self._in_flight.popleft()
        begin_s, self._last_end_s = max(begin_s, self._last_end_s), self._clock()
        if size is not None:
            took_s = self._last_end_s - begin_s
            before_s = self._seconds.get(size, took_s)
            self._seconds[size] = before_s + RATE * (took_s - before_s)

    def time_left_s(self) -> float:
        """Returns for how many seconds the only step in flight goes on, less what planning the next one takes.

        0 where nobody knows, and with none in flight or several.
        """
        if len(self._in_flight) != 1:
            return 0.0
        size, begin_s = self._in_flight[0]
        expected_s = 0.0 if size is None else self._seconds.get(size, 0.0)
        return max(0.0, max(begin_s, self._last_end_s) + expected_s - LEAD_S - self._clock())


def _size(num_tokens: int) -> int:
    """Returns a number that steps of about as many tokens share."""
    return -num_tokens.bit_length() if num_tokens <= _FINE_TOKENS else -(-num_tokens // _FINE_TOKENS)
