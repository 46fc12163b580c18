"""What the cache did for requests and how its copies ended, counted for whoever watches the worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hiserve.cache.index.miss_reasons import MissReason
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.index.tier import TierPages
from hiserve.cache.index.transfer_ops import TransferKind
from hiserve.core.cache_usage import CacheUse
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats, TierStats

PLACE_LOST = "place_lost"  # all bytes arrived, but what they belonged to had left the cache
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
    """Adds to what the index counts what only the planner sees: requests, reasons, bytes.

    Args:
        cache: Counts pages and copies.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._loads, self._stores, self._prefetches, self._uploads = (_Ended() for _ in CopyKind)
        self._num_left = 0
        self._misses: Counter[str] = Counter()
        self._cached = dict.fromkeys(("device", "host", "store"), 0)

    def admitted(self, use: CacheUse) -> None:
        """A request was admitted for the first time."""
        for tier in self._cached:
            self._cached[tier] += getattr(use, tier)
        if use.miss:
            self._misses[use.miss] += 1

    def left(self, num_pages: int) -> None:
        """A row was given without pages that the host has: computing them is faster than loading them."""
        self._num_left += num_pages

    def ended(self, copy: PageCopy, ack: CopyAck) -> None:
        """A copy has ended, and the index was told."""
        transfers = self._cache.transfers
        match copy.kind:
            case CopyKind.LOAD:
                _end(self._loads, copy, ack, transfers.num_loaded - self._loads.num_pages)
            case CopyKind.OFFLOAD:
                _end(self._stores, copy, ack, transfers.num_offloaded - self._stores.num_pages)
            case CopyKind.PREFETCH:
                _end(self._prefetches, copy, ack, ack.num_pages)
            case CopyKind.UPLOAD:
                _end(self._uploads, copy, ack, copy.host_pages.size if ack.is_ok else ack.num_pages)

    def stats(self, store: StoreStats | None = None) -> CacheStats:
        """Returns everything as of now.

        Args:
            store: What the store beyond the host counted, if there is one.
        """
        transfers, store_sync = self._cache.transfers, self._cache.store_sync
        return CacheStats(
            device=_tier(self._cache.device),
            host=_tier(self._cache.host),
            store=store,
            loads=self._copies(TransferKind.LOAD, self._loads, MissReason.NOT_WORTH_LOADING, self._num_left),
            stores=self._copies(TransferKind.OFFLOAD, self._stores, HOST_FULL, transfers.num_without_room),
            prefetches=CopyStats(
                num_wanted=store_sync.num_wanted,
                num_fulfilled=store_sync.num_prefetched,
                num_in_flight=self._cache.ops.num_in_flight[TransferKind.PREFETCH],
                unfulfilled={reason: count for reason, count in store_sync.unfulfilled.items() if count},
                num_bytes=self._prefetches.num_bytes,
                seconds=self._prefetches.seconds,
            ),
            uploads=self._copies(
                TransferKind.UPLOAD, self._uploads, STORE_BEHIND, self._cache.uploads.num_not_uploaded
            ),
            cached_tokens=self._cached.copy(),
            misses=dict(self._misses),
            num_unbacked=self._cache.tiers.num_unbacked,
        )

    def _copies(self, kind: TransferKind, ended: _Ended, refusal: str, num_refused: int) -> CopyStats:
        """Returns the counts of one kind, of which the index refused some pages before they were begun."""
        unfulfilled = dict(ended.unfulfilled)
        if num_refused:
            unfulfilled[refusal] = num_refused
        return CopyStats(
            num_wanted=self._cache.ops.num_begun[kind] + num_refused,
            num_fulfilled=ended.num_pages,
            num_in_flight=self._cache.ops.num_in_flight[kind],
            unfulfilled=unfulfilled,
            num_bytes=ended.num_bytes,
            seconds=ended.seconds,
        )


def _end(ended: _Ended, copy: PageCopy, ack: CopyAck, num_arrived: int) -> None:
    ended.num_pages += num_arrived
    ended.num_bytes += ack.num_bytes
    ended.seconds += ack.seconds
    num_lost = copy.host_pages.size - num_arrived
    if num_lost:
        ended.unfulfilled[ack.reason or PLACE_LOST] += num_lost


def _tier(tier: TierPages) -> TierStats:
    return TierStats(
        num_pages=tier.pages.num_ready - 1,
        num_free=tier.pages.num_free,
        num_evictable=tier.num_evictable,
        num_evicted=tier.num_evicted,
    )
