"""Device memory of rows and tails, window pages and slots of snapshots: allocated to rows, free when it has no holder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import AccountHeaps, TenantShares
from hiserve.cache.index.nodes import Tail
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import NO_PAGES
from hiserve.ipc.cache_stats import WindowStats

_ORDER = attrgetter("retained_until_s", "last_used")
_ONE: Int32Array = np.zeros(1, dtype=np.int32)  # a page, no matter which


class TailPool:
    """A pool of pages with counts of their holders. Rows have what they ask for: tails go first.

    Of these first those of accounts above their share (``TenantShares``), retained ones last, least recently used first.
    A page is a window page, or the slot of a snapshot: page 0 is for padding, and never allocated.

    Args:
        num_pages: Pages in the pool, the padding page included.
        page_size: Tokens per page; of slots, between two boundaries.

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        num_refs: int32 ``[num_pages]``. Rows, tails and transfers that hold each page; 0 of a free page.
        num_tails: Tails on the device.
        shares: Pages that the tails of each account hold.
        num_evicted_tails: Tails that left the device because rows needed pages.
        num_promised: Pages promised to rows and steps; admission writes it.
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
        self._order = AccountHeaps[Tail](_ORDER, lambda tail: tail.is_on_device and not tail.pending_op)

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return self._pages.num_free

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the padding page included."""
        return self._pages.num_pages

    @property
    def num_spare(self) -> int:
        """Pages that are neither promised nor held by transfers."""
        return self.num_pages - 1 - self.num_promised - self.num_pinned

    @property
    def num_evictable(self) -> int:
        """Pages that tails alone hold."""
        return int(np.count_nonzero((self.num_refs > 0) & (self.num_refs == self._num_tail_refs)))

    @property
    def has_page(self) -> bool:
        """Whether a page is free, or held by tails alone."""
        return self.num_free > 0 or self.num_evictable > 0

    def try_allocate(self) -> Int32Array:
        """Takes a page as ``allocate`` does; returns none, and no tail leaves, where all are in use."""
        return self.allocate(_ONE) if self.has_page else NO_PAGES

    def allocate(self, wanted: Int32Array) -> Int32Array:
        """Takes one page per entry of ``wanted`` (see ``PageAllocator.allocate``); tails leave the device for them.

        The caller keeps within what rows were promised, so that there are enough.

        Returns:
            int32 ``[n]`` pages, each held once.
        """
        if self._pages.num_free < wanted.size:
            self._evict(wanted.size)
        pages = self._pages.allocate(wanted)
        assert pages is not None, f"{wanted.size} pages wanted, {self.num_free} free"
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
        raise AssertionError(f"{count} pages wanted, {self.num_free} free beside those of rows")

    def hold(self, pages: Int32Array) -> None:
        """Adds a holder to pages that have one."""
        assert (self.num_refs[pages] > 0).all(), f"pages {pages[self.num_refs[pages] <= 0]} have no holder"
        self.num_refs[pages] += 1

    def drop(self, pages: Int32Array) -> None:
        """Removes a holder of pages; those without one are free, and forwards in flight may still touch them."""
        self.num_refs[pages] -= 1
        left = self.num_refs[pages]
        assert (left >= 0).all(), f"pages {pages[left < 0]} were dropped too often"
        if not left.all():
            freed = pages[left == 0]
            self.last_step[freed] = self.step
            self._pages.free(freed)

    def pin(self, pages: Int32Array) -> None:
        """Makes a transfer a holder of pages that have one, until ``unpin``: they are not allocated meanwhile."""
        self.hold(pages)
        self.num_pinned += pages.size

    def unpin(self, pages: Int32Array) -> None:
        """Ends a transfer of pages."""
        self.num_pinned -= pages.size
        self.drop(pages)

    def keep(self, tail: Tail, pages: Int32Array) -> None:
        """Makes a tail a holder of pages that have one; it lists them already."""
        self.hold(pages)
        self._num_tail_refs[pages] += 1
        self.num_tails += 1
        self.shares.charge(tail.account, pages.size)
        self._order.add(tail)

    def forget(self, tail: Tail, pages: Int32Array) -> None:
        """Ends the hold of a tail that lists the pages no longer."""
        self.num_tails -= 1
        self._num_tail_refs[pages] -= 1
        self.shares.charge(tail.account, -pages.size)
        self.drop(pages)

    def reorder(self, tail: Tail) -> None:
        """Records that a tail was used or retained, or that its transfer has ended."""
        if tail.is_on_device:
            self._order.add(tail)

    def stats(self) -> WindowStats:
        """Returns the counts; the padding page is not counted."""
        return WindowStats(
            num_pages=self.num_pages - 1,
            num_free=self.num_free,
            num_evictable=self.num_evictable,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSizes:
    """The memory of tails; without any, each boundary can be resumed at.

    Attributes:
        window_pages: Pages in the pool of window layers, the padding page included; 0 where every page has all layers.
        frames_per_page: Host pages that the image of a window page takes.
        snapshot_slots: Slots of snapshots, the padding slot included; 0 of a model without recurrent states and rings that a
            request reads at a boundary.
        frames_per_snapshot: Host pages that the image of a snapshot takes.
        window: Of the widest layer with a window: a token at position p sees positions above p - window. Needed with a store.
    """

    window_pages: int = 0
    frames_per_page: int = 1
    snapshot_slots: int = 0
    frames_per_snapshot: int = 1
    window: int = 1


NO_TAILS = TailSizes()


class TailMemory:
    """The device part of tails: window pages, slots of snapshots, or both.

    Attributes:
        windows: The window pages; None without.
        snapshots: The slots; None without.
        frames_per_page: Host pages that the image of a window page takes; 0 without a host tier.
        frames_per_snapshot: Likewise of a snapshot.
    """

    def __init__(self, sizes: TailSizes, page_size: int, *, has_host: bool) -> None:
        self.windows = TailPool(sizes.window_pages, page_size) if sizes.window_pages else None
        self.snapshots = TailPool(sizes.snapshot_slots, page_size) if sizes.snapshot_slots else None
        self.frames_per_page = sizes.frames_per_page if has_host and self.windows is not None else 0
        self.frames_per_snapshot = sizes.frames_per_snapshot if has_host and self.snapshots is not None else 0
        self._window, self._page_size = sizes.window, page_size

    @property
    def is_empty(self) -> bool:
        """Whether tails take no memory: there are none."""
        return self.windows is None and self.snapshots is None

    @property
    def pools(self) -> list[TailPool]:
        """Both, or the one that there is."""
        return [pool for pool in (self.windows, self.snapshots) if pool is not None]

    def parts(self, pages: Int32Array, slots: Int32Array) -> Iterator[tuple[TailPool, Int32Array]]:
        """Yields the pools, each with the pages of it among these."""
        if self.windows is not None:
            yield self.windows, pages
        if self.snapshots is not None:
            yield self.snapshots, slots

    def held(self, tail: Tail) -> Iterator[tuple[TailPool, Int32Array]]:
        """Yields the pools, each with the pages of a tail; nothing if it is not on the device."""
        if tail.pages is not None:
            yield from self.parts(tail.pages, tail.slots)

    def keep(self, tail: Tail, pages: Int32Array, slots: Int32Array) -> None:
        """Gives pages and a slot that have a holder to a tail that is not on the device."""
        assert tail.pages is None, "a tail has pages already"
        assert slots.size == (self.snapshots is not None), f"a tail with {slots.size} slots"
        tail.pages, tail.slots = pages.copy(), slots.copy()
        for pool, ours in self.held(tail):
            pool.keep(tail, ours)

    def forget(self, tail: Tail) -> None:
        """Takes its pages and its slot from a tail on the device."""
        held = list(self.held(tail))
        assert held, "a tail without pages leaves the device"
        tail.pages, tail.slots, tail.device_ready_op = None, NO_PAGES, 0
        for pool, ours in held:
            pool.forget(tail, ours)

    def num_frames(self, tail: Tail) -> int:
        """Returns the frames that a tail on the device takes on the host; 0 without a host tier."""
        return tail.num_pages * self.frames_per_page + tail.slots.size * self.frames_per_snapshot

    def num_frames_before(self, num_pages: int) -> int:
        """Returns the frames that the tail at a boundary takes, behind so many pages of its prefix."""
        first = max(0, num_pages * self._page_size - self._window + 1) // self._page_size
        return (num_pages - first) * self.frames_per_page + self.frames_per_snapshot

    def num_pages_in(self, num_frames: int) -> int:
        """Returns the window pages whose images are in the frames of a tail; negative if they are not those of one."""
        num_frames -= self.frames_per_snapshot
        if num_frames < 0 or (num_frames and not self.frames_per_page):
            return -1
        count, rest = divmod(num_frames, self.frames_per_page or 1)
        return -1 if rest else count

    def has_spare(self, tail: Tail) -> bool:
        """Whether a transfer may hold the pages of a tail: they were promised to no row."""
        return all(ours.size <= pool.num_spare for pool, ours in self.held(tail))

    def last_step(self, tail: Tail) -> int:
        """Returns the last step whose forward may touch the pages of a tail, which were free."""
        return max(int(pool.last_step[ours].max(initial=0)) for pool, ours in self.held(tail))
