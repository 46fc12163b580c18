"""Counts of the cache: no copy is lost count of, whatever happens to it, and every reason has its count."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock, RunOp, Tier
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from hiserve.core.usage import CacheUse
from hiserve.engine.cache_counters import CacheCounters
from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats, TierStats
from tests.helpers.engines import echo_engine
from tests.helpers.tiers import backed, demoted, load, new_cache, prompt, serve, squeeze, take

PAGE_BYTES = 100
KINDS = ("loads", "offloads", "prefetches", "uploads")


def copies_of(stats: CacheStats) -> dict[str, CopyStats]:
    return {kind: getattr(stats, kind) for kind in KINDS}


class Traffic:
    """A cache under random traffic: requests, copies that end in any order and way, evictions and flushes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.cache = new_cache(24, 20, max_upload_pages=4)
        self.cache_counters = CacheCounters(self.cache)
        self.open: dict[int, PageCopy] = {}
        self.stages: set[int] = set()
        self.receipts: list[PrefixLock] = []
        self.pages_open = dict.fromkeys(KINDS, 0)

    def step(self) -> None:
        weights = {self._request: 16, self._end: 20, self._store: 12, self._release: 12, self._prefetch: 4}
        weights |= {self._squeeze: 8, self._flush: 1, self._upload: 6}
        (action,) = self.random.choices(list(weights), list(weights.values()))
        action()
        self.check()

    def finish(self) -> None:
        while self.open:
            self._end()
            self._upload()
            self.check()

    def check(self) -> None:
        told = copies_of(self.cache_counters.stats())
        for kind, stats in told.items():
            lost = sum(stats.unfulfilled.values())
            assert stats.num_wanted == stats.num_fulfilled + lost + stats.num_in_flight, (kind, stats)
            assert all(count > 0 for count in stats.unfulfilled.values()), (kind, stats)
        in_flight = dict.fromkeys(KINDS, 0)
        for copy in self.open.values():
            in_flight[KINDS[copy.kind]] += copy.host_pages.size if copy.op not in self.stages else 0
        waiting = sum(run.run.pages.size for run in self.cache.uploads._uploads)
        in_flight["uploads"] += waiting
        assert in_flight == {kind: stats.num_in_flight for kind, stats in told.items()}

    def _prompt(self) -> tuple[int, ...]:
        """A path in a narrow tree, so that requests meet."""
        return tuple(self.random.randrange(2) + 2 * depth for depth in range(self.random.randint(1, 6)))

    def _request(self) -> None:
        cache, pages = self.cache, self._prompt()
        match = cache.match(b"tenant", prompt(*pages))
        wanted = match.num_host_tokens if self.random.random() < 0.8 else 0
        left = (match.num_host_tokens - wanted) // cache.page_size
        if cache.device.pages.num_free + cache.device.num_evictable < 2 * len(pages):
            return
        lock = cache.lock(match, wanted)
        self.cache_counters.not_loaded(left)
        if lock.host_pages.size:
            self._begin(cache.begin_load(lock, take(cache, lock.host_pages.size)))
        self.receipts.append(lock)
        if not lock.ops and not left:
            new = pages[lock.pages.size :]
            cache.insert(lock, b"".join(prompt(page)[:8] for page in new), take(cache, len(new)))

    def _begin(self, copy: PageCopy) -> None:
        self.open[copy.op] = copy

    def _begin_run(self, kind: CopyKind, run: RunOp | None) -> None:
        if run is not None:
            self._begin(PageCopy(run.op, kind, np.empty(0, np.int32), run.run.pages, 0, run.run))

    def _store(self) -> None:
        for copy in self.cache.begin_offloads(self.random.randint(1, 8)):
            self._begin(copy)

    def _upload(self) -> None:
        uploads, stages = self.cache.store.begin_uploads()
        for run in uploads:
            self._begin_run(CopyKind.UPLOAD, run)
        for stage in stages:
            self._begin(stage)
            self.stages.add(stage.op)

    def _prefetch(self) -> None:
        self._begin_run(CopyKind.PREFETCH, self.cache.store.begin_prefetch(b"tenant", prompt(*self._prompt()), 4))

    def _end(self) -> None:
        if not self.open:
            return
        copy = self.open.pop(self.random.choice(list(self.open)))
        size = copy.host_pages.size
        reason = self.random.choice(["", "", "", "broken", "checksum"])
        arrived = size if not reason else self.random.randint(0, size)
        ack = CopyAck(copy.op, reason, PAGE_BYTES * (size if not reason else 0), 0.5, arrived)
        if copy.op in self.stages:
            self.cache.uploads.end_stage(copy.op, ok=ack.is_ok)
            return
        match copy.kind:
            case CopyKind.PREFETCH:
                self.cache.store_sync.end_prefetch(copy.op, arrived)
            case CopyKind.UPLOAD:
                self.cache.uploads.end_upload(copy.op)
            case _:
                for lock in self.cache.complete(copy.op, ok=ack.is_ok):
                    self.receipts.remove(lock)
                    self.cache.release(lock)
        self.cache_counters.ended(copy, ack)

    def _release(self) -> None:
        if self.receipts:
            self.cache.release(self.receipts.pop(self.random.randrange(len(self.receipts))))

    def _squeeze(self) -> None:
        squeeze(self.cache)

    def _flush(self) -> None:
        self.cache.flush(self.random.choice([Tier.DEVICE, Tier.HOST, None]))


