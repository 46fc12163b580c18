"""The window pages on the device: allocated to rows, shared with tails, free when nobody holds them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.nodes import Tail
from hiserve.core.plan import Int32Array, Int64Array

MIN_SWEEP = 1024


class TailOrder:
    """The tails of one tier, least recently used first; an entry of another time is out of date.

    Args:
        may_go: Whether a tail is on the tier, and no transfer uses it.
    """

    def __init__(self, may_go: Callable[[Tail], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, Tail]] = []
        self._num_added = 0
        self._sweep_at = MIN_SWEEP

    def add(self, tail: Tail) -> None:
        """Adds a tail that came to the tier, was used, or whose transfer has ended."""
        self._num_added += 1
        heapq.heappush(self._heap, (tail.last_used, self._num_added, tail))
        if len(self._heap) >= self._sweep_at:
            current = {id(each[2]): each for each in self._heap if self._is_current(each)}
            self._heap = sorted(current.values(), key=lambda each: each[:2])
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

    def head(self) -> Tail | None:
        """Returns the tail to go next."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _is_current(self, entry: tuple[int, int, Tail]) -> bool:
        last_used, _, tail = entry
        return tail.last_used == last_used and self._may_go(tail)


class WindowPages:
    """A pool of pages with counts of their holders. Rows have what they ask for: tails go first, least recently used first.

    Args:
        num_pages: Pages in the pool, the padding page included.
        page_size: Tokens per page.

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        num_refs: int32 ``[num_pages]``. Rows, tails and transfers that hold each page; 0 of a free page.
        num_tails: Tails on the device.
        num_promised: Pages promised to rows and steps; who admits rows writes it.
        num_pinned: Pages that transfers hold, each as often as it is held.
        step: The last step that was planned.
        last_step: int64 ``[num_pages]``. Of a free page, the last step whose forward may touch it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = PageAllocator(num_pages)
        self.page_owner = self._pages.owner
        self.num_refs: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self.num_tails = 0
        self.num_promised = 0
        self.num_pinned = 0
        self.step = 0
        self.last_step: Int64Array = np.zeros(num_pages, dtype=np.int64)
        self._order = TailOrder(lambda tail: tail.pages is not None and not tail.pending_op)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._pages.num_free

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the padding page included."""
        return self._pages.num_pages

    @property
    def num_spare(self) -> int:
        """Pages that are neither promised nor held by transfers."""
        return self.num_pages - 1 - self.num_promised - self.num_pinned

    def allocate(self, wanted: Int32Array) -> Int32Array:
        """Takes one page per entry of ``wanted`` (see ``PageAllocator.allocate``); tails leave the device for them.

        The caller keeps within what rows were promised, so that there are enough.

        Returns:
            int32 ``[n]`` pages, each held once.
        """
        while self._pages.num_free < wanted.size:
            tail = self._order.head()
            assert tail is not None, f"{wanted.size} window pages wanted, {self.num_free} free beside those of rows"
            tail.leave_device()
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
            freed = pages[left == 0]
            self.last_step[freed] = self.step
            self._pages.free(freed)

    def pin(self, pages: Int32Array) -> None:
        """Makes a transfer a holder of pages that have one, until ``unpin``: nobody can be given them meanwhile."""
        self.hold(pages)
        self.num_pinned += pages.size

    def unpin(self, pages: Int32Array) -> None:
        """Ends a transfer of pages."""
        self.num_pinned -= pages.size
        self.drop(pages)

    def keep(self, tail: Tail, pages: Int32Array) -> None:
        """Gives pages that have a holder to a tail that is not on the device."""
        assert tail.pages is None, "a tail has pages already"
        self.hold(pages)
        self.num_tails += 1
        tail.pages = pages.copy()
        self._order.add(tail)

    def forget(self, tail: Tail) -> None:
        """Takes its pages from a tail on the device."""
        pages, tail.pages = tail.pages, None
        assert pages is not None, "a tail without pages leaves the device"
        tail.device_ready_op = 0
        self.num_tails -= 1
        self.drop(pages)

    def reorder(self, tail: Tail) -> None:
        """Records that a tail was used, or that its transfer has ended."""
        if tail.pages is not None:
            self._order.add(tail)

    def check(self) -> None:
        """Asserts that every page is free or held (for tests)."""
        free = self._pages.free_pages()
        assert not self.num_refs[free].any(), f"free pages {free[self.num_refs[free] > 0]} have holders"
        held = np.flatnonzero(self.num_refs)
        assert free.size + held.size == self.num_pages - 1, f"{free.size} free and {held.size} held pages"
