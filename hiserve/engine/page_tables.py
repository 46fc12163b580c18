"""Gives rows their pages, and remembers what the device must be told of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.allocator import SINK_PAGE
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.plan import Int32Array, TableWrites
from hiserve.engine.journal import TableJournal
from hiserve.engine.rows import RowState


class PageTables:
    """The rows' page tables, here and, with the next plan, on the device.

    Args:
        cache: Where pages come from.
        rows: The planner's rows.
    """

    def __init__(self, cache: PrefixCache, rows: RowState) -> None:
        self._cache = cache
        self._rows = rows
        self._journal = TableJournal()

    def grow(self, rows: NDArray[np.int64], num_new: Int32Array) -> bool:
        """Gives each row the pages its new tokens and their drafts need; False, and nothing, when there are too few."""
        state, page_size = self._rows, self._cache.page_size
        held, end = state.num_pages[rows], state.end(rows, num_new)
        growing = (end > held * page_size).nonzero()[0]
        if not growing.size:
            return True
        rows, held, end = rows[growing], held[growing], end[growing]
        extra = -(-end // page_size) - held
        before = np.where(held, state.page_table[rows, held - 1], SINK_PAGE)
        if (extra > 1).any():
            ends = np.cumsum(extra, dtype=np.int32)
            within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - extra, extra)
            rows, held, before = np.repeat(rows, extra), np.repeat(held, extra) + within, np.repeat(before, extra)
            before = np.where(before, before + within, SINK_PAGE)
        pages = self._cache.allocate(np.where(before, before + 1, SINK_PAGE))
        if pages is None:
            return False
        state.num_pages[rows] = held + 1  # of a row's entries the last one counts
        self.write(rows, held, pages, are_new=True)
        return True

    def write(
        self, rows: NDArray[np.int64], indices: NDArray[np.integer], pages: Int32Array, *, are_new: bool = False
    ) -> None:
        """Changes entries; one row per entry. New pages are those whose tokens are to be computed."""
        state = self._rows
        state.page_table[rows, indices] = pages
        self._journal.write(rows, state.admission[rows], indices, pages, are_new=are_new)

    def publish(self, rows: NDArray[np.int64], step_id: int) -> None:
        """Publishes every page that became full with a step; dedup may move a row to pages that were there before."""
        state, page_size = self._rows, self._cache.page_size
        published = state.num_published[rows]
        full = np.minimum(state.settled[rows], state.known[rows]) // page_size
        grown = (full > published).nonzero()[0]
        ranges = zip(rows[grown].tolist(), published[grown].tolist(), full[grown].tolist(), strict=True)
        for row, start, end in ranges:
            pages = state.page_table[row, start:end]
            key = state.tokens[row, start * page_size : end * page_size].tobytes()
            canonical = self._cache.insert(state.receipt(row), key, pages, step_id)
            if canonical is not pages:
                moved = np.flatnonzero(canonical != pages[: canonical.size])
                self.write(np.full_like(moved, row), start + moved, canonical[moved])
            state.num_published[row] = start + canonical.size

    def take(self) -> TableWrites:
        """Returns the entries that changed since the last call."""
        return self._journal.take(self._rows.admission, self._cache.pages.owner)
