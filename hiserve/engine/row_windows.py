"""The window pages of the rows: given for a step, freed while the row runs."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixLock, TailPool
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import NO_PAGES
from hiserve.core.windows import WindowLimits
from hiserve.engine.page_tables import PageTables


class RowWindows:
    """The part of the rows' state that concerns window layers. Pages below a row's window are given back as it goes on.

    A page is given back once no step in flight or later one reads it: every position that they compute is settled, or
    follows a settled one. The tail at the last published boundary is therefore always whole.

    Args:
        generation: int64 ``[R]``. Number of the request in each row; ``RowState`` writes it.
        max_len: Longest row, in tokens.

    Attributes:
        tables: Window tables, by the entries of the page tables; those below ``first`` mean nothing.
        first: int32 ``[R]``. First entry that the row holds.
        promised: int32 ``[R]``. Pages promised to the row, those of its prompt tokens in flight not counted.
    """

    def __init__(self, windows: TailPool, limits: WindowLimits, generation: Int64Array, max_len: int) -> None:
        least = limits.least_pages
        assert windows.num_pages >= least, f"{windows.num_pages} window pages; a row, its step and a tail take {least}"
        self._pool = windows
        self._limits = limits
        self._page_size = limits.page_size
        self.tables = PageTables(windows, generation, max_len)
        self.first = np.zeros(generation.size, dtype=np.int32)
        self.promised = np.zeros(generation.size, dtype=np.int32)
        windows.num_promised = limits.step_pages

    def has_room(self, limit: int, *, loads_tail: bool = False) -> bool:
        """Whether another row of at most ``limit`` tokens can run beside the others, without a page of theirs.

        With ``loads_tail``, a load that holds its tail may outlive it.
        """
        num_loaded = self._limits.tail_pages if loads_tail else 0
        return self._limits.promised_pages(limit) + num_loaded <= self._pool.num_spare

    def admit(self, row: int, limit: int, lock: PrefixLock) -> None:
        """Starts a row of at most ``limit`` tokens behind its cached prefix, whose tail is on the device or being loaded."""
        tail, num_pages = lock.tail, lock.pages.size
        self.promised[row] = self._limits.promised_pages(limit)
        self._pool.num_promised += int(self.promised[row])
        pages = NO_PAGES if tail is None else tail.pages
        assert pages is not None, f"row {row} starts at {num_pages * self._page_size} without a tail"
        self._pool.hold(pages)
        self.first[row] = num_pages - pages.size
        self.tables.bind(row, pages, int(self.first[row]))

    def grow(self, rows: Int64Array, end: Int32Array) -> None:
        """Gives rows (int64 ``[n]``) window pages for so many tokens (int32 ``[n]``)."""
        has_all = self.tables.grow(rows, end)
        assert has_all, "window pages are promised to rows"

    def shrink(self, row: int, end: int) -> None:
        """Takes back the pages that a row got in this plan for tokens from ``end`` on."""
        held, num_left = int(self.tables.num_pages[row]), -(-end // self._page_size)
        if num_left < held:
            self._pool.drop(self.tables.pages[row, num_left:held])
            self.tables.num_pages[row] = num_left

    def before(self, row: int, num_tokens: int) -> Int32Array:
        """Returns the pages of a tail at a boundary of a row, first to last."""
        first, end = self._first_of(num_tokens), num_tokens // self._page_size
        assert first >= self.first[row], f"row {row} holds pages from {self.first[row]} on, its tail starts at {first}"
        return self.tables.pages[row, first:end]

    def leave(self, row: int, num_tokens: int) -> None:
        """Gives back the pages that no token from a boundary on sees, and no tail there or later."""
        first = min(self._first_of(num_tokens), int(self.tables.num_pages[row]))
        if first > self.first[row]:
            self._pool.drop(self.tables.pages[row, self.first[row] : first])
            self.first[row] = first

    def release(self, row: int) -> None:
        """Gives back all pages of a row."""
        self._pool.drop(self.tables.pages[row, self.first[row] : self.tables.num_pages[row]])
        self._pool.num_promised -= int(self.promised[row])
        self.promised[row] = self.first[row] = self.tables.num_pages[row] = 0

    def _first_of(self, num_tokens: int) -> int:
        """Returns the first entry that a token at position ``num_tokens`` sees."""
        return max(0, num_tokens - self._limits.window + 1) // self._page_size

    def num_held(self, row: int) -> int:
        """Returns the window pages of a row."""
        return int(self.tables.num_pages[row] - self.first[row])

    def check(self, rows: Int64Array) -> None:
        """Asserts that rows (int64 ``[n]``) hold no more than their bounds, and have them beside all transfers (for tests)."""
        held = self.tables.num_pages[rows] - self.first[rows]
        assert int(held.sum()) <= int(self.promised[rows].sum()) + self._limits.step_pages, f"{rows} hold {held} pages"
        assert self._pool.num_spare >= 0, f"{-self._pool.num_spare} pages are both promised and held by transfers"
