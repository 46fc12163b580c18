"""The window pages on the device: allocated to rows, shared with tails, free when nobody holds them."""

from __future__ import annotations

import heapq

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.tails import Tail
from hiserve.core.plan import Int32Array

MIN_SWEEP = 1024


class WindowPages:
    """A pool of pages with counts of their holders. Rows have what they ask for: tails go first, least recently used first.

    Args:
        num_pages: Pages in the pool, the padding page included.
        page_size: Tokens per page.

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        num_refs: int32 ``[num_pages]``. Rows and tails that hold each page; 0 of a free page.
        num_tails: Open tails.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = PageAllocator(num_pages)
        self.page_owner = self._pages.owner
        self.num_refs: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self.num_tails = 0
        self._lru: list[tuple[int, int, Tail]] = []  # by last use; an entry of another time is out of date
        self._num_added = 0
        self._sweep_at = MIN_SWEEP

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._pages.num_free

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the padding page included."""
        return self._pages.num_pages

    def allocate(self, wanted: Int32Array) -> Int32Array:
        """Takes one page per entry of ``wanted`` (see ``PageAllocator.allocate``); closes tails for them.

        The caller keeps within what rows were promised, so that there are enough.

        Returns:
            int32 ``[n]`` pages, each held once.
        """
        while self._pages.num_free < wanted.size:
            tail = self._coldest()
            assert tail is not None, f"{wanted.size} window pages wanted, {self.num_free} free beside those of rows"
            tail.close()
        pages = self._pages.allocate(wanted)
        assert pages is not None, f"{wanted.size} window pages wanted, {self.num_free} free"
        self.num_refs[pages] = 1
        return pages

    def hold(self, pages: Int32Array) -> None:
        """Adds a holder to pages that have one."""
        assert (self.num_refs[pages] > 0).all(), f"window pages {pages[self.num_refs[pages] <= 0]} have no holder"
        self.num_refs[pages] += 1

    def drop(self, pages: Int32Array) -> None:
        """Removes a holder of pages; those without one are free, and forwards in flight may still touch them."""
        self.num_refs[pages] -= 1
        left = self.num_refs[pages]
        assert (left >= 0).all(), f"window pages {pages[left < 0]} were dropped too often"
        if not left.all():
            self._pages.free(pages[left == 0])

    def keep(self, pages: Int32Array, last_used: int) -> Tail:
        """Makes a tail of pages that a row holds."""
        self.hold(pages)
        self.num_tails += 1
        tail = Tail(pages.copy(), last_used, self._closed)
        self._add(tail)
        return tail

    def touch(self, tail: Tail, last_used: int) -> None:
        """Sets the time of the last use of an open tail; 0 makes it the next to go."""
        assert tail.is_open, "a tail that was closed is used"
        if tail.last_used != last_used:
            tail.last_used = last_used
            self._add(tail)

    def _closed(self, tail: Tail) -> None:
        self.num_tails -= 1
        self.drop(tail.pages)

    def _coldest(self) -> Tail | None:
        while self._lru:
            last_used, _, tail = heapq.heappop(self._lru)
            if tail.is_open and tail.last_used == last_used:
                return tail
        return None

    def _add(self, tail: Tail) -> None:
        self._num_added += 1
        heapq.heappush(self._lru, (tail.last_used, self._num_added, tail))
        if len(self._lru) >= self._sweep_at:
            current = {id(each[2]): each for each in self._lru if each[2].is_open and each[2].last_used == each[0]}
            self._lru = sorted(current.values(), key=lambda each: each[:2])
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._lru))

    def check(self) -> None:
        """Asserts that every page is free or held (for tests)."""
        free = self._pages.free_pages()
        assert not self.num_refs[free].any(), f"free pages {free[self.num_refs[free] > 0]} have holders"
        held = np.flatnonzero(self.num_refs)
        assert free.size + held.size == self.num_pages - 1, f"{free.size} free and {held.size} held pages"
