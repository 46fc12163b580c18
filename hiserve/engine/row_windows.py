"""The window pages of the rows: given for a step, freed while the row runs, kept in tails at wanted boundaries."""

from __future__ import annotations

from bisect import insort

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock, Tail, WindowPages
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.request import Retain
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

    def __init__(
        self, cache: PrefixCache, windows: WindowPages, limits: WindowLimits, generation: Int64Array, max_len: int
    ) -> None:
        least = limits.least_pages
        assert windows.num_pages >= least, f"{windows.num_pages} window pages; a row, its step and a tail take {least}"
        self._cache = cache
        self._pool = windows
        self._limits = limits
        self._page_size = cache.page_size
        self.tables = PageTables(windows, generation, max_len)
        self.first = np.zeros(generation.size, dtype=np.int32)
        self.promised = np.zeros(generation.size, dtype=np.int32)
        windows.num_promised = limits.step_pages
        self._wanted: dict[int, list[int]] = {}  # of each row: boundaries in tokens, ascending, that get a tail
        self._prompt_end: dict[int, int] = {}  # of each row: the last boundary in its prompt
        self._prompt_tail: dict[int, tuple[Tail, int]] = {}  # the tail there, and the time of its use

    def has_room(self, limit: int, *, loads_tail: bool = False) -> bool:
        """Whether another row of at most ``limit`` tokens can run beside the others, without a page of theirs.

        With ``loads_tail``, a load that holds its tail may outlive it.
        """
        num_loaded = self._limits.tail_pages if loads_tail else 0
        return self._limits.promised_pages(limit) + num_loaded <= self._pool.num_spare

    def admit(self, row: int, num_known: int, limit: int, lock: PrefixLock, num_history_tokens: int) -> None:
        """Starts a row behind its cached prefix, and chooses the boundaries of its prompt that get a tail.

        Args:
            row: Was free.
            num_known: Tokens of the request.
            limit: Longest that it may get.
            lock: On its cached prefix, whose tail is on the device or being loaded.
            num_history_tokens: Its cached tokens, resumable or not.
        """
        tail, page_size, every = lock.tail, self._page_size, self._limits.tail_every
        start = lock.pages.size * page_size
        self.promised[row] = self._limits.promised_pages(limit)
        self._pool.num_promised += int(self.promised[row])
        pages = NO_PAGES if tail is None else tail.pages
        assert pages is not None, f"row {row} starts at {start} without a tail"
        self._pool.hold(pages)
        self.first[row] = start // page_size - pages.size
        self.tables.bind(row, pages, int(self.first[row]))
        prompt_end = (num_known - 1) // page_size * page_size
        wanted = {prompt_end, num_history_tokens, *(range(every, prompt_end, every) if every else ())}
        self._wanted[row] = sorted(boundary for boundary in wanted if boundary > start)
        self._prompt_end[row] = prompt_end

    def want_retained(self, row: int, retain: Retain) -> None:
        """Asks a row for tails at the ends of the prefixes that its request retains."""
        for num_tokens, _ in retain:
            boundary = num_tokens // self._page_size * self._page_size
            if self.tables.num_pages[row] * self._page_size < boundary <= self._prompt_end[row]:
                self.want(row, boundary)

    def want(self, row: int, num_tokens: int) -> None:
        """Asks a row for a tail at a boundary that it has not published."""
        if num_tokens not in self._wanted[row]:
            insort(self._wanted[row], num_tokens)

    def grow(self, rows: Int64Array, end: Int32Array) -> None:
        """Gives rows (int64 ``[n]``) window pages for so many tokens (int32 ``[n]``)."""
        has_all = self.tables.grow(rows, end)
        assert has_all, "window pages are promised to rows"

    def publish(self, row: int, num_pages: int, lock: PrefixLock) -> None:
        """Keeps tails at the wanted boundaries that a row has published, and gives back the pages behind its window.

        Args:
            row: The row.
            num_pages: Its published pages.
            lock: On them.
        """
        wanted = self._wanted[row]
        while wanted and wanted[0] <= num_pages * self._page_size:
            boundary = wanted.pop(0)
            tail = self._keep(row, boundary, num_pages, lock)
            if boundary == self._prompt_end[row]:
                self._prompt_tail[row] = tail, tail.last_used
        first = min(self._first_of(num_pages * self._page_size), int(self.tables.num_pages[row]))
        if first > self.first[row]:
            self._pool.drop(self.tables.pages[row, self.first[row] : first])
            self.first[row] = first

    def release(self, row: int, num_pages: int, lock: PrefixLock) -> None:
        """Keeps a tail at the end of what a row has published and read, and gives back all its pages."""
        if num_pages and lock.is_whole:
            self._keep(row, num_pages * self._page_size, num_pages, lock)
        tail, last_used = self._prompt_tail.pop(row, (None, 0))
        tails = self._cache.tails
        if tails is not None and tail is not None and tail.is_open and tail.last_used == last_used:
            tails.touch(tail, 0)  # a repeated prompt is rarer than a next turn
        self._pool.drop(self.tables.pages[row, self.first[row] : self.tables.num_pages[row]])
        self._pool.num_promised -= int(self.promised[row])
        self.promised[row] = self.first[row] = self.tables.num_pages[row] = 0
        del self._wanted[row], self._prompt_end[row]

    def _keep(self, row: int, num_tokens: int, num_published: int, lock: PrefixLock) -> Tail:
        first, end = self._first_of(num_tokens), num_tokens // self._page_size
        assert first >= self.first[row], f"row {row} holds pages from {self.first[row]} on, its tail starts at {first}"
        return self._cache.keep_tail(lock, num_published - end, self.tables.pages[row, first:end])

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
