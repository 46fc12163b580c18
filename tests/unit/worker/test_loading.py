"""How many copies a plan begins."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.manager import CacheManager
from hiserve.worker.cache_stats import CacheCounts
from hiserve.worker.columns import Columns
from hiserve.worker.costs import Costs
from hiserve.worker.loading import Loading

PAGE = 4


@pytest.mark.parametrize(("num_nodes", "num_stores"), [(1, 1), (127, 1), (128, 2), (300, 3), (1000, 4)])
def test_the_more_nodes_wait_the_more_of_them_a_plan_stores(num_nodes: int, num_stores: int) -> None:
    cache = CacheManager(num_pages=1100, page_size=PAGE, namespace=b"n", eviction=LruEviction(), num_host_pages=1100)
    for number in range(num_nodes):
        key = np.full(PAGE, number, dtype=np.int32).tobytes()
        with cache.lock(cache.match(b"", key)) as receipt:
            pages = cache.take(np.zeros(1, dtype=np.int32))
            assert pages is not None
            cache.publish(receipt, key, pages, 1)
    loading = Loading(cache, Columns(2, 8, PAGE), Costs(8), CacheCounts(cache))
    assert len(loading.take()) == num_stores
