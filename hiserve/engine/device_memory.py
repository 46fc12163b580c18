"""Waits until a dead worker's memory has come back to the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

GIB = 1 << 30
ENOUGH = 0.99  # of what was free before the first worker
MAX_WAIT_S = 30.0
SETTLED_S = 2.0  # no more came for so long: somebody else has the rest
PERIOD_S = 0.05

logger = logging.getLogger(__name__)


def await_memory(
    wanted_bytes: int, free_bytes: Callable[[], int], sleep: Callable[[float], None] = time.sleep
) -> float:
    """Waits for memory, or until no more of it comes; returns the seconds that took.

    Args:
        wanted_bytes: Free before the first worker; 0 waits for nothing.
        free_bytes: Asks the device; 0 where it cannot be asked.
        sleep: Sleeps.
    """
    most, waited_s, settled_s = free_bytes(), 0.0, 0.0
    while 0 < most < ENOUGH * wanted_bytes and waited_s < MAX_WAIT_S and settled_s < SETTLED_S:
        sleep(PERIOD_S)
        waited_s, settled_s = waited_s + PERIOD_S, settled_s + PERIOD_S
        now = free_bytes()
        if now > most:
            most, settled_s = now, 0.0
    if 0 < most < ENOUGH * wanted_bytes:
        logger.warning(
            "%.2f GiB are free on the device; before the first worker it was %.2f", most / GIB, wanted_bytes / GIB
        )
    return waited_s
