"""Callers take turns at work that there is little room for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
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
