"""A clock that only the driver moves. Install it before anything of hiserve is imported: many take a clock as a default."""

from __future__ import annotations

import threading
import time

BEGIN_S = 1000.0  # 0 stands for "never" in some places
METER_S = (
    0.001  # each reading of the CPU clock is that much later, so that what is measured at start is the same each time
)


class VirtualClock:
    """Seconds for one thread; for all others real time goes on from the same begin, since they wait for real events.

    A time of the driver's thread is never later than theirs: the clock of a machine that has just started is.

    Attributes:
        now_s: The time of the driver's thread.
    """

    def __init__(self) -> None:
        self.restart()
        self._thread = threading.get_ident()

    def restart(self) -> None:
        """Begins anew, so that what was measured before changes no number by its last bit."""
        self.now_s, self._cpu_s = BEGIN_S, 0.0

    def advance_to(self, seconds: float) -> None:
        """Moves to a later time; an earlier one changes nothing."""
        self.now_s = max(self.now_s, seconds)

    def install(self) -> None:
        """Replaces the monotonic clocks and the CPU clock of the thread in the module ``time``."""
        monotonic, thread_time = time.monotonic, time.thread_time

        begin_s = monotonic()

        def now() -> float:
            return self.now_s if threading.get_ident() == self._thread else BEGIN_S + monotonic() - begin_s

        def cpu() -> float:
            if threading.get_ident() != self._thread:
                return thread_time()
            self._cpu_s += METER_S
            return self._cpu_s

        time.monotonic = time.perf_counter = now
        time.thread_time = cpu
