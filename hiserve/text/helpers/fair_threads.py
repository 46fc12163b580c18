"""Fair scheduling of callers on a limited number of threads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class FairSemaphore:
    """A semaphore that serves callers in turn. Used in one event loop.

    A caller with many waiting entries waits for at most one entry of each other caller between two of its own.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._lines: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, caller: int) -> None:
        """Acquires one unit, which ``leave`` releases."""
        if self._num_free:
            self._num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Releases one unit to the next caller, which then moves to the end of the queue."""
        while self._lines:
            caller, line = self._lines.popitem(last=False)
            place = line.popleft()
            if line:
                self._lines[caller] = line
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1


class FairThreads:
    """A thread pool for work that would block the event loop, shared fairly by callers. Used in one event loop.

    ``name`` is the prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._turns = FairSemaphore(num_threads)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def do(self, work: Callable[[], _T], caller: int) -> _T:
        """Runs ``work`` in a thread and returns its result.

        Work that has begun continues if the caller is cancelled; it holds its thread until it ends.
        """
        await self._turns.enter(caller)
        working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        working.add_done_callback(lambda _: self._turns.leave())
        return await asyncio.shield(working)

    def close(self) -> None:
        """Ends the threads and cancels work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
