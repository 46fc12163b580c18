"""Gives waiting requests rows: what of a prompt the cache has, where it comes from, and whether the rest fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.manager import CacheManager, Match
from hiserve.core.plan import RowAdmit
from hiserve.core.reuse import CacheUse
from hiserve.worker.budget import Share, share_of_chunks
from hiserve.worker.cache_stats import CacheCounts
from hiserve.worker.columns import Columns
from hiserve.worker.costs import Costs
from hiserve.worker.forerunner import find_forerunner, must_wait_for
from hiserve.worker.loading import Loading
from hiserve.worker.prefetch import Prefetches
from hiserve.worker.stops import Stops
from hiserve.worker.tables import PageTables
from hiserve.worker.waiting import Request, WaitingQueue


class Admitter:
    """Admits requests in the order in which they wait.

    Args:
        waiting: Requests without a row.
        cache: Pages and prefixes.
        rows: The planner's rows.
        tables: Gives them pages.
        loading: Orders loads from the host.
        prefetches: Knows who waits for the store, and what came from it.
        stops: Is told what ends the reply of a new row.
        costs: Says whether a load is worth it.
        counts: Is told what requests found.
        max_len: Longest prompt plus output, in tokens.

    Attributes:
        counters: Prompt tokens, and those of them that came from the cache, by the names of ``WorkerStats``.
    """

    def __init__(
        self,
        *,
        waiting: WaitingQueue,
        cache: CacheManager,
        rows: Columns,
        tables: PageTables,
        loading: Loading,
        prefetches: Prefetches,
        stops: Stops,
        costs: Costs,
        counts: CacheCounts,
        max_len: int,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._tables = tables
        self._loading = loading
        self._prefetches = prefetches
        self._stops = stops
        self._costs = costs
        self._counts = counts
        self._max_len = max_len
        self._waiting = waiting
        self.counters = {"prompt_tokens": 0, "cached_tokens": 0}

    def plan(self, budget: int, num_to_score: int) -> tuple[list[RowAdmit], NDArray[np.int64], Share]:
        """Admits requests while rows, pages and budget last.

        Args:
            budget: Tokens of the step.
            num_to_score: Of them, those of prompts that may be scored.

        Returns:
            Who was admitted; those of them that start now, and their chunks. The others wait for loads.
        """
        admit: list[RowAdmit] = []
        chunks: list[tuple[int, int, bool, int]] = []
        for request in self._waiting:
            if budget <= 0 or not self._rows.has_free_row:
                break
            if request.sampling.prompt_logprobs is not None and num_to_score <= 0:
                break
            if must_wait_for(request.forerunner, self._rows) or self._prefetches.is_awaited(request):
                continue
            row = self._admit(request)
            if row is None:
                if request.forerunner is not None:
                    continue
                break
            self._waiting.remove(request)
            self._prefetches.forget(request.uid)
            num_computed = int(self._rows.computed[row])
            admit.append(request.to_row(row, num_computed))
            if self._loading.watch(row):
                continue
            chunk = min(request.tokens.size - num_computed, budget)
            scored = int(self._rows.to_score(np.array([row]))[0])
            if scored > num_to_score:
                chunk = min(chunk, num_to_score)
            scored = min(scored, chunk)
            num_to_score -= scored
            fits = self._tables.grow(np.array([row]), np.array([chunk], dtype=np.int32))
            assert fits, f"request {request.uid} was admitted without pages for {chunk} tokens"
            budget -= chunk
            chunks.append((row, chunk, num_computed + chunk == request.tokens.size, scored))
        return admit, *share_of_chunks(chunks)

    def _admit(self, request: Request) -> int | None:
        """Gives a request a row, if its whole prompt will fit beside what was promised to others.

        Returns:
            The row, or None: it waits for pages or a place among the loads, or (``forerunner`` is set) for another row.
        """
        cache = self._cache
        match = cache.match(request.tenant, request.prefix_key)
        num_host = self._num_to_load(match)
        num_cached = match.num_tokens + num_host
        request.forerunner = find_forerunner(request, num_cached, self._rows, cache.page_size)
        if request.forerunner is not None or (num_host and not self._loading.has_room):
            return None
        with cache.lock(match, num_host, request.priority, request.account) as receipt:
            need = int(self._rows.num_pages_for(np.array(request.tokens.size))) - receipt.pages.size
            if need > cache.pages.num_free + cache.num_evictable - self._rows.num_promised_pages():
                return None
            if receipt.host_pages.size:
                self._loading.load(receipt)
            if num_host < match.num_host_tokens:
                self._counts.left((match.num_host_tokens - num_host) // cache.page_size)
                self._costs.leave()
            if not request.was_admitted:
                self._note_use(request, match.num_tokens, num_host)
            output = request.sampling.max_tokens or self._max_len
            row = self._rows.open(request, receipt.keep(), min(request.num_prompt + output, self._max_len))
            self._stops.set(row, request.sampling)
        prefix = receipt.pages
        self._tables.write(np.full(prefix.size, row), np.arange(prefix.size), prefix)
        return row

    def _num_to_load(self, match: Match) -> int:
        """Returns how many of a match's host tokens to load: all, or none where computing them is faster."""
        num_before = self._loading.num_pages_to_load * self._cache.page_size
        is_worth = self._costs.is_worth_loading(match.num_host_tokens, num_before)
        return match.num_host_tokens if is_worth else 0

    def _note_use(self, request: Request, num_device: int, num_host: int) -> None:
        """Records what the first admission of a request found, and why no more."""
        num_cached = num_device + num_host
        is_in_store = self._prefetches.may_have_more(request.uid, num_cached)
        miss = self._cache.explain(request.tenant, request.prefix_key, num_cached, is_in_store=is_in_store)
        request.was_admitted = True
        num_stored = min(num_host, self._prefetches.num_stored_tokens(request.uid))
        request.cached = CacheUse(num_device, num_host - num_stored, num_stored, miss.reason, miss.num_tokens)
        request.source = request.cached.source
        self.counters["prompt_tokens"] += request.num_prompt
        self.counters["cached_tokens"] += num_cached
        self._counts.admitted(request.cached)
