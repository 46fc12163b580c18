"""Gives rows their pages, and remembers what the device must be told of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.manager import CacheManager
from hiserve.core.plan import Int32Array, TableWrites
from hiserve.worker.columns import Columns
from hiserve.worker.journal import TableJournal


class PageTables:
    """The rows' page tables, here and, with the next plan, on the device.

    Args:
        cache: Where pages come from.
        rows: The planner's rows.
    """

    def __init__(self, cache: CacheManager, rows: Columns) -> None:
        self._cache = cache
        self._rows = rows
        self._journal = TableJournal()

    def grow(self, rows: NDArray[np.int64], num_new: Int32Array) -> bool:
        """Gives each row the pages its new tokens need; False, and nothing, when there are too few."""
        columns, page_size = self._rows, self._cache.page_size
        held = columns.num_pages[rows]
        extra = np.maximum((columns.computed[rows] + num_new + page_size - 1) // page_size - held, 0)
        total = int(extra.sum())
        if not total:
            return True
        growing = extra > 0
        rows, held, extra = rows[growing], held[growing], extra[growing]
        owner = np.repeat(np.arange(rows.size), extra)
        within = np.arange(total) - np.repeat(np.cumsum(extra) - extra, extra)
        last = np.where(held > 0, columns.page_table[rows, np.maximum(held - 1, 0)], 0)
        wanted = np.where(last[owner] > 0, last[owner] + 1 + within, 0)
        pages = self._cache.take(wanted.astype(np.int32))
        if pages is None:
            return False
        columns.num_pages[rows] += extra
        self.write(rows[owner], held[owner] + within, pages)
        return True

    def write(self, rows: NDArray[np.int64], indices: NDArray[np.int64], pages: Int32Array) -> None:
        """Changes entries; one row per entry."""
        columns = self._rows
        columns.page_table[rows, indices] = pages
        self._journal.write(rows, columns.admission[rows], indices, pages)

    def take(self) -> TableWrites:
        """Returns the entries that changed since the last call."""
        return self._journal.take(self._rows.admission, self._cache.pages.owner)
