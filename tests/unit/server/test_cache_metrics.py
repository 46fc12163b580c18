"""The cache in ``/metrics``: pages by tier, copies of which none is lost count of, misses by reason."""

from __future__ import annotations

import msgspec
import pytest

from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats, TierStats, WindowStats
from hiserve.ipc.messages import Status, WorkerFacts, WorkerStats
from hiserve.server.metrics.registry import Metrics
from tests.unit.server.conftest import Server

PAGE = 16
CACHE = CacheStats(
    device=TierStats(num_pages=100, num_free=20, num_evictable=50, num_evicted=7),
    host=TierStats(num_pages=400, num_free=100, num_evictable=299, num_evicted=3),
    store=StoreStats(
        num_pages=30,
        num_bytes=3000,
        num_hits=21,
        num_misses=5,
        num_stored=33,
        num_refused=4,
        num_evicted=2,
        num_corrupt=1,
        num_errors=6,
        last_error="disk full",
    ),
    loads=CopyStats(10, 6, 1, {"checksum": 2, "place_lost": 1}, num_bytes=4096, seconds=0.5),
    offloads=CopyStats(8, 5, 0, {"link_behind": 3}, num_bytes=1024, seconds=0.25),
    prefetches=CopyStats(9, 4, 0, {"host_full": 5}, num_bytes=512, seconds=2.0),
    uploads=CopyStats(3, 3, 0, {}, num_bytes=64, seconds=1.0),
    misses={"cold": 2, "evicted": 1, "no_tail": 6},
    num_unbacked=4,
    windows=WindowStats(50, 9, 30, 12, num_tails=11, num_evicted_tails=5),
)


async def test_pages_of_each_tier_are_free_evictable_or_held(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=CACHE)
    for tier, states in {"device": (20, 50, 30), "host": (100, 299, 1)}.items():
        for state, count in zip(("free", "evictable", "held"), states, strict=True):
            assert await server.metric("hiserve:cache_pages", tier=tier, state=state) == count
    assert await server.metric("hiserve:hicache_host_used_tokens") == 300 * PAGE
    assert await server.metric("hiserve:hicache_host_total_tokens") == 400 * PAGE


async def test_window_pages_and_tails_are_shown(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=CACHE)
    for state, count in {"free": 9, "evictable": 30, "held": 11}.items():
        assert await server.metric("hiserve:cache_window_pages", state=state) == count
    assert await server.metric("hiserve:cache_tails") == 11
    assert await server.metric("hiserve:evicted_tails_total") == 5
    assert await server.metric("hiserve:cache_misses_total", reason="no_tail") == 6


async def test_copies_are_counted_by_kind_and_what_failed_by_reason(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=CACHE)
    kinds = {"load": CACHE.loads, "offload": CACHE.offloads, "prefetch": CACHE.prefetches, "upload": CACHE.uploads}
    for copy, stats in kinds.items():
        assert await server.metric("hiserve:cache_wanted_tokens_total", copy=copy) == stats.num_wanted * PAGE
        assert await server.metric("hiserve:cache_fulfilled_tokens_total", copy=copy) == stats.num_fulfilled * PAGE
        assert await server.metric("hiserve:cache_in_flight_tokens", copy=copy) == stats.num_in_flight * PAGE
        assert await server.metric("hiserve:kv_offload_total_bytes_total", copy=copy) == stats.num_bytes
        assert await server.metric("hiserve:kv_offload_total_time_total", copy=copy) == stats.seconds
        for reason, count in stats.unfulfilled.items():
            name = "hiserve:cache_unfulfilled_tokens_total"
            assert await server.metric(name, copy=copy, reason=reason) == count * PAGE


async def test_what_a_store_holds_and_did_is_shown(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=CACHE)
    assert await server.metric("hiserve:store_pages") == 30
    assert await server.metric("hiserve:store_bytes") == 3000
    for result, count in {"hit": 21, "miss": 5, "stored": 33, "refused": 4, "corrupt": 1}.items():
        assert await server.metric("hiserve:store_tokens_total", result=result) == count * PAGE
    assert await server.metric("hiserve:evicted_tokens_total", tier="store") == 2 * PAGE
    assert await server.metric("hiserve:store_errors_total") == 6


async def test_without_a_store_its_counts_are_zero(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=msgspec.structs.replace(CACHE, store=None))
    assert await server.metric("hiserve:store_pages") == 0
    assert await server.metric("hiserve:store_tokens_total", result="miss") == 0
    assert await server.metric("hiserve:store_errors_total") == 0


