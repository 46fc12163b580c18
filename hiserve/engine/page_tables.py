"""The page table of each row, and the entries that changed since the last plan."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import PADDING_PAGE
from hiserve.core.plan import NO_WRITES, BoolArray, Int32Array, Int64Array, TableWrites


class PagePool(Protocol):
    """The pages that tables list: those of the prefix cache, or of its window layers."""

    page_size: int
    page_owner: Int32Array

    def allocate(self, wanted: Int32Array) -> Int32Array | None:
        """Takes one page per entry of ``wanted``, the preferred ones; None if there are too few."""


class PageTables:
    """Page tables on the host. The next plan carries their changes to the device.

    A row may get another request before the next plan. A change must not reach that request, so each keeps the
    generation of its row.

    Args:
        pool: Of the pages.
        generation: int64 ``[R]``. Number of the request in each row; ``RowState`` writes it.
        max_len: Longest row, in tokens.

    Attributes:
        pages: int32 ``[R, max_pages]``.
        num_pages: int32 ``[R]``. Entries of each row; those of window pages that were given back mean nothing.
    """

    def __init__(self, pool: PagePool, generation: Int64Array, max_len: int) -> None:
        self._pool = pool
        self._generation = generation
        self._writes: list[tuple[Int64Array, Int64Array, NDArray[np.integer], Int32Array, BoolArray]] = []
        self.pages = np.zeros((generation.size, -(-max_len // pool.page_size)), dtype=np.int32)
        self.num_pages = np.zeros(generation.size, dtype=np.int32)

    def bind(self, row: int, prefix: Int32Array, first: int = 0) -> None:
        """Starts the table of a new request with the pages of its cached prefix, from entry ``first`` on."""
        self.num_pages[row] = first + prefix.size
        self.replace(np.full(prefix.size, row), np.arange(first, first + prefix.size), prefix)

    def grow(self, rows: Int64Array, end: Int32Array) -> bool:
        """Gives rows (int64 ``[n]``) pages for so many tokens (int32 ``[n]``); False, and nothing, when there are too few."""
        page_size = self._pool.page_size
        held = self.num_pages[rows]
        growing = (end > held * page_size).nonzero()[0]
        if not growing.size:
            return True
        rows, held, end = rows[growing], held[growing], end[growing]
        extra = -(-end // page_size) - held
        before = np.where(held, self.pages[rows, held - 1], PADDING_PAGE)
        if (extra > 1).any():
            ends = np.cumsum(extra, dtype=np.int32)
            within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - extra, extra)
            rows, held, before = np.repeat(rows, extra), np.repeat(held, extra) + within, np.repeat(before, extra)
            before = np.where(before, before + within, PADDING_PAGE)
        pages = self._pool.allocate(np.where(before, before + 1, PADDING_PAGE))
        if pages is None:
            return False
        self.num_pages[rows] = held + 1  # of a row's entries the last one counts
        self.replace(rows, held, pages, are_new=True)
        return True

    def replace(
        self, rows: Int64Array, indices: NDArray[np.integer], pages: Int32Array, *, are_new: bool = False
    ) -> None:
        """Writes ``pages[i]`` into entry ``indices[i]`` of row ``rows[i]``; the tokens of new pages are still to be computed."""
        self.pages[rows, indices] = pages
        self._writes.append((rows, self._generation[rows], indices, pages, np.full(pages.size, are_new)))

    def take_writes(self) -> TableWrites:
        """Returns the entries that changed since the last call, of the rows' present requests."""
        if not self._writes:
            return NO_WRITES
        rows, generations, indices, pages, are_new = self._writes[0]
        if len(self._writes) > 1:
            rows, generations, indices, pages, are_new = (
                np.concatenate(column) for column in zip(*self._writes, strict=True)
            )
        self._writes = []
        live = self._generation[rows] == generations
        pages = pages[live]
        return TableWrites(
            rows=rows[live].astype(np.int32),
            indices=indices[live].astype(np.int32),
            pages=pages,
            owners=self._pool.page_owner[pages],
            are_new=are_new[live],
        )
