"""Rows whose prefix is on its way from the host: they hold their pages and join no step until it has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.load_costs import LoadCostModel
from hiserve.engine.rows import RowState

MAX_LOADS = 64  # under way at once; requests with more to load wait for their turn
# Begun with one plan: bounds on what publishing costs a step. A store takes the planning thread as long as 100 pages,
# so they are few while few nodes wait, and each takes more of what a row has published meanwhile. A step that fills many
# pages is long enough for as many to be stored: what is behind is evicted before it is on the host.
MIN_STORED_PAGES, MAX_STORES, NODES_PER_STORE, PAGES_PER_STORE = 64, 4, 128, 128
PAGES_PER_SAVE = 16  # what the next steps would lose is stored in more orders, the longer the step


class HostLoads:
    """Orders copies, and knows which rows wait for which.

    Args:
        cache: Decides what is copied.
        rows: The planner's rows.
        costs: Is told how long loads took.
        cache_counters: Is told how copies ended.

    Attributes:
        num_pages_to_load: Of all loads under way.
    """

    def __init__(self, cache: PrefixCache, rows: RowState, costs: LoadCostModel, cache_counters: CacheCounters) -> None:
        self._cache = cache
        self._rows = rows
        self._costs = costs
        self._cache_counters = cache_counters
        self._waiting: set[int] = set()
        self._loads: list[PageCopy] = []
        self._num_loads = 0
        self.num_pages_to_load = 0
        self._open: dict[int, PageCopy] = {}

    @property
    def has_copies(self) -> bool:
        """Whether a copy was ordered that has not been answered, or can be."""
        return bool(self._open or self._loads or self._cache.has_offloads)

    @property
    def is_waited_for(self) -> bool:
        """Whether a row waits."""
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another load may be ordered."""
        return self._num_loads < MAX_LOADS

    def load(self, lock: PrefixLock) -> None:
        """Orders what a lock has on the host alone; its device pages were promised by the caller."""
        pages = self._cache.allocate(_after(lock.pages, lock.host_pages.size))
        assert pages is not None, f"no room for {lock.host_pages.size} pages that were promised"
        self._loads.append(self._cache.begin_load(lock, pages))
        self._num_loads += 1
        self.num_pages_to_load += pages.size

    def track(self, row: int) -> bool:
        """Keeps a new row from running while its lock waits for loads; returns whether it does."""
        is_waiting = bool(self._rows.lock(row).ops)
        if is_waiting:
            self._waiting.add(row)
        return is_waiting

    def untrack(self, row: int) -> None:
        """A row is given back; its copies go on without it."""
        self._waiting.discard(row)

    def next_rows(self) -> NDArray[np.int64]:
        """Returns the waiting rows whose loads arrive first, longest tenancy first: loads arrive in their order."""
        rows = self._rows.active
        rows = rows[np.isin(rows, list(self._waiting))]
        last = np.array([max(self._rows.lock(row).ops) for row in rows.tolist()], dtype=np.int64)
        is_next: NDArray[np.bool_] = last == last.min(initial=np.iinfo(np.int64).max)
        return rows[is_next]

    def start(self, rows: NDArray[np.int64]) -> tuple[int, ...]:
        """Lets rows run before their loads have ended; returns the ops that their forward must wait for."""
        self._waiting.difference_update(rows.tolist())
        return tuple(sorted(set[int]().union(*(self._rows.lock(row).ops for row in rows.tolist()))))

    def is_open(self, ops: Iterable[int]) -> bool:
        """Whether one of these orders has not been answered."""
        return any(op in self._open for op in ops)

    def runnable(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows that wait for nothing."""
        return rows[~np.isin(rows, list(self._waiting))] if self._waiting else rows

    def take(self, num_tokens: int) -> tuple[PageCopy, ...]:
        """Returns what is to be started with the next plan, which computes so many tokens: loads, then stores."""
        num_filled, num_to_save = num_tokens // self._cache.page_size, self._cache.transfers.num_to_save
        num_stores = 1 + self._cache.transfers.num_to_offload // NODES_PER_STORE + num_filled // PAGES_PER_STORE
        if num_to_save:
            num_stores = MAX_STORES + num_filled // PAGES_PER_SAVE
        if not num_tokens:  # nobody waits for the plan
            num_stores, num_filled = MAX_STORES, MAX_STORES * PAGES_PER_STORE
        most = MAX_STORES + num_filled // PAGES_PER_SAVE
        stores = self._cache.begin_offloads(
            max(MIN_STORED_PAGES, num_filled, num_to_save), min(most, num_stores), self._is_worth_storing
        )
        copies = (*self._loads, *stores)
        self._loads = []
        self._open |= {copy.op: copy for copy in copies}
        return copies

    def _is_worth_storing(self, num_pages: int) -> bool:
        return self._costs.is_worth_loading(num_pages * self._cache.page_size, 0)

    def complete(self, acks: Sequence[CopyAck]) -> list[int]:
        """Takes in how copies ended; returns the rows that lost their prefix because a load failed."""
        lost: list[PrefixLock] = []
        for ack in acks:
            copy = self._open.pop(ack.op)
            if copy.kind is CopyKind.LOAD:
                self._num_loads -= 1
                self.num_pages_to_load -= copy.device_pages.size
                if ack.is_ok:
                    self._costs.end_load(copy.device_pages.size * self._cache.page_size, ack.seconds)
            lost += self._cache.complete(ack.op, ok=ack.is_ok)
            self._cache_counters.ended(copy, ack)
        arrived = [row for row in self._waiting if not self._rows.lock(row).ops]
        self._waiting.difference_update(arrived)
        if not lost:
            return []
        return [row for row in self._rows.active.tolist() if any(self._rows.lock(row) is each for each in lost)]


def _after(pages: Int32Array, count: int) -> Int32Array:
    """Wishes for ``count`` pages that follow these, so that the row stays adjacent."""
    return pages[-1] + 1 + np.arange(count, dtype=np.int32) if pages.size else np.zeros(count, dtype=np.int32)
