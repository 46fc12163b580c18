"""A planner's view of a store that answers when a test says so."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache, TailSizes
from hiserve.cache.index.tail_pool import NO_TAILS
from hiserve.config.caching import StorePrefetch
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck, PageCopy
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.queue import Request
from hiserve.engine.store_prefetch import StorePrefetcher
from tests.helpers.tiers import PAGE_SIZE, TENANT, is_whole, new_cache

TIMEOUT_S = 2.0
NOT_DELIVERED = "not_delivered"


class Desk:
    """A planner's view of one cache, a store that answers when told to, and a clock that a test sets."""

    def __init__(
        self, policy: StorePrefetch | None = "timeout", num_host_pages: int = 600, tails: TailSizes = NO_TAILS
    ) -> None:
        self.now_s = 100.0
        self.cache: PrefixCache = new_cache(600, num_host_pages, max_upload_pages=100, tails=tails)
        self.cache_counters = CacheCounters(self.cache)
        self.costs = LoadCostModel(512, lambda: self.now_s)
        self.prefetcher = StorePrefetcher(
            self.cache, self.cache_counters, self.costs, policy, TIMEOUT_S, lambda: self.now_s
        )
        self.requests: dict[int, Request] = {}
        self.asked: dict[int, int] = {}
        self.copies: dict[int, PageCopy] = {}

    def add(self, uid: int, *pages: int) -> Request:
        """A request of whole pages and one token more."""
        tokens: Int32Array = np.repeat(np.array([*pages, 0], dtype=np.int32), PAGE_SIZE)[: len(pages) * PAGE_SIZE + 1]
        request = Request(uid, tokens, tokens.size, SamplingParams(seed=0), TENANT, 0)
        self.requests[uid] = request
        self.prefetcher.add(request)
        return request

    def send(self) -> None:
        """What the next plan takes along."""
        lookups, copies = self.prefetcher.take()
        self.asked |= {lookup.uid: len(lookup.digests) for lookup in lookups}
        self.copies |= {copy.op: copy for copy in copies}

    def answer(self, uid: int, *ends: int) -> None:
        """What the store has can end after so many pages; 0 is nothing."""
        self.prefetcher.found([(uid, tuple(end for end in ends if end))])

    def end(self, op: int | None = None, num_pages: int | None = None) -> None:
        """Ends the only copy, or one of them; whole unless told otherwise."""
        if op is None:
            (op,) = self.copies
        copy = self.copies.pop(op)
        count = copy.num_host_pages if num_pages is None else num_pages
        reason = "" if count == copy.num_host_pages else NOT_DELIVERED
        assert self.prefetcher.complete([CopyAck(op, reason, num_pages=count)]) == []
        self.cache.take_freed_host_pages()

    def measure(self, *, fetch_s: float, prefill_s: float) -> None:
        """The store brings a page, and the device computes one, in so long."""
        for size in (1, 2, 3, 4, 5):
            self.costs.end_fetch(size * PAGE_SIZE, size * fetch_s)
            self.costs.begin_step(1, size * PAGE_SIZE)
            self.now_s += size * prefill_s
            self.costs.end_step()

    def unfulfilled(self) -> dict[str, int]:
        return self.cache_counters.stats().prefetches.unfulfilled

    def is_awaited(self, uid: int) -> bool:
        return self.prefetcher.is_awaited(self.requests[uid])

    def fetch(self, uid: int, *pages: int) -> None:
        """Takes a request to where its prefix is on its way."""
        self.add(uid, *pages)
        self.send()
        self.answer(uid, len(pages))
        self.send()

    def has_work(self) -> bool:
        return self.prefetcher.has_work

    def check(self) -> None:
        """Everything that was ordered has ended: nothing leaked, and every wanted page is accounted for."""
        assert not self.copies
        stats = self.cache_counters.stats().prefetches
        assert stats.num_in_flight == 0
        assert stats.num_wanted == stats.num_fulfilled + sum(stats.unfulfilled.values())
        assert is_whole(self.cache)
