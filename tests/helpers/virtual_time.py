"""An event loop whose clock jumps to the next timer, so that what sleeps takes no time and is never late."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

CPU_SHARE = 0.25  # of the time, by the clocks of ``clocks``


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits for nothing: advances the clock instead."""

    now_s = 100.0  # as 0 stands for no time in samples

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0 if timeout is not None else None)
        if not found and timeout:
            self.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """For tests whose only waits are sleeps: threads and sockets would have to be waited for."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Returns seconds."""
        return self._virtual.now_s


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test in such a loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run


def clocks() -> Any:
    """Returns what stands in for the module ``time`` where such a loop runs."""

    def now_s() -> float:
        return asyncio.get_running_loop().time()

    return SimpleNamespace(perf_counter=now_s, process_time=lambda: CPU_SHARE * now_s())
