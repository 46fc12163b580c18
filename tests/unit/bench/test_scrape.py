"""The counters of a server before and after a run: of its metrics, and of its copies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hiserve.bench.http import Pool
from hiserve.bench.scrape import (
    CacheStatsReply,
    CopyCounts,
    ReplicaCacheStats,
    copied,
    increases,
    page_size_of,
    read_caches,
    sum_copies,
    total,
)
from hiserve.ipc.cache_stats import CopyStats
from tests.helpers.fake_server import Asked, FakeServer, Out

BEFORE = b"""# HELP hiserve:cached_tokens_total The same by tier.
# TYPE hiserve:cached_tokens_total counter
hiserve:cached_tokens_total{cache_source="device",model_name="m"} 10.0
hiserve:cached_tokens_total{cache_source="host",model_name="m"} 5.0
# TYPE hiserve:engine_steps_total counter
hiserve:engine_steps_total{model_name="m"} 9.0
# TYPE hiserve:worker_restarts_total counter
hiserve:worker_restarts_total{model_name="m"} 1.0
# TYPE hiserve:num_requests_running gauge
hiserve:num_requests_running{model_name="m"} 3.0
# TYPE hiserve:cache_config_info gauge
hiserve:cache_config_info{model_name="m",num_pages="99",page_size="32"} 1.0
"""
AFTER = (
    BEFORE.replace(b"} 10.0", b"} 12.5")
    .replace(b"} 5.0", b"} 6.0")
    .replace(b"} 9.0", b"} 4.0")
    .replace(b"} 3.0", b"} 7.0")
)


def test_what_grew_is_told_by_how_much_and_a_counter_that_fell_began_again() -> None:
    assert increases(BEFORE, AFTER) == {
        'hiserve:cached_tokens_total{cache_source="device"}': 2.5,
        'hiserve:cached_tokens_total{cache_source="host"}': 1.0,
        "hiserve:engine_steps_total{}": 4.0,
    }


def test_series_of_a_metric_are_summed_by_label() -> None:
    grown = increases(BEFORE, AFTER)
    assert total(grown, "cached_tokens_total") == 3.5
    assert total(grown, "cached_tokens_total", cache_source="host") == 1.0
    assert total(grown, "cached_tokens_total", cache_source="store") is None
    assert total(grown, "cached") is None


def test_a_metric_that_was_not_there_before_counts_from_nothing() -> None:
    assert total(increases(b"", BEFORE), "cached_tokens_total") == 15.0


@pytest.mark.parametrize("text", [b"", b"<html>", b"a{b=c} d\n", b"\xff\xfe"])
def test_what_is_no_metrics_has_none(text: bytes) -> None:
    assert increases(text, text) == {}
    assert page_size_of(text) is None


def test_each_engine_tells_its_page_size() -> None:
    assert page_size_of(BEFORE) == 32
    assert page_size_of(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="7"} 1.0\n') == 16
    assert page_size_of(b'vllm:cache_config_info{block_size="auto"} 1.0\n') is None


def loads(pages: int, num_bytes: int = 0, seconds: float = 0.0, **unfulfilled: int) -> CopyStats:
    wanted = pages + sum(unfulfilled.values())
    return CopyStats(
        num_wanted=wanted, num_fulfilled=pages, num_bytes=num_bytes, seconds=seconds, unfulfilled=unfulfilled
    )


def caches(*of_replicas: CopyStats, incarnation: int = 1) -> CacheStatsReply:
    replicas = [
        ReplicaCacheStats(replica=index, incarnation=incarnation, loads=each) for index, each in enumerate(of_replicas)
    ]
    return CacheStatsReply(replicas=replicas)


def test_what_was_copied_is_the_difference_over_all_replicas() -> None:
    before = caches(loads(10, 1000, 1.0, broken=2), loads(5, 500, 0.5))
    after = caches(loads(30, 3000, 1.25, broken=2), loads(6, 600, 0.75, late=3))
    found = copied(before, after)
    assert found["loads"] == CopyCounts(
        num_pages=21, num_bytes=2100, seconds=0.5, bytes_per_s=4200.0, unfulfilled={"late": 3}
    )
    assert found["offloads"] == CopyCounts(num_pages=0, num_bytes=0, seconds=0.0, bytes_per_s=None, unfulfilled={})


def test_a_worker_that_began_again_counts_from_there() -> None:
    found = copied(caches(loads(100, 9000, 3.0)), caches(loads(7, 700, 0.5), incarnation=2))
    assert (found["loads"].num_pages, found["loads"].num_bytes) == (7, 700)


def test_reasons_are_summed() -> None:
    found = sum_copies(caches(loads(1, broken=2), loads(1, broken=3, late=1)).replicas, "loads")
    assert (found.num_wanted, found.unfulfilled) == (8, {"broken": 5, "late": 1})


@asynccontextmanager
async def answering(status: int, content: Any) -> AsyncIterator[Pool]:
    async def handle(_: Asked, out: Out) -> None:
        await out.json(status, content)

    async with FakeServer({"/cache/stats": handle}) as server:
        pool = Pool(server.url)
        yield pool
        pool.close()


async def test_keys_that_are_not_there_or_not_known_do_no_harm() -> None:
    replica = {"replica": 3, "tiers": {"store": None}, "loads": {"num_fulfilled": 4}, "news": {"a": 1}}
    async with answering(200, {"page_size": 16, "replicas": [replica, {}]}) as pool:
        found = await read_caches(pool)
    assert isinstance(found, CacheStatsReply)
    assert [each.replica for each in found.replicas] == [3, 0]
    assert sum_copies(found.replicas, "loads").num_fulfilled == 4


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [(403, {}, "answered 403"), (200, {"replicas": 3}, "not as hiserve words it"), (200, b"<html>", "not as hiserve")],
)
async def test_what_cannot_be_read_is_said(status: int, content: Any, words: str) -> None:
    async with answering(status, content) as pool:
        found = await read_caches(pool)
    assert isinstance(found, str) and words in found
