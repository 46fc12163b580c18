"""The boundaries at which rows leave tails behind: chosen when they start, kept as they pass."""

from __future__ import annotations

from bisect import insort

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock, Tail, TailPool
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.request import Retain
from hiserve.core.transfers import NO_PAGES
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.budget import Allocation
from hiserve.engine.page_tables import PageTables
from hiserve.engine.row_snapshots import RowSnapshots

_NEVER = np.iinfo(np.int32).max


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


class RowTails:
    """The part of the rows' state that concerns resume points: window pages, snapshots, or both.

    A model with window pages alone has them whole at the last published boundary of each row, so that it chooses its tails
    when it publishes. A snapshot must be assigned before the step that stores it.

    Args:
        limits: Of tails; its window bounds count where the cache has window pages.
        generation: int64 ``[R]``. Number of the request in each row; ``RowState`` writes it.
        max_len: Longest row, in tokens.

    Attributes:
        windows: The rows' window pages; None without.
        snapshots: Their slots; None without.
    """

    def __init__(self, cache: PrefixCache, limits: WindowLimits, generation: Int64Array, max_len: int) -> None:
        assert cache.tails is not None, "no boundary needs a tail"
        self._cache = cache
        self._tails = cache.tails
        self._page_size = cache.page_size
        self._every = limits.tail_every
        self.windows: RowWindows | None = None
        self.snapshots: RowSnapshots | None = None
        if cache.windows is not None:
            self.windows = RowWindows(cache.windows, limits, generation, max_len)
        if cache.snapshots is not None:
            self.snapshots = RowSnapshots(cache.snapshots, cache.page_size, generation.size)
        # Of each row: boundaries in tokens, ascending, that get a tail; a row with snapshots has left out those planned.
        self._wanted: dict[int, list[int]] = {}
        # Of each row, where its next chunk of a prompt ends at the latest: in a step it passes one wanted boundary.
        self._cut: Int32Array = np.full(generation.size, _NEVER, dtype=np.int32)
        self._prompt_end: dict[int, int] = {}  # of each row: the last boundary in its prompt
        self._prompt_tail: dict[int, tuple[Tail, int]] = {}  # the tail there, and the time of its use

    def has_room(self, limit: int, *, loads_tail: bool = False) -> bool:
        """Whether another row of at most ``limit`` tokens can run beside the others; see ``RowWindows``."""
        return self.windows is None or self.windows.has_room(limit, loads_tail=loads_tail)

    def admit(self, row: int, num_known: int, limit: int, lock: PrefixLock, num_history_tokens: int) -> None:
        """Starts a row behind its cached prefix, and chooses the boundaries of its prompt that get a tail.

        Args:
            row: Was free.
            num_known: Tokens of the request.
            limit: Longest that it may get.
            lock: On its cached prefix, whose tail is on the device or being loaded.
            num_history_tokens: Its cached tokens, resumable or not.
        """
        page_size, every = self._page_size, self._every
        start = lock.pages.size * page_size
        if self.windows is not None:
            self.windows.admit(row, limit, lock)
        if self.snapshots is not None:
            self.snapshots.admit(row, start, lock.tail)
        prompt_end = (num_known - 1) // page_size * page_size
        wanted = {prompt_end, num_history_tokens, *(range(every, prompt_end, every) if every else ())}
        self._wanted[row] = sorted(boundary for boundary in wanted if boundary > start)
        self._prompt_end[row] = prompt_end
        self._set_cut(row)

    def start_slot(self, row: int) -> int:
        """Returns the slot of the snapshot that a row starts from; 0 without one."""
        return 0 if self.snapshots is None else self.snapshots.start_slot(row)

    def want_retained(self, row: int, start: int, retain: Retain) -> None:
        """Asks a row that starts behind so many tokens for tails at the ends of the prefixes that its request retains."""
        for num_tokens, _ in retain:
            boundary = num_tokens // self._page_size * self._page_size
            if start < boundary <= self._prompt_end[row]:
                self._want(row, boundary)

    def want(self, row: int, num_tokens: int, num_computed: int, num_published: int) -> bool:
        """Asks a row for a tail at a boundary; returns whether it can still leave one there.

        Args:
            row: Is computing its prompt.
            num_tokens: The boundary.
            num_computed: Tokens of the row, those of steps in flight included.
            num_published: Its published pages.
        """
        if self.snapshots is None:
            is_ahead = num_tokens > num_published * self._page_size
        elif self.snapshots.want(row, num_tokens):
            return True
        else:
            is_ahead = num_tokens > num_computed
        if is_ahead:
            self._want(row, num_tokens)
        return is_ahead

    def _want(self, row: int, boundary: int) -> None:
        if boundary not in self._wanted[row]:
            insort(self._wanted[row], boundary)
            self._set_cut(row)

    def _set_cut(self, row: int) -> None:
        if self.snapshots is not None:
            wanted = self._wanted[row]
            self._cut[row] = wanted[1] - self._page_size if len(wanted) > 1 else _NEVER

    # --- a step is planned --------------------------------------------------------------------

    def cut(self, rows: Int64Array, computed: Int32Array, allocation: Allocation) -> Allocation:
        """Shortens chunks of prompts that would pass two wanted boundaries; a step stores one snapshot of a row.

        Args:
            rows: int64 ``[B]``. They have the pages of their chunks.
            computed: int32 ``[B]``. Tokens computed before the step, at most.
            allocation: Of the step.
        """
        most = self._cut[rows] - computed
        is_cut = (most < allocation.num_new) & (allocation.num_new - allocation.num_draft > 1)
        if not is_cut.any():
            return allocation
        if self.windows is not None:
            for at in is_cut.nonzero()[0].tolist():
                self.windows.shrink(int(rows[at]), int(computed[at] + most[at]))
        return allocation.cut(np.where(is_cut, most, allocation.num_new))

    def plan(self, rows: Int64Array, computed: Int32Array, num_new: Int32Array, num_draft: Int32Array) -> None:
        """Counts a step, and assigns slots to the rows that may pass a boundary in it; see ``RowSnapshots.plan``."""
        if self.snapshots is None:
            return
        for row, most, after in self.snapshots.plan(rows, computed, num_new, num_draft):
            wanted = self._wanted[row]
            is_wanted = bool(wanted) and wanted[0] <= after
            boundary = wanted.pop(0) if is_wanted else after // self._page_size * self._page_size
            assert boundary > most, f"the state of row {row} may have passed {boundary}: it covers up to {most} tokens"
            self.snapshots.assign(row, boundary, is_wanted=is_wanted)
            self._set_cut(row)

    # --- its result is in -----------------------------------------------------------------------

    def publish(self, row: int, num_pages: int, lock: PrefixLock) -> None:
        """Keeps tails at the boundaries that a row has published and passed, and gives back the pages behind its window.

        Args:
            row: The row.
            num_pages: Its published pages.
            lock: On them.
        """
        end = num_pages * self._page_size
        if self.snapshots is None:
            wanted = self._wanted[row]
            while wanted and wanted[0] <= end:
                boundary = wanted.pop(0)
                self._note(row, boundary, self._keep(row, boundary, num_pages, lock))
        else:
            for store in self.snapshots.take_due(row, end):
                tail = self._keep(row, store.boundary, num_pages, lock, store.slot)
                if store.is_wanted:
                    self._tails.settle(tail)
                self.snapshots.keep(row, store, tail)
                self._note(row, store.boundary, tail)
            end = min(end, (int(self.snapshots.folded[row]) // self._page_size + 1) * self._page_size)
        if self.windows is not None:
            self.windows.leave(row, end)

    def release(self, row: int, num_pages: int, lock: PrefixLock) -> None:
        """Keeps a tail at the end of what a row has published and read, and gives back all its pages and slots.

        A row with snapshots has left it at the last boundary that its state has passed.
        """
        if self.snapshots is not None:
            latest = self.snapshots.release(row)
            if latest is not None and latest.is_open:
                self._tails.settle(latest)
        elif num_pages and lock.is_whole:
            self._keep(row, num_pages * self._page_size, num_pages, lock)
        tail, last_used = self._prompt_tail.pop(row, (None, 0))
        if tail is not None and tail.is_open and tail.last_used == last_used:
            self._tails.touch(tail, 0)  # a repeated prompt is rarer than a next turn
        if self.windows is not None:
            self.windows.release(row)
        self._cut[row] = _NEVER
        del self._wanted[row], self._prompt_end[row]

    def _keep(
        self, row: int, num_tokens: int, num_published: int, lock: PrefixLock, slots: Int32Array = NO_PAGES
    ) -> Tail:
        """Keeps a tail at a boundary of a row, with the snapshot that it has stored there."""
        pages = NO_PAGES if self.windows is None else self.windows.before(row, num_tokens)
        num_behind = num_published - num_tokens // self._page_size
        return self._cache.keep_tail(lock, num_behind, pages, slots)

    def _note(self, row: int, boundary: int, tail: Tail) -> None:
        if boundary == self._prompt_end[row]:
            self._prompt_tail[row] = tail, tail.last_used

    def check(self, rows: Int64Array, settled: Int32Array) -> None:
        """Asserts the bounds of rows (int64 ``[n]``), settled to int32 ``[n]`` tokens, and that they hold what they need (for tests)."""
        if self.windows is not None:
            self.windows.check(rows)
        if self.snapshots is not None:
            self.snapshots.check(rows, settled)
