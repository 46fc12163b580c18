"""``/cache/stats``, ``/cache/tree`` and flushes: what they show, what they empty, what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.ipc.cache_stats import CacheStats, CopyStats, NodeFacts, StoreStats, TierStats, WindowStats
from hiserve.ipc.messages import WorkerStats
from hiserve.server.management import cache as replies
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server

CACHE = CacheStats(
    device=TierStats(num_pages=99, num_free=10, num_evictable=40, num_evicted=7),
    host=TierStats(num_pages=400, num_free=300, num_evictable=60, num_evicted=1),
    loads=CopyStats(
        num_wanted=9, num_fulfilled=5, num_in_flight=1, unfulfilled={"checksum": 3}, num_bytes=5, seconds=0.5
    ),
    offloads=CopyStats(num_wanted=20, num_fulfilled=18, unfulfilled={"link_behind": 2}),
    cached_tokens={"device": 64, "host": 80, "store": 0},
    misses={"cold": 3, "evicted": 1},
    num_unbacked=2,
)


async def test_stats_show_tiers_copies_and_misses_of_each_replica(server: Server) -> None:
    server.engine.stats, server.engine.incarnation = WorkerStats(cache=CACHE), 3
    shown = (await server.get("/cache/stats")).json
    assert shown["page_size"] == 16
    (replica,) = shown["replicas"]
    assert (replica["replica"], replica["incarnation"]) == (0, 3)
    assert replica["tiers"]["device"] == {"num_pages": 99, "num_free": 10, "num_evictable": 40, "num_evicted": 7}
    assert replica["tiers"]["host"]["num_free"] == 300
    assert replica["loads"]["unfulfilled"] == {"checksum": 3}
    assert replica["offloads"]["num_fulfilled"] == 18
    assert replica["cached_tokens"] == {"device": 64, "host": 80, "store": 0}
    assert replica["misses"] == {"cold": 3, "evicted": 1}
    assert replica["num_unbacked"] == 2
    assert "prefetches" in replica and "uploads" in replica
    msgspec.convert(shown, replies.Caches)


async def test_a_server_without_a_host_tier_shows_none() -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), host_cache_gib=0)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        assert list((await made.get("/cache/stats")).json["replicas"][0]["tiers"]) == ["device"]
        windows = WindowStats(20, 4, 6, 2, num_tails=3, num_evicted_tails=1)
        made.engine.stats = WorkerStats(cache=msgspec.structs.replace(CACHE, windows=windows))
        tiers = (await made.get("/cache/stats")).json["replicas"][0]["tiers"]
        assert tiers["windows"] == msgspec.to_builtins(windows)


async def test_the_tree_is_asked_for_to_a_depth_and_shown_as_it_is(server: Server) -> None:
    server.engine.nodes = [
        NodeFacts("aa" * 8, "", 0, 0, "", 1, 0, 12, 1),
        NodeFacts("bb" * 8, "aa" * 8, 1, 32, "DH", 1, 0, 12, 0),
    ]
    shown = (await server.get("/cache/tree?depth=7")).json
    assert (shown["page_size"], shown["replicas"][0]["replica"]) == (16, 0)
    assert msgspec.convert(shown["replicas"][0]["nodes"], list[NodeFacts]) == server.engine.nodes
    await server.get("/cache/tree")
    assert server.engine.inspected == [7, 3]


@pytest.mark.parametrize("depth", ["0", "33", "-1", "x", "", "1.5", "9" * 5000, "٣"])
async def test_a_depth_that_is_none_is_refused_with_the_limits(server: Server, depth: str) -> None:
    call = await server.get(f"/cache/tree?depth={depth}")
    assert (call.status, call.json["error"]["param"]) == (400, "depth")
    assert call.json["error"]["message"] == "depth must be a whole number between 1 and 32."
    assert not server.engine.inspected


async def test_a_worker_that_does_not_answer_is_a_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiserve.server.engine_handle.ANSWER_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    for path in ("/cache/tree", "/cache/stats"):
        call = await server.get(path)
        assert call.status == 503
        assert "did not answer" in call.json["error"]["message"]


@pytest.mark.parametrize(
    ("query", "tiers"),
    [
        ("", ("device", "host")),
        ("?tier=device", ("device",)),
        ("?tier=host", ("host",)),
        ("?tier=all", ("device", "host")),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")])
async def test_a_flush_empties_the_tier_it_names_and_says_how_many_pages(
    server: Server, method: str, path: str, query: str, tiers: tuple[str, ...]
) -> None:
    assert (await server.call(method, path + query).end()).json == {"flushed_pages": 7}
    assert server.engine.flushed == [tiers]


async def test_a_flush_is_nothing_that_a_get_does(server: Server) -> None:
    assert (await server.get("/flush_cache")).status == 405
    assert server.engine.flushed == []


@pytest.mark.parametrize(
    ("tier", "told"),
    [
        ("disk", "tier must be one of device, host, store, all."),
        ("", "tier must be one of device, host, store, all."),
        ("store", "this server has no store; its tiers are device, host."),
    ],
)
async def test_a_flush_of_what_is_not_there_is_refused(server: Server, tier: str, told: str) -> None:
    call = await server.post(f"/flush_cache?tier={tier}", b"")
    assert (call.status, call.json["error"]["param"], call.json["error"]["message"]) == (400, "tier", told)
    assert not server.engine.flushed


@pytest.mark.parametrize(
    ("query", "tiers"),
    [("", ("device", "host")), ("?tier=store", ("store",)), ("?tier=all", ("device", "host", "store"))],
)
async def test_a_store_is_emptied_only_by_name(tmp_path: Path, query: str, tiers: tuple[str, ...]) -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), store=f"file:{tmp_path}")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        assert (await made.post(f"/flush_cache{query}", b"")).status == 200
        assert made.engine.flushed == [tiers]


async def test_the_store_is_shown_with_what_went_wrong(tmp_path: Path) -> None:
    made = make_server(FakeEngineClient(script=lambda prompt: []), store=f"file:{tmp_path}")
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        store = StoreStats(num_pages=12, num_bytes=999, num_hits=5, num_errors=1, last_error="disk full")
        made.engine.stats = WorkerStats(cache=msgspec.structs.replace(CACHE, store=store))
        shown = (await made.get("/cache/stats")).json
        tiers = shown["replicas"][0]["tiers"]
        assert list(tiers) == ["device", "host", "store"]
        assert msgspec.convert(tiers["store"], StoreStats) == store
        assert msgspec.convert(shown, replies.Caches).replicas[0].tiers.store == store
        made.engine.stats = WorkerStats()  # of a worker that has not reported yet
        assert list((await made.get("/cache/stats")).json["replicas"][0]["tiers"]) == ["device", "host"]


async def test_the_parameters_are_described_with_their_limits(server: Server) -> None:
    paths: dict[str, Any] = (await server.get("/openapi.json")).json["paths"]
    (depth,) = paths["/cache/tree"]["get"]["parameters"]
    assert depth["schema"] == {"type": "integer", "minimum": 1, "maximum": 32, "default": 3}
    (tier,) = paths["/flush_cache"]["post"]["parameters"]
    assert tier["schema"]["enum"] == ["device", "host", "store", "all"]
    assert all(not each["required"] and each["in"] == "query" for each in (depth, tier))
    for path in ("/cache/tree", "/flush_cache", "/reset_prefix_cache"):
        assert "400" in paths[path]["post" if path != "/cache/tree" else "get"]["responses"]