def test_every_wanted_page_is_fulfilled_unfulfilled_or_in_flight() -> None:
    reasons: set[tuple[str, str]] = set()
    fulfilled = dict.fromkeys(KINDS, 0)
    for seed in range(12):
        print(f"seed {seed}")
        traffic = Traffic(seed)
        for _ in range(500):
            traffic.step()
        traffic.finish()
        for kind, stats in copies_of(traffic.cache_counters.stats()).items():
            reasons |= {(kind, reason) for reason in stats.unfulfilled}
            fulfilled[kind] += stats.num_fulfilled
    assert min(fulfilled.values()) > 50, fulfilled
    expected = {("loads", reason) for reason in ("not_worth_loading", "broken", "checksum", "place_lost")}
    expected |= {("offloads", reason) for reason in ("broken", "place_lost")}
    expected |= {("prefetches", reason) for reason in ("not_delivered", "not_backed", "in_flight")}
    expected |= {("uploads", reason) for reason in ("store_behind", "broken")}
    assert expected - reasons == set()


def test_tiers_tell_their_pages() -> None:
    cache = new_cache(8, 20)
    demoted(cache, 1, 2, 3)
    lock = serve(cache, 4, 5)
    stats = CacheCounters(cache).stats()
    assert stats.device == TierStats(num_pages=7, num_free=5, num_evictable=0, num_evicted=3)
    assert stats.host == TierStats(num_pages=19, num_free=16, num_evictable=3, num_evicted=0)
    assert stats.num_unbacked == 0
    cache.release(lock)
    squeeze(cache)
    assert CacheCounters(cache).stats().num_unbacked == 2


def test_a_cache_without_a_host_tier_has_no_host_pages() -> None:
    cache = new_cache(8, 0)
    cache.release(serve(cache, 1, 2))
    stats = CacheCounters(cache).stats()
    assert stats.host == TierStats()
    assert stats.offloads == CopyStats()


def test_the_store_is_told_as_the_executor_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, executor, _ = echo_engine(num_pages=30)
    assert engine.stats().cache.store is None
    monkeypatch.setattr(executor, "store_stats", lambda: StoreStats(num_pages=5, num_errors=1))
    assert engine.stats().cache.store == StoreStats(num_pages=5, num_errors=1)


def test_bytes_and_seconds_add_up_by_kind() -> None:
    cache = new_cache()
    cache_counters = CacheCounters(cache)
    demoted(cache, 1, 2, 3)
    for _ in range(2):
        lock, copy = load(cache, 1, 2, 3)
        cache.complete(copy.op, ok=True)
        cache_counters.ended(copy, CopyAck(copy.op, "", 3 * PAGE_BYTES, 0.25))
        cache.release(lock)
        squeeze(cache)
    stats = cache_counters.stats()
    assert (stats.loads.num_fulfilled, stats.loads.num_bytes, stats.loads.seconds) == (6, 6 * PAGE_BYTES, 0.5)
    assert stats.prefetches == stats.uploads == CopyStats()


def test_a_load_whose_place_is_gone_when_it_arrives_is_no_fulfilled_hit() -> None:
    cache = new_cache()
    cache_counters = CacheCounters(cache)
    demoted(cache, 1, 2)
    lock, copy = load(cache, 1, 2)
    cache.release(lock)
    cache.flush()
    assert cache.complete(copy.op, ok=True) == []
    cache_counters.ended(copy, CopyAck(copy.op, "", 2 * PAGE_BYTES))
    assert cache_counters.stats().loads.unfulfilled == {"place_lost": 2}


def test_requests_are_counted_by_tier_and_by_the_reason_of_their_miss() -> None:
    cache_counters = CacheCounters(new_cache())
    for use in (
        CacheUse(16, 32, 0, "cold", 48),
        CacheUse(0, 16, 64, "cold"),
        CacheUse(16, 0, 0, "evicted", 16),
        CacheUse(),
    ):
        cache_counters.admitted(use)
    stats = cache_counters.stats()
    assert stats.cached_tokens == {"device": 32, "host": 48, "store": 64}
    assert stats.misses == {"cold": 2, "evicted": 1}


@pytest.mark.parametrize("kind", ["misses", "cached_tokens"])
def test_what_was_told_does_not_change_afterwards(kind: str) -> None:
    cache_counters = CacheCounters(new_cache())
    told = cache_counters.stats()
    before = dict(getattr(told, kind))
    cache_counters.admitted(CacheUse(device=16, miss="cold"))
    assert getattr(told, kind) == before


def test_a_prefix_on_both_tiers_counts_once_on_each() -> None:
    cache: PrefixCache = new_cache()
    cache_counters = CacheCounters(cache)
    backed(cache, 1, 2)
    stats = cache_counters.stats()
    assert (stats.device.num_evictable, stats.host.num_free) == (2, 29)
