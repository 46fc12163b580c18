"""Counts of the cache for observers of the worker: hits and misses of requests, and the ends of copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, PrefixCacheStats
from hiserve.core.transfers import DEVICE_KINDS, CopyAck, CopyKind, PageCopy
from hiserve.core.usage import CacheUse
from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats

PLACE_LOST = "place_lost"  # all bytes arrived, but their pages had left the cache
HOST_FULL = "host_full"
STORE_BEHIND = "store_behind"


@dataclass(slots=True)
class _Ended:
    """Copies of one kind that have ended: pages that arrived, and those that did not, by reason."""

    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    unfulfilled: Counter[str] = field(default_factory=Counter)


class CacheCounters:
    """Adds the counts of the planner to those of the index: requests, reasons, bytes."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._ended = {kind: _Ended() for kind in CopyKind}
        self._num_not_loaded = 0
        self._not_fetched: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._cached = dict.fromkeys(("device", "host", "store"), 0)

    def admitted(self, use: CacheUse) -> None:
        """Counts a request at its first admission."""
        for tier in self._cached:
            self._cached[tier] += getattr(use, tier)
        if use.miss:
            self._misses[use.miss] += 1

    def not_loaded(self, num_pages: int) -> None:
        """Counts pages of the host that a row computes, because that is faster than loading them."""
        self._num_not_loaded += num_pages

    def not_fetched(self, num_pages: int, reason: str) -> None:
        """Counts pages that a store has, or may have, of which no prefetch was begun."""
        self._not_fetched[reason] += num_pages

    def ended(self, copy: PageCopy, ack: CopyAck) -> None:
        """Counts a copy that has ended; the index has completed it."""
        ended, num_arrived = self._ended[copy.kind], ack.num_pages
        if copy.kind in DEVICE_KINDS:
            num_arrived = self._cache.num_arrived[copy.kind] - ended.num_pages
        elif copy.kind is CopyKind.UPLOAD and ack.is_ok:
            num_arrived = copy.num_host_pages
        ended.num_pages += num_arrived
        ended.num_bytes += ack.num_bytes
        ended.seconds += ack.seconds
        num_lost = copy.num_host_pages - num_arrived
        if num_lost:
            ended.unfulfilled[ack.reason or PLACE_LOST] += num_lost

    def stats(self, store: StoreStats | None = None) -> CacheStats:
        """Returns all counts until now."""
        index = self._cache.stats()
        prefetches = self._ended[CopyKind.PREFETCH]
        not_fetched = Counter(index.not_prefetched) + self._not_fetched
        return CacheStats(
            device=index.device,
            host=index.host,
            store=store,
            loads=self._copies(index, CopyKind.LOAD, MissReason.NOT_WORTH_LOADING, self._num_not_loaded),
            offloads=self._copies(index, CopyKind.OFFLOAD, HOST_FULL, index.num_without_room),
            prefetches=CopyStats(
                num_wanted=index.num_prefetches_wanted + self._not_fetched.total(),
                num_fulfilled=index.num_prefetched,
                num_in_flight=index.num_in_flight[CopyKind.PREFETCH],
                unfulfilled=dict(not_fetched),
                num_bytes=prefetches.num_bytes,
                seconds=prefetches.seconds,
            ),
            uploads=self._copies(index, CopyKind.UPLOAD, STORE_BEHIND, index.num_not_uploaded),
            cached_tokens=self._cached.copy(),
            misses=dict(self._misses),
            num_unbacked=index.num_unbacked,
            num_retained=index.num_retained,
            num_not_retained=index.num_not_retained,
            windows=index.windows,
            snapshots=index.snapshots,
        )

    def _copies(self, index: PrefixCacheStats, kind: CopyKind, refusal: str, num_refused: int) -> CopyStats:
        """Returns the counts of one kind, of which the index refused some pages before they were begun."""
        ended = self._ended[kind]
        unfulfilled = dict(ended.unfulfilled)
        if num_refused:
            unfulfilled[refusal] = num_refused
        return CopyStats(
            num_wanted=index.num_begun[kind] + num_refused,
            num_fulfilled=ended.num_pages,
            num_in_flight=index.num_in_flight[kind],
            unfulfilled=unfulfilled,
            num_bytes=ended.num_bytes,
            seconds=ended.seconds,
        )
