"""Leaves a server alone for a while after failures, so that its users do not wait for it again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3
PAUSE_S = 5.0


class Breaker:
    """Allows calls until ``MAX_FAILURES`` in a row have failed; then one call each ``PAUSE_S``, until one succeeds.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._paused_until_s = 0.0

    def allows(self) -> bool:
        """Whether to call now; the caller then reports the end of the call."""
        with self._lock:
            if self._num_failures < MAX_FAILURES:
                return True
            if self._clock() < self._paused_until_s:
                return False
            self._paused_until_s = self._clock() + PAUSE_S  # one call tries
            return True

    @property
    def is_paused(self) -> bool:
        """Whether a call would not be allowed now; unlike ``allows`` it does not use up the turn to try."""
        with self._lock:
            return self._num_failures >= MAX_FAILURES and self._clock() < self._paused_until_s

    def succeeded(self) -> None:
        """Reports a call that succeeded."""
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        """Reports a call that failed."""
        with self._lock:
            self._num_failures += 1
            self._paused_until_s = self._clock() + PAUSE_S
