"""Callers take turns at work that there is little room for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class FairSemaphore:
    """A number of places; whoever waits gets one when his caller is next. Lives in one event loop.

    A caller that asks for much waits behind each other caller once, whatever stands in its own line.

    Args:
        num_places: How many may be taken at once.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._lines: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, caller: int) -> None:
        """Returns with a place, which ``leave`` gives back.

        Args:
            caller: Who waits.
        """
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
        """Gives a place to the caller who is next; that one then stands last."""
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
    """Threads for work that would hold the event loop up; callers take turns at them. Lives in one event loop.

    Args:
        num_threads: How many pieces of work are done at once.
        name: What the threads' names begin with.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._turns = FairSemaphore(num_threads)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def do(self, work: Callable[[], _T], caller: int) -> _T:
        """Does a piece of work and returns what it returns.

        Args:
            work: Called in a thread. It goes on if the caller goes, who leaves the place when it is over.
            caller: Whose it is.
        """
        await self._turns.enter(caller)
        working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        working.add_done_callback(lambda _: self._turns.leave())
        return await asyncio.shield(working)

    def close(self) -> None:
        """Ends the threads; work that has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
