"""What loads cost against computing, and how many copies a plan begins."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.transfers import STORE_LANES
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.host_loads import MAX_SKIPPED, MIN_MEASUREMENTS, HostLoads, LinearFit, LoadCostModel
from hiserve.engine.rows import RowState
from tests.helpers.clock import Clock


def measured(*, load_fixed_s: float, load_token_s: float, step_fixed_s: float, token_s: float) -> LoadCostModel:
    """Costs that saw a few steps and loads of several sizes, all exactly on these lines."""
    clock = Clock(0.0)
    costs = LoadCostModel(512, clock)
    for size in (64, 512, 128, 256, 448):
        costs.begin_step(1, size)
        clock.now_s += step_fixed_s + size * token_s
        costs.end_step()
        costs.end_load(size, load_fixed_s + size * load_token_s)
    return costs


def test_until_both_are_measured_what_the_host_has_is_loaded() -> None:
    clock = Clock(0.0)
    costs = LoadCostModel(512, clock)
    assert costs.is_worth_loading(1, 10**9)
    for _ in range(MIN_MEASUREMENTS):
        costs.end_load(16, 1e6)
    assert costs.is_worth_loading(16, 0)
    for _ in range(MIN_MEASUREMENTS):
        costs.begin_step(1, 64)
        clock.now_s += 1e-3
        costs.end_step()
    assert not costs.is_worth_loading(16, 0)


@pytest.mark.parametrize(("num_tokens", "is_worth"), [(16, False), (96, False), (112, True), (4096, True)])
def test_a_load_that_is_slow_to_begin_is_for_long_prefixes(num_tokens: int, is_worth: bool) -> None:
    """10 ms + 0.1 ms a token against 0.2 ms a token: even at 100 tokens."""
    costs = measured(load_fixed_s=0.01, load_token_s=1e-4, step_fixed_s=0.0, token_s=2e-4)
    assert costs.is_worth_loading(num_tokens, 0) is is_worth


def test_loads_that_come_first_are_waited_for_too() -> None:
    costs = measured(load_fixed_s=0.0, load_token_s=1e-4, step_fixed_s=0.0, token_s=2e-4)
    assert costs.is_worth_loading(1000, 900)
    assert not costs.is_worth_loading(1000, 1100)


def test_each_step_of_a_recomputation_costs_its_fixed_part() -> None:
    costs = measured(load_fixed_s=0.0, load_token_s=2e-4, step_fixed_s=0.05, token_s=1e-4)
    assert costs.is_worth_loading(256, 0)  # 51 ms against 76 ms
    assert not costs.is_worth_loading(512, 0)  # 102 ms against 101 ms
    assert costs.is_worth_loading(513, 0)  # 103 ms against 151 ms: a second step


def test_a_step_counts_from_the_end_of_the_one_before_it_and_decoding_does_not_count() -> None:
    clock = Clock(0.0)
    costs = LoadCostModel(512, clock)
    for _ in range(MIN_MEASUREMENTS):
        costs.begin_step(8, 8)  # decoding
        costs.begin_step(1, 100)  # submitted while the other runs
        clock.now_s += 5.0
        costs.end_step()
        clock.now_s += 0.1
        costs.end_step()
        costs.end_load(100, 0.2)
    assert not costs.is_worth_loading(100, 0)  # 0.2 s against 0.1 s, not against 5.1 s


def test_what_was_measured_lately_weighs_most() -> None:
    line = LinearFit()
    for seconds in [1.0] * 50 + [0.001] * 50:
        line.add(10, seconds)
    fixed, slope = line.fit()
    assert fixed == 0.0
    assert 1e-4 < slope < 1e-3


def test_a_stall_is_not_believed_for_ever() -> None:
    costs = measured(load_fixed_s=0.0, load_token_s=1e-6, step_fixed_s=0.0, token_s=1e-4)
    for _ in range(2):
        costs.end_load(64, 10.0)  # one load among fast ones met a machine that stood still
        for _ in range(MAX_SKIPPED):
            assert not costs.is_worth_loading(64, 0)
            costs.skip_load()
        for _ in range(MIN_MEASUREMENTS):
            assert costs.is_worth_loading(64, 0)
            costs.end_load(64, 64e-6)
        assert costs.is_worth_loading(64, 0)


def test_of_what_a_store_has_comes_as_much_as_there_is_time_for() -> None:
    costs = LoadCostModel(512, Clock(0.0))
    for size in (64, 512, 128, 256, 448):
        costs.end_fetch(size, 0.5 + size * 0.01)
    assert costs.num_in_time(100, 0, 0.4) == 0, "the first comes after half a second"
    assert [costs.num_in_time(100, 0, wait_s) for wait_s in (1.0005, 1.6)] == [50, 100]
    assert costs.num_in_time(100, 40 * STORE_LANES, 1.0005) == 10


def test_a_step_that_did_not_run_tells_nothing_of_prefill() -> None:
    clock = Clock(0.0)
    costs = LoadCostModel(512, clock)
    for _ in range(MIN_MEASUREMENTS):
        costs.end_load(16, 1.0)
        costs.begin_step(1, 64)
        assert costs.end_step(has_run=False) is None
    assert costs.is_worth_loading(16, 0)
    costs.begin_step(4, 4)
    assert costs.end_step(has_run=False) is None


PAGE = 4


@pytest.mark.parametrize(("num_nodes", "num_stores"), [(1, 1), (127, 1), (128, 2), (300, 3), (1000, 4)])
def test_the_more_nodes_wait_the_more_of_them_a_plan_stores(num_nodes: int, num_stores: int) -> None:
    cache = PrefixCache(num_pages=1100, page_size=PAGE, namespace=b"n", num_host_pages=1100)
    for number in range(num_nodes):
        publish(cache, number, 1)
    assert len(loading_of(cache).take(num_tokens=1)) == num_stores


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 64), (64 * PAGE, 64), (200 * PAGE, 200), (512 * PAGE, 512)])
def test_as_many_pages_are_stored_as_a_step_fills(num_tokens: int, num_pages: int) -> None:
    """Else prompts of several chunks are evicted before they are on the host."""
    cache = PrefixCache(num_pages=1100, page_size=PAGE, namespace=b"n", num_host_pages=1100)
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
