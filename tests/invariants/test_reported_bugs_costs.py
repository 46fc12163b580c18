"""Reported regressions of speed as counting tests, by number: what is counted grows with the work and nothing else.

How long it takes is measured elsewhere: matches, publishing and eviction by ``benchmarks/radix.py``, plans by
``benchmarks/planner.py``, copies by ``benchmarks/kernels/copy.py``, host hits beside other requests by
``hiserve bench cache``. TC-82 (collectives each step) does not apply: there are none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hiserve.cache.index.eviction import ON_DEVICE, Eviction
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.config.caching import EvictionOrder
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.copying import add, copying_engine, run
from tests.helpers.tiers import backed, demoted, key, load, lock, new_cache, serve, take
from tests.helpers.transfers import THREAD, TransferBench


def num_calls(what: Callable[[], Any]) -> int:
    """Counts the calls of functions, our own and built-in ones, that something makes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def test_tc_80_a_host_hit_costs_the_loop_no_more_when_it_is_long() -> None:
    calls = []
    for num_pages in (20, 200):
        engine, executor, _ = copying_engine(num_pages=260, num_host_pages=800, max_len=2048, budget=2048)
        prompts = [np.random.default_rng(seed).integers(2, 99, 4 * num_pages + 1) for seed in range(2)]
        for uid, prompt in enumerate(prompts):
            add(engine, uid, prompt)
            run(engine)
        filler = np.random.default_rng(9).integers(2, 99, 4 * 250)
        add(engine, 8, filler)
        run(engine)
        executor.holds = True
        add(engine, 9, prompts[0])
        calls.append(num_calls(engine.step))
        (copy,) = [copy for copy in executor.open.values() if copy.kind is CopyKind.LOAD]
        assert copy.host_pages.size == num_pages
    short, long = calls
    assert long < short + 90, f"{short} calls for 20 pages, {long} for 200"


def test_tc_81_a_load_is_one_order_carried_out_by_another_thread() -> None:
    cache = new_cache(num_pages=200, num_host_pages=200)
    demoted(cache, *range(60))
    for cut in (5, 20, 40):  # a path of several nodes
        cache.release(lock(cache, *range(cut)))
    assert len(list(cache.tree.nodes())) > 3
    _, copy = load(cache, *range(60))
    assert copy.device_pages.size == copy.host_pages.size == 60

    threads: list[int] = []

    def hold(order: PageCopy) -> None:
        threads.append(threading.get_ident())

    bench = TransferBench(THREAD, hold=hold)
    bench.store(1, range(1, 9), range(1, 9))
    bench.acks(1)
    bench.load(2, range(1, 9), range(1, 9))
    assert bench.acks(1)[0].num_bytes == 8 * bench.page_bytes
    bench.close()
    assert len(threads) == 2 and threading.get_ident() not in threads


@pytest.mark.parametrize("num_others", [10, 1000])
def test_tc_83_storing_a_node_costs_the_same_whatever_else_is_cached(num_others: int) -> None:
    cache = new_cache(num_pages=4000, num_host_pages=4000)
    for other in range(num_others):
        backed(cache, 1, 2, 100 + other)
    cache.release(serve(cache, 1, 2, *range(3, 23)))

    def store() -> None:
        (copy,) = cache.begin_offloads(99)
        assert copy.host_pages.size == 20
        cache.complete(copy.op, ok=True)

    assert num_calls(store) < 250


def test_tc_83_a_chain_of_chunks_is_stored_by_one_order() -> None:
    cache = new_cache(num_pages=400, num_host_pages=400)
    receipt = serve(cache, 0)
    for chunk in range(1, 200, 3):
        cache.insert(receipt, key(chunk, chunk + 1, chunk + 2), take(cache, 3))
    assert len(cache.begin_offloads(1000)) == 1


@pytest.mark.parametrize("order", ["lru", "priority"])
def test_tc_84_eviction_looks_at_what_it_evicts_and_not_at_every_leaf(
    order: EvictionOrder,
) -> None:
    num_looks = 0

    def look(node: Node) -> bool:
        nonlocal num_looks
        num_looks += 1
        return ON_DEVICE(node)

    cache = PrefixCache(num_pages=5001, page_size=2, namespace=b"", eviction=order)
    cache.device.eviction = Eviction(order, look)
    for leaf in range(5000):
        cache.release(serve(cache, 10 + leaf))
    take(cache, 1)  # what libraries import at their first use is no cost of eviction
    assert cache.device.pages.num_free == 0
    num_looks = 0
    assert num_calls(lambda: take(cache, 100)) < 100 * 40
    assert num_looks <= 2 * 100
