"""The window pages on the device: allocated to rows, shared with tails, free when nobody holds them."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import AccountHeaps, TenantShares
from hiserve.cache.index.nodes import Tail
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.ipc.cache_stats import WindowStats

_ORDER = attrgetter("retained_until_s", "last_used")


class WindowPages:
    """A pool of pages with counts of their holders. Rows have what they ask for: tails go first.

    Of these first those of accounts above their share (``TenantShares``), retained ones last, least recently used first.

    Args:
        num_pages: Pages in the pool, the padding page included.
        page_size: Tokens per page.

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        num_refs: int32 ``[num_pages]``. Rows, tails and transfers that hold each page; 0 of a free page.
        num_tails: Tails on the device.
        shares: Pages that the tails of each account hold.
        num_evicted_tails: Tails that left the device because rows needed pages.
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
        self._num_tail_refs: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self.num_tails = 0
        self.num_evicted_tails = 0
        self._num_evicted = 0
        self.num_promised = 0
        self.num_pinned = 0
        self.step = 0
        self.last_step: Int64Array = np.zeros(num_pages, dtype=np.int64)
        self.shares = TenantShares(self._pages)
        self._order = AccountHeaps[Tail](_ORDER, lambda tail: tail.pages is not None and not tail.pending_op)

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
        if self._pages.num_free < wanted.size:
            self._evict(wanted.size)
        pages = self._pages.allocate(wanted)
        assert pages is not None, f"{wanted.size} window pages wanted, {self.num_free} free"
        self.num_refs[pages] = 1
        return pages

    def _evict(self, count: int) -> None:
        """Takes tails from the device until so many pages are free."""
        for tail, _ in self.shares.next(self._order):
            num_free = self.num_free
            tail.leave_device()
            self.num_evicted_tails += 1
            self._num_evicted += self.num_free - num_free
            if self.num_free >= count:
                return
        raise AssertionError(f"{count} window pages wanted, {self.num_free} free beside those of rows")

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
        self._num_tail_refs[pages] += 1
        self.num_tails += 1
        tail.pages = pages.copy()
        self.shares.charge(tail.account, pages.size)
        self._order.add(tail)

    def forget(self, tail: Tail) -> None:
        """Takes its pages from a tail on the device."""
        pages, tail.pages = tail.pages, None
        assert pages is not None, "a tail without pages leaves the device"
        tail.device_ready_op = 0
        self.num_tails -= 1
        self._num_tail_refs[pages] -= 1
        self.shares.charge(tail.account, -pages.size)
        self.drop(pages)

    def reorder(self, tail: Tail) -> None:
        """Records that a tail was used or retained, or that its transfer has ended."""
        if tail.pages is not None:
            self._order.add(tail)

    def stats(self) -> WindowStats:
        """Returns the counts; the padding page is not counted."""
        num_evictable = int(np.count_nonzero((self.num_refs > 0) & (self.num_refs == self._num_tail_refs)))
        return WindowStats(
            num_pages=self.num_pages - 1,
            num_free=self.num_free,
            num_evictable=num_evictable,
            num_evicted=self._num_evicted,
            num_tails=self.num_tails,
            num_evicted_tails=self.num_evicted_tails,
        )

    def check(self) -> None:
        """Asserts that every page is free or held (for tests)."""
        free = self._pages.free_pages()
        assert not self.num_refs[free].any(), f"free pages {free[self.num_refs[free] > 0]} have holders"
        held = np.flatnonzero(self.num_refs)
        assert free.size + held.size == self.num_pages - 1, f"{free.size} free and {held.size} held pages"
