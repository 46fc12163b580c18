"""Waiting for what a test expects: until it is so, however slow the machine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0  # after so long it will never be so; a machine that is busy takes no minute for what takes 10 ms


async def until(is_so: Callable[[], object]) -> None:
    """Returns when it is so, while the event loop runs; fails after ``PATIENCE_S``."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


def wait_until(is_so: Callable[[], object], said: Callable[[], object] = str) -> None:
    """Returns when it is so; fails after ``PATIENCE_S``, with what is ``said`` of it then."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {PATIENCE_S} s: {said()}"
        time.sleep(0.005)
