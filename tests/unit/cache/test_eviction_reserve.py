"""How many pages are to be spare: for the least what the last steps took, at most what the largest took, within bounds."""

from __future__ import annotations

from hiserve.cache.index.eviction import DEVICE_SHARE, STEPS
from tests.helpers.tiers import new_cache, serve, take


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
