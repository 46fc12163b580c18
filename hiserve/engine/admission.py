"""Gives waiting requests rows: matches their prefix, loads or computes it, and checks that the rest fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import Match, PrefixCache
from hiserve.core.plan import RowAdmit
from hiserve.core.usage import CacheUse
from hiserve.engine.budget import Allocation, allocation_of_chunks
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.grammars import GrammarRows
from hiserve.engine.host_loads import HostLoads, LoadCostModel
from hiserve.engine.queue import InFlightPrefix, Request, WaitingQueue
from hiserve.engine.rows import RowState
from hiserve.engine.store_prefetch import StorePrefetcher
from hiserve.ipc.updates import RequestFacts


class Admission:
    """Admits requests in the order in which they wait."""

    def __init__(
        self,
        *,
        waiting: WaitingQueue,
        cache: PrefixCache,
        rows: RowState,
        host_loads: HostLoads,
        prefetcher: StorePrefetcher,
        costs: LoadCostModel,
        cache_counters: CacheCounters,
        grammars: GrammarRows,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._host_loads = host_loads
        self._prefetcher = prefetcher
        self._costs = costs
        self._cache_counters = cache_counters
        self._grammars = grammars
        self._waiting = waiting
        # Prompt tokens, and those of them that came from the cache, by the names of ``WorkerStats``.
        self.counters = {"prompt_tokens": 0, "cached_tokens": 0}

    def plan(self, budget: int, num_to_score: int) -> tuple[list[RowAdmit], NDArray[np.int64], Allocation]:
        """Admits requests while rows, pages and budget last.

        Args:
            budget: Tokens of the step.
            num_to_score: Of them, those of prompts that may be scored.

        Returns:
            The admitted requests; the rows, int64 ``[n]``, that start now, and their chunks. The other rows wait for loads.
        """
        admit: list[RowAdmit] = []
        chunks: list[tuple[int, int, bool, int]] = []
        for request in self._waiting:
            if budget <= 0 or not self._rows.has_free_row:
                break
            if request.sampling.prompt_logprobs is not None and num_to_score <= 0:
                break
            if must_wait_for(request.in_flight_prefix, self._rows) or self._prefetcher.is_awaited(request):
                continue
            if self._grammars.is_awaited(request):
                continue
            row = self._admit(request)
            if row is None:
                if request.in_flight_prefix is not None:
                    continue
                break
            self._waiting.remove(request)
            self._prefetcher.drop(request.uid)
            self._grammars.admit(row, request)
            num_computed = int(self._rows.computed[row])
            tails = self._rows.tails
            admit.append(request.to_row(row, num_computed, 0 if tails is None else tails.start_slot(row)))
            if self._host_loads.track(row):
                continue
            chunk = min(request.tokens.size - num_computed, budget)
            scored = int(self._rows.num_to_score(np.array([row]))[0])
            if scored > num_to_score:
                chunk = min(chunk, num_to_score)
            scored = min(scored, chunk)
            num_to_score -= scored
            fits = self._rows.grow(np.array([row]), np.array([chunk], dtype=np.int32))
            assert fits, f"request {request.uid} was admitted without pages for {chunk} tokens"
            budget -= chunk
            chunks.append((row, chunk, num_computed + chunk == request.tokens.size, scored))
        return admit, *allocation_of_chunks(chunks)

    def _admit(self, request: Request) -> int | None:
        """Gives a request a row, if its whole prompt fits beside the pages that other rows still need.

        Returns:
            The row; None if it waits for pages, for other loads, or (``in_flight_prefix`` is set) for another row.
        """
        cache, tails, limit = self._cache, self._rows.tails, self._rows.limit_of(request)
        match = cache.match(request.tenant, request.prefix_key)
        num_host = self._num_to_load(match)
        num_cached = match.num_tokens + num_host
        request.in_flight_prefix = find_in_flight_prefix(request, num_cached, self._rows, cache.page_size)
        if request.in_flight_prefix is not None or (num_host and not self._may_load(match)):
            return None
        if tails is not None and not tails.has_room(limit, loads_tail=num_host > 0):
            return None
        with cache.lock(match, num_host, request.priority, request.account) as lock:
            need = int(self._rows.num_pages_for(np.array(request.tokens.size))) - lock.pages.size
            if need > cache.num_available - self._rows.num_promised_pages():
                return None
            if num_host:
                self._host_loads.load(lock)
            if num_host < match.num_host_tokens:
                self._cache_counters.not_loaded(match.num_to_load)
                self._costs.skip_load()
            if not request.was_admitted:
                self._note_use(request, match.num_tokens, num_host)
            return self._rows.admit(request, lock.detach(), match)

    def _num_to_load(self, match: Match) -> int:
        """Returns how many of a match's host tokens to load: all, or none where computing them is faster."""
        page_size = self._cache.page_size
        num_before = self._host_loads.num_pages_to_load * page_size
        is_worth = self._costs.is_worth_loading(match.num_host_tokens, num_before, match.num_to_load * page_size)
        return match.num_host_tokens if is_worth else 0

    def _may_load(self, match: Match) -> bool:
        """Whether a load may begin now, with a slot for its snapshot: a transfer, or a few steps of a row, hold each that is in use."""
        tails = self._cache.tails
        return self._host_loads.has_room and (tails is None or tails.has_slot_for(match.host_tail))

    def _note_use(self, request: Request, num_device: int, num_host: int) -> None:
        """Records the cached tokens of a request at its first admission, and the reason for the miss after them."""
        num_cached = num_device + num_host
        is_in_store = self._prefetcher.may_have_more(request.uid, num_cached)
        miss = self._cache.explain(request.tenant, request.prefix_key, num_cached, is_in_store=is_in_store)
        request.was_admitted = True
        num_stored = min(num_host, self._prefetcher.num_stored_tokens(request.uid))
        cached = CacheUse(num_device, num_host - num_stored, num_stored, miss.reason, miss.num_tokens)
        request.note(RequestFacts(cached=cached))
        request.source = cached.source
        self.counters["prompt_tokens"] += request.num_prompt
        self.counters["cached_tokens"] += min(num_cached, request.num_prompt)
        self._cache_counters.admitted(cached)


def find_in_flight_prefix(request: Request, num_matched: int, state: RowState, page_size: int) -> InFlightPrefix | None:
    """Finds a row that computes more whole pages of this prompt than the ``num_matched`` tokens that the cache holds.

    Waiting for it is cheaper if it has no more tokens to compute before that point than the request.
    """
    rows = state.active
    usable = request.num_reusable
    for row in rows[state.settled[rows] < state.known[rows] - 1].tolist():
        if state.request(row).tenant != request.tenant:
            continue
        length = min(int(state.known[row]), usable)
        differs = state.tokens[row, :length] != request.tokens[:length]
        shared = int(differs.argmax()) if differs.any() else length
        num_pages = shared // page_size
        if num_pages * page_size > num_matched and state.settled[row] >= num_matched:
            if state.tails is not None and not state.tails.want(
                row, num_pages * page_size, int(state.computed[row]), int(state.num_published[row])
            ):  # it has passed the boundary, where it has left no tail
                continue
            return InFlightPrefix(row, int(state.generation[row]), num_pages)
    return None


def must_wait_for(other: InFlightPrefix | None, state: RowState) -> bool:
    """Whether the row still has the same request, and has not published the wanted pages."""
    return (
        other is not None
        and state.generation[other.row] == other.generation
        and bool(state.num_published[other.row] < other.num_pages)
    )
