"""The rows: all state of the requests that run, and each change of it."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import Match, PrefixCache, PrefixLock
from hiserve.core.plan import BoolArray, Int32Array, Int64Array
from hiserve.core.request import FinishReason
from hiserve.core.usage import SOURCES
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.budget import Allocation
from hiserve.engine.page_tables import PageTables
from hiserve.engine.queue import Request
from hiserve.engine.row_tails import RowTails
from hiserve.engine.stop_tokens import StopTokens
from hiserve.ipc.updates import RequestFacts

# The lengths of a row, in tokens. ``RowState.check`` asserts their order.
#
#     0 ──── published ──── settled ──── computed ──── known + pending ──── limit
#            in the tree    result in    planned       after the steps      drafts in flight
#                                                      in flight            may pass it
#
#     admit      known = prompt; computed = settled = published = cached prefix; pending = 0
#     plan       computed += new tokens; pending += drafts + 1, if the step samples
#     settle     settled += new tokens of the result
#     append     known += accepted tokens up to a stop; pending -= drafts + 1; computed, settled -= rejected drafts
#     publish    published = full pages below settled and known
#     release    the row is free


class RowState:
    """The rows on the host: columns, indexed by row, which this class alone writes. Row 0 is the padding row.

    ``computed`` and ``pending`` are upper bounds while steps are in flight: a step may reject drafts.

    Args:
        max_rows: Rows, the padding row not counted.
        max_len: Longest row, in tokens.
        num_ahead: Drafts that a step may write after the last token of a row.
        eos_token_ids: Tokens that end every reply, unless its request ignores them.
        limits: Of tails; None where each boundary is a resume point.
        max_depth: The longest path of drafts, where they may be trees: rows with a grammar have no longer chains.

    Attributes:
        tokens: int32 ``[R, max_len]``. Known tokens.
        known: int32 ``[R]``. Valid entries of ``tokens``.
        pending: int32 ``[R]``. Tokens that the steps in flight may append, at most.
        computed: int32 ``[R]``. Tokens computed after the steps in flight, at most.
        settled: int32 ``[R]``. Tokens computed by steps whose result is in.
        num_published: int32 ``[R]``. Leading pages that the index owns.
        limit: int32 ``[R]``. Longest that the request may get.
        drafted: int32 ``[R]``. Drafts to verify after the known tokens, once the steps in flight end.
        max_draft: int32 ``[R]``. Drafts that the request lets a step verify.
        draft_use: int32 ``[R, 2 + num_ahead]``. Steps of the request that verified drafts, these drafts, and how many
            of them were accepted at each position.
        tenant: object ``[R]``. Namespace of the request, bytes.
        source: int8 ``[R]``. Index into ``SOURCES`` of the tier that gave most of the cached prompt.
        generation: int64 ``[R]``. Serial number of the request in its row; 0 for a free row.
        uid: int64 ``[R]``.
        num_top: int32 ``[R]``. Likeliest tokens reported with each generated one; -1 when no score is wanted.
        active: int64 ``[n]``. Rows in use, earliest admission first.
        tables: Page tables.
        tails: The boundaries at which rows can be resumed; None where they can at each.
        windows: The rows' window pages; None where every page has all layers.
        snapshots: The slots of their snapshots; None of a model without.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_rows: int,
        max_len: int,
        num_ahead: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        limits: WindowLimits | None = None,
        *,
        max_depth: int = 0,
    ) -> None:
        count = max_rows + 1
        self._cache = cache
        self._page_size = cache.page_size
        self._max_len = max_len
        self._num_ahead = num_ahead
        self._max_depth = max_depth
        self.tokens = np.zeros((count, max_len), dtype=np.int32)
        self.known = np.zeros(count, dtype=np.int32)
        self.pending = np.zeros(count, dtype=np.int32)
        self.computed = np.zeros(count, dtype=np.int32)
        self.settled = np.zeros(count, dtype=np.int32)
        self.num_published = np.zeros(count, dtype=np.int32)
        self.limit = np.zeros(count, dtype=np.int32)
        self.drafted = np.zeros(count, dtype=np.int32)
        self.max_draft = np.zeros(count, dtype=np.int32)
        self.draft_use = np.zeros((count, 2 + num_ahead), dtype=np.int32)
        self.tenant = np.full(count, b"", dtype=np.object_)
        self.source = np.zeros(count, dtype=np.int8)
        self.generation = np.zeros(count, dtype=np.int64)
        self.uid = np.zeros(count, dtype=np.int64)
        self.num_top = np.full(count, -1, dtype=np.int32)
        self.active = np.empty(0, dtype=np.int64)
        self.tables = PageTables(cache, self.generation, max_len)
        self.tails: RowTails | None = None
        if limits is not None and cache.tails is not None:
            self.tails = RowTails(cache, limits, self.generation, max_len)
        self.windows = None if self.tails is None else self.tails.windows
        self.snapshots = None if self.tails is None else self.tails.snapshots
        self._requests: list[Request | None] = [None] * count
        self._locks: list[PrefixLock | None] = [None] * count  # on the published prefix
        self._free, self._released = list(range(1, count)), list[int]()
        self._facts: dict[int, RequestFacts] = {}  # not reported yet
        self._has_new_draft_use = np.zeros(count, dtype=np.bool_)
        self._score_end = np.zeros(count, dtype=np.int32)  # a wanted prompt score follows each position below it
        self._num_scoring, self._num_admitted = 0, 0  # rows with a ``_score_end``; requests until now
        self._stops = StopTokens(count, eos_token_ids)

    # --- a request comes and goes -----------------------------------------------------------

    def admit(self, request: Request, lock: PrefixLock, match: Match) -> int:
        """Gives a request the lowest free row, with its cached prefix.

        Args:
            request: Its prompt is shorter than ``max_len``.
            lock: On its cached prefix; ``release`` returns it.
            match: That was locked.

        Returns:
            The row.
        """
        row = heapq.heappop(self._free)
        num_prefix = lock.pages.size
        self._num_admitted += 1
        self.generation[row] = self._num_admitted
        self.uid[row] = request.uid
        self.tokens[row, : request.tokens.size] = request.tokens
        self.known[row] = request.tokens.size
        self.pending[row] = 0
        self.computed[row] = self.settled[row] = num_prefix * self._page_size
        self.num_published[row] = num_prefix
        self.limit[row] = self.limit_of(request)
        self.drafted[row] = 0
        self.max_draft[row] = request.sampling.most_drafts(self._num_ahead, self._max_depth)
        self.draft_use[row] = 0 if request.draft_use is None else request.draft_use
        self._has_new_draft_use[row] = self._num_ahead > 0
        self.tenant[row] = request.tenant
        self.source[row] = SOURCES.index(request.source)
        logprobs = request.sampling.logprobs
        self.num_top[row] = -1 if logprobs is None else logprobs
        last = request.num_prompt - 1
        self._score_end[row] = last if request.num_scored < last else 0
        self._num_scoring += bool(self._score_end[row])
        self._stops.set(row, request.sampling)
        if request.facts is not None:
            self._facts[row] = request.facts
        self._requests[row] = request
        self._locks[row] = lock
        self.active = np.append(self.active, row)
        self.tables.bind(row, lock.pages)
        if self.tails is not None:
            self.tails.admit(row, int(self.known[row]), int(self.limit[row]), lock, match.num_history_tokens)
            self.tails.want_retained(row, int(self.computed[row]), request.retain)
        return row

    def release(self, row: int) -> Request:
        """Frees the row; steps in flight may still write its pages, in stream order.

        Returns:
            The request, with its tokens and all that its next row needs.
        """
        request, lock = self.request(row), self.lock(row)
        private = self.tables.pages[row, self.num_published[row] : self.tables.num_pages[row]].copy()
        request.lose_row(self.tokens[row, : self.known[row]].copy())
        request.draft_use = self.draft_use[row].copy()
        request.facts = self._facts.pop(row, None)
        if self.tails is not None:
            self.tails.release(row, int(self.num_published[row]), lock)
        self.generation[row] = 0
        self._num_scoring -= bool(self._score_end[row])
        self._stops.forget(row)
        self._requests[row] = None
        self._locks[row] = None
        self.active = self.active[self.active != row]
        heapq.heappush(self._free, row)
        self._released.append(row)
        if private.size:
            self._cache.free(private)
        self._cache.release(lock)
        return request

    # --- a step is planned --------------------------------------------------------------------

    def grow(self, rows: Int64Array, num_new: Int32Array) -> bool:
        """Gives rows the pages for new tokens (int32 ``[n]``) and drafts; False, and nothing, when there are too few."""
        end: Int32Array = self.computed[rows] + num_new
        if self._num_ahead:
            ahead = np.where(num_new > 0, np.int32(self._num_ahead), np.int32(0))
            end = np.minimum(end + ahead, np.int32(self._max_len))
        has_grown = self.tables.grow(rows, end)
        if self.windows is not None and has_grown:
            self.windows.grow(rows, end)
        return has_grown

    def cut(self, rows: Int64Array, allocation: Allocation) -> Allocation:
        """Returns the allocation of rows (int64 ``[B]``), without chunks that pass two boundaries whose snapshots are wanted."""
        if self.tails is None or self.snapshots is None:
            return allocation
        return self.tails.cut(rows, self.computed[rows], allocation)

    def plan(self, rows: Int64Array, num_new: Int32Array, num_draft: Int32Array, samples: BoolArray) -> Int32Array:
        """Counts a step's tokens as computed; returns the bounds of the rows' lengths after it, int32 ``[B]``.

        Args:
            rows: int64 ``[B]``.
            num_new: int32 ``[B]``. Tokens to compute, drafts included.
            num_draft: int32 ``[B]``.
            samples: bool ``[B]``.
        """
        computed: Int32Array = self.computed[rows] + num_new
        self.computed[rows] = computed
        self.pending[rows] += samples + num_draft
        if self.tails is not None:
            self.tails.plan(rows, computed, num_new, num_draft)
        return computed

    def draft(self, rows: Int64Array, num_draft: int) -> bool:
        """Counts the drafts made after a step of sampling rows (int64 ``[S]``); returns whether any row takes some."""
        self.drafted[rows] = drafted = np.minimum(self.max_draft[rows], num_draft)
        return bool(drafted.any())

    def take_released(self) -> Int32Array:
        """Returns the rows released since the last call."""
        released, self._released = np.array(self._released, dtype=np.int32), []
        return released

    # --- its result is in -----------------------------------------------------------------------

    def settle(self, rows: Int64Array, num_new: Int32Array, num_draft: Int32Array) -> None:
        """Counts the tokens (int32 ``[n]``) that a step has computed of rows, rejected drafts included; these are int32 ``[n]``."""
        self.settled[rows] += num_new
        if self.snapshots is not None:
            self.snapshots.settle(rows, self.settled[rows], num_draft)

    def append(
        self,
        rows: Int64Array,
        num_draft: Int32Array,
        counts: Int32Array,
        tokens: Int32Array,
        grammar_ends: Int32Array | None = None,
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Appends a settled step's tokens up to a stop, and takes back its rejected drafts.

        Args:
            rows: int64 ``[S]``.
            num_draft: int32 ``[S]``. Drafts that the step verified.
            counts: int32 ``[S]``. Accepted drafts + 1.
            tokens: int32 ``[S, 1 + max draft]``.
            grammar_ends: int32 ``[S]``. The index of the token that ends a row's grammar, negative where it goes on; None
                is negative everywhere.

        Returns:
            int32 ``[S]`` tokens appended to each row, int32 ``[S]`` the ``FinishReason`` of each, and int32 ``[sum]``
            the tokens.
        """
        most = num_draft + 1
        self.pending[rows] -= most
        rejected = most - counts
        if rejected.any():
            assert (counts >= 1).all() and (rejected >= 0).all(), f"rows {rows} emitted {counts} of at most {most}"
            self.computed[rows] -= rejected
            self.settled[rows] -= rejected
        known = self.known[rows]
        room = self.limit[rows] - known
        counts = np.minimum(counts, room)
        is_complete = None
        if grammar_ends is not None:
            is_complete = (grammar_ends >= 0) & (grammar_ends < counts)
            counts = np.where(is_complete, grammar_ends + 1, counts).astype(np.int32)
        counts, stops = self._stops.cut(rows, counts, tokens)
        width = np.arange(tokens.shape[1])
        is_new = width < counts[:, None]
        places = (rows * self.tokens.shape[1] + known)[:, None] + width
        tokens = tokens[is_new]
        self.tokens.reshape(-1)[places[is_new]] = tokens
        self.known[rows] = known + counts
        finishes = np.where(counts == room, int(FinishReason.LENGTH), 0)
        if is_complete is not None:
            finishes[is_complete] = int(FinishReason.COMPLETE)
        finishes[stops] = int(FinishReason.STOP)
        return counts, finishes, tokens

    def publish(self, rows: Int64Array, step_id: int) -> None:
        """Inserts the pages that a step filled into the index; dedup may move a row to pages that were there before."""
        page_size = self._page_size
        published = self.num_published[rows]
        full = np.minimum(self.settled[rows], self.known[rows]) // page_size
        grown = (full > published).nonzero()[0]
        ranges = zip(rows[grown].tolist(), published[grown].tolist(), full[grown].tolist(), strict=True)
        for row, start, end in ranges:
            pages = self.tables.pages[row, start:end]
            key = self.tokens[row, start * page_size : end * page_size].tobytes()
            canonical = self._cache.insert(self.lock(row), key, pages, step_id)
            if canonical is not pages:
                moved = np.flatnonzero(canonical != pages[: canonical.size])
                self.tables.replace(np.full_like(moved, row), start + moved, canonical[moved])
            self.num_published[row] = start + canonical.size
        if self.tails is not None:
            is_due = full > published if self.snapshots is None else (full > published) | self.snapshots.is_due(rows)
            for row in rows[is_due].tolist():
                self.tails.publish(row, int(self.num_published[row]), self.lock(row))

    def add_draft_use(self, rows: Int64Array, use: Int32Array) -> None:
        """Adds to ``draft_use`` of rows (int64 ``[n]``, each once): int32 ``[n, 2 + num_ahead]``."""
        self.draft_use[rows] += use
        self._has_new_draft_use[rows] = True

    # --- questions ------------------------------------------------------------------------------

    @property
    def has_free_row(self) -> bool:
        """Whether another request can be admitted."""
        return bool(self._free)

    def request(self, row: int) -> Request:
        """Returns the request in a row; there must be one."""
        request = self._requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def reply(self, row: int) -> Int32Array:
        """Returns the known tokens of a row after its prompt, int32 ``[n]``."""
        return self.tokens[row, self.request(row).num_prompt : self.known[row]]

    def lock(self, row: int) -> PrefixLock:
        """Returns the lock on the published prefix of a row's request; there must be one."""
        lock = self._locks[row]
        assert lock is not None, f"row {row} holds no lock"
        return lock

    def limit_of(self, request: Request) -> int:
        """Returns the longest that a request may get, in tokens."""
        return min(request.num_prompt + (request.sampling.max_tokens or self._max_len), self._max_len)

    def num_to_score(self, rows: Int64Array) -> Int32Array:
        """Returns how many of the tokens that each row (int64 ``[n]``) computes next are scored: int32 ``[n]``."""
        if not self._num_scoring:
            return np.zeros(rows.size, dtype=np.int32)
        left: Int32Array = np.maximum(self._score_end[rows] - self.computed[rows], 0)
        return left

    def take_facts(self, rows: Int64Array) -> dict[int, RequestFacts]:
        """Returns the new facts about the requests of rows (int64 ``[n]``), by index into ``rows``, once."""
        if not self._facts:
            return {}
        return {index: self._facts.pop(row) for index, row in enumerate(rows.tolist()) if row in self._facts}

    def take_changed_drafts(self, rows: Int64Array) -> Int64Array:
        """Returns the indices into ``rows`` (int64 ``[n]``) whose ``draft_use`` changed since the last call."""
        fresh: Int64Array = self._has_new_draft_use[rows].nonzero()[0]
        self._has_new_draft_use[rows[fresh]] = False
        return fresh

    def num_pages_for(self, num_known: NDArray[np.integer]) -> NDArray[np.integer]:
        """Returns the pages of rows with one token more than these, and its drafts."""
        most = np.minimum(num_known + max(1, self._num_ahead), self._max_len)
        whole: NDArray[np.integer] = -(-most // self._page_size)
        return whole

    def num_promised_pages(self) -> int:
        """Returns the pages that rows still need for their known tokens, and one more token."""
        whole = self.num_pages_for(self.known[self.active])
        return int(np.maximum(whole - self.tables.num_pages[self.active], 0).sum())

    def check(self) -> None:
        """Asserts the order of the lengths of every live row, that its pages hold them, and that rows are free or live.

        For tests, between steps.
        """
        live = np.flatnonzero(self.generation)
        assert sorted([*self._free, *live]) == list(range(1, self.generation.size)), f"rows {live}, free {self._free}"
        assert np.array_equal(self.active, live[np.argsort(self.generation[live])]), (
            f"rows {live}, active {self.active}"
        )
        most = self.limit + self._num_ahead
        for row in live.tolist():
            published = int(self.num_published[row]) * self._page_size
            settled, computed = int(self.settled[row]), int(self.computed[row])
            known, pending, limit = int(self.known[row]), int(self.pending[row]), int(self.limit[row])
            held = int(self.tables.num_pages[row]) * self._page_size
            facts = f"row {row}, {published=} {settled=} {computed=} {known=} {pending=} {limit=} {held=}"
            assert 0 <= published <= settled <= computed <= known + pending, facts
            assert known <= limit <= self._max_len and known + pending <= min(most[row], self._max_len), facts
            assert pending >= 0 and computed <= held and self.lock(row).is_open, facts
            assert 0 <= self.drafted[row] <= min(self.max_draft[row], self._num_ahead), f"{facts} {self.drafted[row]=}"
        if self.tails is not None:
            self.tails.check(live, self.settled[live])
