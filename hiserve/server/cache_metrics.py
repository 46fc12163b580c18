"""The cache in Prometheus' words: pages by tier, and copies between tiers, of which none is lost count of.

At rest, ``cache_wanted_tokens == cache_fulfilled_tokens + sum over reasons of cache_unfulfilled_tokens`` for each kind
of copy; otherwise what is missing is ``cache_in_flight_tokens``. Everything is in tokens, so that hits compare with prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats, TierStats

# Value of the ``copy`` label -> its field in the stats.
COPIES = {"load": "loads", "store": "stores", "prefetch": "prefetches", "upload": "uploads"}
TIERS = ("device", "host")
# Value of the ``result`` label -> its field in the stats of the store.
STORE_RESULTS = {
    "hit": "num_hits",
    "miss": "num_misses",
    "stored": "num_stored",
    "refused": "num_refused",
    "corrupt": "num_corrupt",
}


class CacheMetrics:
    """Counts what the caches of all workers did, and shows what they hold.

    Args:
        registry: Where the metrics go.
        model_name: Value of the ``model_name`` label.
        page_size: Tokens per page.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, page_size: int) -> None:
        self._registry = registry
        self._model_name = model_name
        self._page_size = page_size
        self._pages = self._gauge("cache_pages", "Pages of a tier: free, evictable or held.", "tier", "state")
        self._host_used = self._gauge("hicache_host_used_tokens", "Tokens in the host tier.")
        self._host_total = self._gauge("hicache_host_total_tokens", "Tokens that the host tier has room for now.")
        self._evicted = self._counter("evicted_tokens", "Tokens evicted, by the tier they left.", "tier")
        self._unbacked = self._counter(
            "cache_unbacked_tokens", "Tokens evicted from the device that were nowhere else."
        )
        self._wanted = self._counter(
            "cache_wanted_tokens", "Tokens that a copy was wanted for: hits, or to keep.", "copy"
        )
        self._fulfilled = self._counter("cache_fulfilled_tokens", "Of them, those that arrived.", "copy")
        self._unfulfilled = self._counter(
            "cache_unfulfilled_tokens", "Those that did not, by reason.", "copy", "reason"
        )
        self._in_flight = self._gauge("cache_in_flight_tokens", "Those on their way.", "copy")
        self._bytes = self._counter("kv_offload_total_bytes", "Bytes copied.", "copy")
        self._seconds = self._counter("kv_offload_total_time", "Seconds spent on it.", "copy")
        self._misses = self._counter("cache_misses", "Requests, by why no more of the prompt was cached.", "reason")
        self._store_pages = self._gauge("store_pages", "Pages in the store, which workers may share.")
        self._store_bytes = self._gauge("store_bytes", "Bytes that they take.")
        self._store_tokens = self._counter("store_tokens", "Tokens asked of the store or given to it.", "result")
        self._store_errors = self._counter("store_errors", "Reads, writes and removals of the store that failed.")
        for result in STORE_RESULTS:
            self._store_tokens.labels(model_name, result)
        self._evicted.labels(model_name, "store")
        for copy in COPIES:
            for counter in (self._wanted, self._fulfilled, self._bytes, self._seconds):
                counter.labels(model_name, copy)
        for each in (self._host_used, self._host_total, self._unbacked, self._store_pages, self._store_bytes):
            each.labels(model_name)
        self._store_errors.labels(model_name)

    def show(self, caches: Sequence[CacheStats]) -> None:
        """Takes over the gauges of all workers."""
        for tier in TIERS:
            pages: list[TierStats] = [getattr(cache, tier) for cache in caches]
            num_free, num_evictable = sum(one.num_free for one in pages), sum(one.num_evictable for one in pages)
            num_pages = sum(one.num_pages for one in pages)
            states = {"free": num_free, "evictable": num_evictable, "held": num_pages - num_free - num_evictable}
            for state, count in states.items():
                self._pages.labels(self._model_name, tier, state).set(count)
            if tier == "host":
                self._host_used.labels(self._model_name).set((num_pages - num_free) * self._page_size)
                self._host_total.labels(self._model_name).set(num_pages * self._page_size)
        for copy, kind in COPIES.items():
            num_pages = sum(getattr(cache, kind).num_in_flight for cache in caches)
            self._in_flight.labels(self._model_name, copy).set(num_pages * self._page_size)
        # All workers have the same store; each knows of some of what the others wrote.
        stores = [cache.store or StoreStats() for cache in caches]
        self._store_pages.labels(self._model_name).set(max((store.num_pages for store in stores), default=0))
        self._store_bytes.labels(self._model_name).set(max((store.num_bytes for store in stores), default=0))

    def count(self, before: CacheStats, now: CacheStats) -> None:
        """Adds what one worker did between two looks."""
        name, tokens = self._model_name, self._page_size
        for tier in TIERS:
            _add(
                self._evicted.labels(name, tier),
                getattr(before, tier).num_evicted,
                getattr(now, tier).num_evicted,
                tokens,
            )
        _add(self._unbacked.labels(name), before.num_unbacked, now.num_unbacked, tokens)
        for reason, old, new in _increases(before.misses, now.misses):
            _add(self._misses.labels(name, reason), old, new)
        for copy, kind in COPIES.items():
            old, new = getattr(before, kind), getattr(now, kind)
            self._count_copies(copy, old, new)
        if now.store is not None:
            self._count_store(before.store or StoreStats(), now.store)

    def _count_copies(self, copy: str, before: CopyStats, now: CopyStats) -> None:
        name, tokens = self._model_name, self._page_size
        _add(self._wanted.labels(name, copy), before.num_wanted, now.num_wanted, tokens)
        _add(self._fulfilled.labels(name, copy), before.num_fulfilled, now.num_fulfilled, tokens)
        _add(self._bytes.labels(name, copy), before.num_bytes, now.num_bytes)
        _add(self._seconds.labels(name, copy), before.seconds, now.seconds)
        for reason, old, new in _increases(before.unfulfilled, now.unfulfilled):
            _add(self._unfulfilled.labels(name, copy, reason), old, new, tokens)

    def _count_store(self, before: StoreStats, now: StoreStats) -> None:
        name, tokens = self._model_name, self._page_size
        for result, field in STORE_RESULTS.items():
            _add(self._store_tokens.labels(name, result), getattr(before, field), getattr(now, field), tokens)
        _add(self._evicted.labels(name, "store"), before.num_evicted, now.num_evicted, tokens)
        _add(self._store_errors.labels(name), before.num_errors, now.num_errors)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"hiserve:{name}", help_text, ("model_name", *labels), registry=self._registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"hiserve:{name}", help_text, ("model_name", *labels), registry=self._registry)


def _increases(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yields each reason with its count then and now."""
    for reason, count in now.items():
        yield reason, before.get(reason, 0), count


def _add(counter: Counter, before: float, now: float, scale: int = 1) -> None:
    """Adds an increase; what fell counts as standing still, for Prometheus' counters cannot."""
    counter.inc(max(0, now - before) * scale)