def test_workers_share_a_store_but_not_what_they_did_with_it() -> None:
    metrics = Metrics("a", page_size=1, compat="none")
    assert CACHE.store is not None
    larger = msgspec.structs.replace(CACHE, store=msgspec.structs.replace(CACHE.store, num_pages=70, num_hits=1))
    metrics.engine.observe(status((1, CACHE), (1, larger)))
    assert value(metrics, 'hiserve:store_pages{model_name="a"}') == 70
    assert value(metrics, 'hiserve:store_bytes{model_name="a"}') == 3000
    assert value(metrics, 'hiserve:store_tokens_total{model_name="a",result="hit"}') == 22
    metrics.engine.observe(status((1, CACHE), (1, larger)))
    assert value(metrics, 'hiserve:store_tokens_total{model_name="a",result="hit"}') == 22
    metrics.engine.observe(status((2, CACHE), (1, larger)))
    assert value(metrics, 'hiserve:store_tokens_total{model_name="a",result="hit"}') == 43


async def test_evictions_and_misses_are_counted(server: Server) -> None:
    server.engine.stats = WorkerStats(cache=CACHE)
    assert await server.metric("hiserve:evicted_tokens_total", tier="device") == 7 * PAGE
    assert await server.metric("hiserve:evicted_tokens_total", tier="host") == 3 * PAGE
    assert await server.metric("hiserve:cache_unbacked_tokens_total") == 4 * PAGE
    assert await server.metric("hiserve:cache_misses_total", reason="cold") == 2
    assert await server.metric("hiserve:cache_misses_total", reason="evicted") == 1


def status(*caches: tuple[int, CacheStats]) -> Status:
    workers = [
        WorkerFacts(replica, 1, incarnation, {}, 100, WorkerStats(cache=cache))
        for replica, (incarnation, cache) in enumerate(caches)
    ]
    return Status(ticket=1, queued=0, queued_tokens=0, workers=workers)


def value(metrics: Metrics, series: str) -> float:
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith(series + " ")]
    return float(line.rpartition(" ")[2])


def test_counters_never_fall_and_workers_add_up() -> None:
    metrics = Metrics("a", page_size=1, compat="none")
    more = msgspec.structs.replace(
        CACHE, misses={"cold": 5, "namespace": 1}, loads=CopyStats(12, 9, 0, {"checksum": 3})
    )
    missed = 'hiserve:cache_misses_total{model_name="a",reason="cold"}'
    lost = 'hiserve:cache_unfulfilled_tokens_total{copy="load",model_name="a",reason="checksum"}'
    free = 'hiserve:cache_pages{model_name="a",state="free",tier="device"}'
    told = []
    for first, second in (
        ((1, CACHE), (1, CACHE)),
        ((1, CACHE), (1, more)),
        ((2, CacheStats()), (1, more)),
        ((2, CACHE), (1, more)),
    ):
        metrics.engine.observe(status(first, second))
        told.append((value(metrics, missed), value(metrics, lost), value(metrics, free)))
    assert told == [(4, 4, 40), (7, 5, 40), (7, 5, 20), (9, 7, 40)]


@pytest.mark.parametrize(
    ("compat", "series", "count"),
    [
        ("vllm", 'kv_offload_total_bytes_total{model_name="a",transfer_type="CPU_to_GPU"}', 4096),
        ("vllm", 'kv_offload_total_time_total{model_name="a",transfer_type="GPU_to_CPU"}', 0.25),
        ("sglang", 'load_back_tokens_total{model_name="a"}', 6),
        ("sglang", 'load_back_bytes_total{model_name="a"}', 4096),
        ("sglang", 'hicache_backup_tokens_total{model_name="a"}', 5),
        ("sglang", 'hicache_backup_bytes_total{model_name="a"}', 1024),
        ("sglang", 'hicache_dropped_tokens_total{model_name="a",reason="link_behind"}', 3),
        ("sglang", 'prefetched_tokens_total{model_name="a"}', 4),
        ("sglang", 'backuped_tokens_total{model_name="a"}', 3),
        ("sglang", 'storage_prefetch_hit_tokens_total{model_name="a"}', 9),
        ("sglang", 'storage_prefetch_unfulfilled_tokens_total{model_name="a",reason="host_full"}', 5),
        ("sglang", 'hicache_host_used_tokens{model_name="a"}', 300),
        ("sglang", 'hicache_host_total_tokens{model_name="a"}', 400),
        ("sglang", 'evicted_tokens_total{model_name="a"}', 7),
    ],
)
def test_other_engines_names_show_the_same_copies(compat: str, series: str, count: float) -> None:
    metrics = Metrics("a", page_size=1, compat=compat)
    metrics.engine.observe(status((1, CACHE)))
    assert value(metrics, f"{compat}:{series}") == count
