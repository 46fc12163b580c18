"""How many pages are to be spare: for the least what the last steps took, at most what the largest took, within bounds."""

from __future__ import annotations

import pytest

from hiserve.cache.index.eviction import DEVICE_SHARE, STEPS
from hiserve.cache.index.locks import path
from tests.helpers.tiers import backed, cached, demoted, lock, new_cache, serve, squeeze, store, take
from tests.invariants.index_checks import check_structure


def test_what_is_needed_follows_the_last_steps_and_what_is_welcome_the_largest() -> None:
    cache = new_cache(num_pages=400, num_host_pages=400)
    reserve = cache.tiers.reserve
    take(cache, 399)  # in one step, and none is free
    assert reserve.end_step()
    assert reserve.num_short == reserve.num_wanted == 400 // DEVICE_SHARE
    assert not reserve.end_step(), "a step that takes nothing"
    for _ in range(60):
        reserve.num_taken += 1
        assert reserve.end_step()
    assert reserve.num_short == 1 and reserve.num_wanted == 400 // DEVICE_SHARE
    for _ in range(4000):
        reserve.num_taken += 1
        reserve.end_step()
    assert reserve.num_short == 1 and reserve.num_wanted == STEPS


def test_a_small_host_bounds_what_is_spare_and_free_pages_count() -> None:
    cache = new_cache(num_pages=400, num_host_pages=20)
    reserve = cache.tiers.reserve
    take(cache, 395)
    reserve.end_step()
    assert reserve.num_short == 20 // 2 - cache.device.pages.num_free == 6


def test_without_a_host_nothing_is_kept_for_later() -> None:
    cache = new_cache(num_pages=8, num_host_pages=0)
    cache.release(serve(cache, 1, 2))
    assert cache.device.num_evictable == 2 and not cache.tiers.reserve.has_candidates


@pytest.mark.parametrize(("num_host_pages", "num_saved"), [(25, 8), (17, 0)], ids=["a large host", "a small host"])
def test_where_one_step_takes_most_of_the_device_its_pages_replace_others_on_the_host(
    num_host_pages: int, num_saved: int
) -> None:
    """Unlocked, they would be evicted at once; a host of less than twice the device keeps the pages of others instead."""
    cache = new_cache(num_pages=9, num_host_pages=num_host_pages)
    for first in range(0, num_host_pages - 1, 8):
        demoted(cache, *range(first, first + 8))
    assert cache.host.pages.num_free == 0
    receipt = serve(cache, *range(100, 108))
    store(cache)
    assert sum(node.host_pages.size for node in path(receipt.node)) == num_saved
    assert cached(cache, *range(8, 16)) == (0, 8), "the oldest go first"
    cache.release(receipt)
    squeeze(cache)
    assert cached(cache, *range(100, 108)) == (0, num_saved)
    check_structure(cache)


def test_pages_in_use_wait_while_a_large_host_has_nothing_to_give_for_them() -> None:
    """What is left of it are copies of spare pages, which stay. Nobody asks again before something has changed."""
    cache = new_cache(num_pages=9, num_host_pages=25)
    for first in range(0, 20, 5):
        demoted(cache, *range(first, first + 5))
    held = [lock(cache, *range(first, first + 5)) for first in range(0, 20, 5)]
    backed(cache, *range(100, 104))
    receipt = serve(cache, *range(200, 204))
    assert cache.begin_offloads(100) == [] and cache.host.num_available > 0 and not cache.has_offloads
    cache.release(held[0])
    cache.free(take(cache, 1))
    store(cache)
    assert sum(node.host_pages.size for node in path(receipt.node)) == 4
    check_structure(cache)
