"""CPU times in seconds of the machine on which their limits were set, however slow or busy this one is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

MAX_TRIES = (
    5  # others on the machine take caches and share cores: the least of some tries is the cost of the work itself
)
YARDSTICK, YARDSTICK_S = json.dumps([[1.5]] * 100_000), 0.018


def slowness() -> float:
    """How much longer this machine takes now than the one on which the limits were set, at least 1."""
    begin = time.thread_time()
    json.loads(YARDSTICK)
    return max(1.0, (time.thread_time() - begin) / YARDSTICK_S)


def comparable_s(spent_s: float, limit_s: float) -> float:
    """Returns the time on the machine on which the limit was set, or, as the yardstick takes 0.1 s, any below the limit."""
    return spent_s if spent_s < limit_s else spent_s / slowness()


def least_cpu_s(work: Callable[[], object], limit_s: float) -> float:
    """Returns the CPU time that some work takes in this thread, the least of some tries: the first below the limit ends them."""
    spent_s: list[float] = []
    while not spent_s or (len(spent_s) < MAX_TRIES and min(spent_s) >= limit_s):
        begin = time.thread_time()
        work()
        spent_s.append(comparable_s(time.thread_time() - begin, limit_s))
    return min(spent_s)
