"""Free pages of one pool, and which allocation each page belongs to."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES

PADDING_PAGE = 0
MAX_OWNER = 2**31 - 1  # numbers start again after this: years apart, so two never meet


class PageAllocator:
    """Allocates pages 1 to ``num_pages - 1``; page 0 is the padding page, which is never allocated.

    A stack with two bitmaps: a page may be allocated from the middle of the stack (because it follows the row's last page,
    which keeps a row contiguous), so a stack entry may be out of date; ``_stacked`` keeps each page on the stack at most
    once.

    Args:
        num_pages: Pages in the pool, the padding page included.
        num_ready: Usable pages are below this; default: all. ``grow`` adds the others.

    Attributes:
        num_free: Pages that can be allocated.
        owner: int32 ``[num_pages]``. Number of each page's last allocation, unique and at least 1; 0 for a page never
            allocated.
    """

    def __init__(self, num_pages: int, num_ready: int | None = None) -> None:
        num_ready = num_pages if num_ready is None else num_ready
        assert num_pages >= 2, f"a pool of {num_pages} pages has none beside the padding page"
        assert 1 <= num_ready <= num_pages, f"{num_ready} of {num_pages} pages are ready"
        self.num_pages = num_pages
        self.num_ready = num_ready
        self.num_free = num_ready - 1
        self._num_taken = 0
        self.owner: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self._is_free = np.arange(num_pages) < num_ready
        self._is_free[PADDING_PAGE] = False
        self._stacked = self._is_free.copy()
        self._stack: Int32Array = np.empty(num_pages, dtype=np.int32)
        self._stack[: self.num_free] = np.arange(num_ready - 1, 0, -1, dtype=np.int32)
        self._top = self.num_free

    def allocate(self, wanted: Int32Array) -> Int32Array | None:
        """Allocates one page for each entry of ``wanted``, or none at all.

        Args:
            wanted: int32 ``[n]``. The preferred page of each entry (the one after the row's last page); 0 or any page
                that is not free is no preference.

        Returns:
            int32 ``[n]`` pages, or None when fewer than n are free.
        """
        if wanted.size > self.num_free:
            return None
        pages = np.where(wanted < self.num_pages, wanted, PADDING_PAGE)
        granted = self._is_free[pages]
        preferred = pages[granted]
        if len(set(preferred.tolist())) < preferred.size:  # rows share their last page: the first gets the next one
            first = np.zeros(pages.size, dtype=np.bool_)
            first[np.unique(pages, return_index=True)[1]] = True
            granted &= first
            preferred = pages[granted]
        self._is_free[preferred] = False
        if preferred.size < pages.size:
            pages[~granted] = self._pop(pages.size - preferred.size)
        return self._number(pages)

    def allocate_any(self, count: int) -> Int32Array | None:
        """Allocates any ``count`` pages; None, and nothing allocated, when fewer are free."""
        return self._number(self._pop(count)) if count <= self.num_free else None

    def free(self, pages: Int32Array) -> None:
        """Frees pages; each must be in use. They are stacked in reverse, so that they are allocated in the given order."""
        assert not self._is_free[pages].any() and PADDING_PAGE not in pages, f"pages {pages} are not all in use"
        assert np.unique(pages).size == pages.size, f"a page is freed twice in {pages}"
        self._is_free[pages] = True
        self.num_free += pages.size
        self._push(pages)

    def grow(self, num_ready: int) -> None:
        """Makes the pages below ``num_ready`` usable."""
        assert self.num_ready <= num_ready <= self.num_pages, f"from {self.num_ready} to {num_ready} pages"
        fresh = np.arange(self.num_ready, num_ready, dtype=np.int32)
        self._is_free[fresh] = True
        self.num_free += fresh.size
        self.num_ready = num_ready
        self._push(fresh)

    def _number(self, pages: Int32Array) -> Int32Array:
        """Numbers an allocation of pages that were free."""
        if self._num_taken + pages.size > MAX_OWNER:
            self._num_taken = 0
        first = self._num_taken + 1
        self._num_taken += pages.size
        self.owner[pages] = np.arange(first, first + pages.size)
        self.num_free -= pages.size
        return pages

    def _push(self, pages: Int32Array) -> None:
        fresh = pages[~self._stacked[pages]][::-1]
        self._stacked[fresh] = True
        self._stack[self._top : self._top + fresh.size] = fresh
        self._top += fresh.size

    def _pop(self, count: int) -> Int32Array:
        popped: list[Int32Array] = []
        while count:
            start = max(0, self._top - count)
            batch = self._stack[start : self._top][::-1].copy()
            self._top = start
            self._stacked[batch] = False
            batch = batch[self._is_free[batch]]
            self._is_free[batch] = False
            popped.append(batch)
            count -= batch.size
        if len(popped) == 1:
            return popped[0]
        return np.concatenate(popped) if popped else NO_PAGES

    def free_pages(self) -> Int32Array:
        """Returns the free pages in ascending order (for checks)."""
        return np.flatnonzero(self._is_free).astype(np.int32)
