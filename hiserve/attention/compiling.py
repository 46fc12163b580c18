"""Runs compilers beside the engine: several at once, each in its own processes, without the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

NICE = 10
"""Of the compilers: a start that computes meanwhile needs its cores more."""


class Building:
    """Starts builds at once, each in a thread of its own. A process that ends does not wait for them.

    Each build waits for a compiler. Builds use no device, and no two of them write the same files.
    """

    def __init__(self, builds: Sequence[Callable[[], object]]) -> None:
        self._ends: list[Future[None]] = [Future() for _ in builds]
        for build, end in zip(builds, self._ends, strict=True):
            threading.Thread(target=_run, args=(build, end), name="compile", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether every build has ended, successfully or not."""
        return all(end.done() for end in self._ends)

    def wait(self) -> None:
        """Waits for every build.

        Raises:
            Exception: Of the first failed build, in the order given.
        """
        wait(self._ends)
        for end in self._ends:
            end.result()


def _run(build: Callable[[], object], end: Future[None]) -> None:
    with suppress(OSError):  # without permission the compilers keep the default priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread; its children inherit it
    try:
        build()
    except Exception as error:  # noqa: BLE001 - the future raises it in the caller of wait
        end.set_exception(error)
    else:
        end.set_result(None)
