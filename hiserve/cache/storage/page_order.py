"""The order in which a full store removes its pages."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(slots=True)
class _Page:
    """A page that the store has."""

    num_bytes: int
    used: int  # a tick of the order's clock
    before: bytes | None  # the page before it in its prefix; None if that is not known


class PageOrder:
    """Pages of a store by key: the least recently used goes first, but none before the pages behind it, which need it.

    Its caller locks. Pages whose prefix is not known, as after a restart, have no page before them.

    Attributes:
        num_bytes: Of all pages.
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, _Page] = {}
        self._num_behind: Counter[bytes] = Counter()  # pages behind each, whether it is there or not
        # A heap: when pages with none behind them were used. Older entries of a page are out of date: one that gets another
        # behind it is used with that.
        self._last: list[tuple[int, bytes]] = []
        self._clock = 0
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def by_use(self) -> list[bytes]:
        """Returns all keys, the least recently used first."""
        return sorted(self._pages, key=lambda key: self._pages[key].used)

    def add(self, key: bytes, num_bytes: int) -> None:
        """Adds a page as the one that was just used, or corrects the size of one that is there."""
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page(0, 0, None)
            self.use([key])
        self.num_bytes += num_bytes - page.num_bytes
        page.num_bytes = num_bytes

    def remove(self, key: bytes) -> None:
        """Removes a page, if it is there."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        self.num_bytes -= page.num_bytes
        if page.before is not None:
            self._num_behind[page.before] -= 1
            if not self._num_behind[page.before]:
                del self._num_behind[page.before]
            self._push(page.before)

    def use(self, keys: Sequence[bytes]) -> None:
        """Counts adjacent pages of a prefix as just used, its start as the last. Some may be missing."""
        for before, key in pairwise(keys):
            page = self._pages.get(key)
            if page is not None and page.before is None:
                page.before = before
                self._num_behind[before] += 1
        for key in reversed(keys):
            if key in self._pages:
                self._clock += 1
                self._pages[key].used = self._clock
                self._push(key)

    def next(self) -> bytes | None:
        """Returns the page to remove next; None if there are none."""
        while self._last:
            used, key = self._last[0]
            page = self._pages.get(key)
            if page is not None and page.used == used:
                return key
            heapq.heappop(self._last)
        # None is left, or each is said to be behind another.
        return min(self._pages, key=lambda key: self._pages[key].used, default=None)

    def retain(self, keys: Iterable[bytes]) -> None:
        """Removes all pages but these."""
        for key in self._pages.keys() - set(keys):
            self.remove(key)

    def _push(self, key: bytes) -> None:
        """Notes a page with none behind it, if it is there."""
        page = self._pages.get(key)
        if page is None or self._num_behind[key] > 0:
            return
        heapq.heappush(self._last, (page.used, key))
        if len(self._last) > 4 * len(self._pages) + 64:
            self._last = [(page.used, key) for key, page in self._pages.items() if not self._num_behind[key]]
            heapq.heapify(self._last)
