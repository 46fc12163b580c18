"""The planner's view of the permanent rows: one array per fact, indexed by row."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import PrefixLock
from hiserve.core.cache_usage import SOURCES, CacheUse
from hiserve.core.plan import Int32Array
from hiserve.engine.waiting_queue import Request


class RowState:
    """Host mirror of the rows. Row 0 is the padding row and never used.

    The lengths of a row, in tokens::

        0 ─ published ─ settled ─ computed ≤ known + pending ≤ limit, drafts aside
            (pages)     (done)    (planned)

    Args:
        max_rows: Rows, the padding row not counted.
        max_len: Longest that a row may get, in tokens.
        page_size: Tokens per page.
        num_ahead: Drafts that a step may write behind the last token of a row.

    Attributes:
        tokens: int32 ``[R, max_len]``. Known tokens.
        known: int32 ``[R]``. Valid entries of ``tokens``.
        pending: int32 ``[R]``. Tokens that steps in flight may append, at most.
        computed: int32 ``[R]``. Tokens computed once the steps in flight end, at most.
        settled: int32 ``[R]``. Tokens computed by steps whose result is in.
        limit: int32 ``[R]``. Longest the row may get.
        drafted: int32 ``[R]``. Drafts to verify that stand behind what is known, once the steps in flight end.
        max_draft: int32 ``[R]``. Drafts that the tenant wants verified at once, at most.
        draft_use: int32 ``[R, 2 + num_ahead]``. Steps of the tenant that verified drafts, these, and how many of them
            were accepted at each position.
        has_draft_news: bool ``[R]``. Whether ``draft_use`` is still to be reported; never without speculation.
        source: int8 ``[R]``. Where most of what was cached of the prompt came from, an index into ``SOURCES``.
        page_table: int32 ``[R, max_pages]``.
        num_pages: int32 ``[R]``. Valid entries of ``page_table``.
        num_published: int32 ``[R]``. Leading pages that the index owns.
        admission: int64 ``[R]``. Serial number of the tenancy; 0 for a free row.
        uid: int64 ``[R]``.
        num_top: int32 ``[R]``. Likeliest tokens reported with each generated one; -1 when no score is wanted.
        score_end: int32 ``[R]``. A wanted prompt score follows each position below it, if computed in this tenancy.
        cached: By row: what of the prompt came from the cache, until it is reported.
        requests: The tenant of each row.
        receipts: The tenant's lock on its published prefix.
        active: int64 ``[n]``. Rows in use, longest tenancy first.
    """

    def __init__(self, max_rows: int, max_len: int, page_size: int, num_ahead: int = 0) -> None:
        count = max_rows + 1
        self._page_size = page_size
        self._num_ahead = num_ahead
        self._max_len = max_len
        self.tokens = np.zeros((count, max_len), dtype=np.int32)
        self.known = np.zeros(count, dtype=np.int32)
        self.pending = np.zeros(count, dtype=np.int32)
        self.computed = np.zeros(count, dtype=np.int32)
        self.settled = np.zeros(count, dtype=np.int32)
        self.limit = np.zeros(count, dtype=np.int32)
        self.drafted = np.zeros(count, dtype=np.int32)
        self.max_draft = np.zeros(count, dtype=np.int32)
        self.draft_use = np.zeros((count, 2 + num_ahead), dtype=np.int32)
        self.has_draft_news = np.zeros(count, dtype=np.bool_)
        self.source = np.zeros(count, dtype=np.int8)
        self.page_table = np.zeros((count, -(-max_len // page_size)), dtype=np.int32)
        self.num_pages = np.zeros(count, dtype=np.int32)
        self.num_published = np.zeros(count, dtype=np.int32)
        self.admission = np.zeros(count, dtype=np.int64)
        self.uid = np.zeros(count, dtype=np.int64)
        self.num_top = np.full(count, -1, dtype=np.int32)
        self.score_end = np.zeros(count, dtype=np.int32)
        self.cached: dict[int, CacheUse] = {}
        self.requests: list[Request | None] = [None] * count
        self.receipts: list[PrefixLock | None] = [None] * count
        self.active = np.empty(0, dtype=np.int64)
        self._free = list(range(1, count))
        self._admissions = 0
        self._num_scoring = 0  # rows with a ``score_end``

    @property
    def has_free_row(self) -> bool:
        """Whether another request can be admitted."""
        return bool(self._free)

    def open(self, request: Request, lock: PrefixLock, limit: int) -> int:
        """Gives a request the lowest free row, its cached prefix already in place.

        Args:
            request: The new tenant.
            lock: Lock on its cached prefix.
            limit: Longest the row may get.

        Returns:
            The row.
        """
        row = heapq.heappop(self._free)
        self._admissions += 1
        prefix = lock.pages
        self.tokens[row, : request.tokens.size] = request.tokens
        self.known[row] = request.tokens.size
        self.pending[row] = 0
        self.computed[row] = self.settled[row] = prefix.size * self._page_size
        self.limit[row] = limit
        self.drafted[row] = 0
        self.max_draft[row] = request.sampling.most_drafts(self._num_ahead)
        self.draft_use[row] = 0 if request.draft_use is None else request.draft_use
        self.has_draft_news[row] = self._num_ahead > 0
        self.source[row] = SOURCES.index(request.source)
        self.page_table[row, : prefix.size] = prefix
        self.num_pages[row] = self.num_published[row] = prefix.size
        self.admission[row] = self._admissions
        self.uid[row] = request.uid
        logprobs = request.sampling.logprobs
        self.num_top[row] = -1 if logprobs is None else logprobs
        last = request.num_prompt - 1
        self.score_end[row] = last if request.num_scored < last else 0
        self._num_scoring += bool(self.score_end[row])
        if request.cached is not None:
            self.cached[row] = request.cached
        self.requests[row] = request
        self.receipts[row] = lock
        self.active = np.append(self.active, row)
        return row

    def to_score(self, rows: NDArray[np.int64]) -> Int32Array:
        """Returns how many of the tokens that each row (int64 ``[n]``) computes next are scored: int32 ``[n]``."""
        if not self._num_scoring:
            return np.zeros(rows.size, dtype=np.int32)
        left: Int32Array = np.maximum(self.score_end[rows] - self.computed[rows], 0)
        return left

    def take_cached(self, rows: NDArray[np.int64]) -> list[CacheUse | None]:
        """Returns what is still to be reported of what the cache gave each row (int64 ``[n]``); None where it was."""
        if not self.cached:
            return [None] * rows.size
        return [self.cached.pop(row, None) for row in rows.tolist()]

    def close(self, row: int) -> tuple[Request, PrefixLock, Int32Array]:
        """Ends a tenancy.

        Returns:
            The tenant, its lock, and the pages that the index does not own.
        """
        request, lock = self.tenant(row), self.receipt(row)
        private = self.page_table[row, self.num_published[row] : self.num_pages[row]].copy()
        request.draft_use = self.draft_use[row].copy()
        self.admission[row] = 0
        self._num_scoring -= bool(self.score_end[row])
        self.requests[row] = None
        self.receipts[row] = None
        self.active = self.active[self.active != row]
        heapq.heappush(self._free, row)
        return request, lock, private

    def tenant(self, row: int) -> Request:
        """Returns the request that has the row; there must be one."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def receipt(self, row: int) -> PrefixLock:
        """Returns the lock of the row's tenant on its published prefix; there must be one."""
        lock = self.receipts[row]
        assert lock is not None, f"row {row} holds no receipt"
        return lock

    def num_pages_for(self, num_known: NDArray[np.integer]) -> NDArray[np.integer]:
        """Returns the pages that rows take until they have one token more than these, and its drafts."""
        most = np.minimum(num_known + max(1, self._num_ahead), self._max_len)
        whole: NDArray[np.integer] = -(-most // self._page_size)
        return whole

    def end(self, rows: NDArray[np.int64], num_new: Int32Array) -> Int32Array:
        """Returns where rows (int64 ``[n]``) end whose next step computes so many tokens, and proposes drafts."""
        end: Int32Array = self.computed[rows] + num_new
        if self._num_ahead:
            ahead = np.where(num_new > 0, np.int32(self._num_ahead), np.int32(0))
            end = np.minimum(end + ahead, np.int32(self._max_len))
        return end

    def num_promised_pages(self) -> int:
        """Returns the pages that rows still need for what is known of them, and one more token."""
        rows = self.active
        whole = self.num_pages_for(self.known[rows])
        return int(np.maximum(whole - self.num_pages[rows], 0).sum())
