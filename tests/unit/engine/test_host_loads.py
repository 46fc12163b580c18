"""How many copies a plan begins."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.host_loads import HostLoads
from hiserve.engine.load_costs import LoadCostModel
from hiserve.engine.rows import RowState

PAGE = 4


@pytest.mark.parametrize(("num_nodes", "num_stores"), [(1, 1), (127, 1), (128, 2), (300, 3), (1000, 4)])
def test_the_more_nodes_wait_the_more_of_them_a_plan_stores(num_nodes: int, num_stores: int) -> None:
    cache = PrefixCache(num_pages=1100, page_size=PAGE, namespace=b"n", eviction=LruEviction(), num_host_pages=1100)
    for number in range(num_nodes):
        publish(cache, number, 1)
    assert len(loading_of(cache).take(num_tokens=1)) == num_stores


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 64), (64 * PAGE, 64), (200 * PAGE, 200), (512 * PAGE, 512)])
def test_as_many_pages_are_stored_as_a_step_fills(num_tokens: int, num_pages: int) -> None:
    """Else prompts of several chunks are evicted before they are on the host."""
    cache = PrefixCache(num_pages=1100, page_size=PAGE, namespace=b"n", eviction=LruEviction(), num_host_pages=1100)
    for number in range(8):
        publish(cache, number, 128)
    copies = loading_of(cache).take(num_tokens)
    assert sum(copy.device_pages.size for copy in copies) == num_pages


def publish(cache: PrefixCache, number: int, num_pages: int) -> None:
    """Publishes a prefix that is like no other."""
    key = np.full(PAGE * num_pages, number, dtype=np.int32).tobytes()
    with cache.lock(cache.match(b"", key)) as lock:
        pages = cache.allocate(np.zeros(num_pages, dtype=np.int32))
        assert pages is not None
        cache.insert(lock, key, pages, 1)


def loading_of(cache: PrefixCache) -> HostLoads:
    return HostLoads(cache, RowState(cache, 2, 8), LoadCostModel(8), CacheCounters(cache))
