"""Stores that are wanted: never more pages than were computed, however full the host is."""

from __future__ import annotations

from hiserve.engine.cache_counters import CacheCounters
from tests.helpers.tiers import new_cache, serve


def test_a_full_host_is_not_asked_again_and_again_for_the_same_pages() -> None:
    """A row grows page by page while nothing of the host may go."""
    cache = new_cache(num_pages=64, num_host_pages=5)
    cache_counters = CacheCounters(cache)
    held = cache.tiers.allocate_host(4)
    lock = serve(cache, 1)
    for end in range(2, 21):
        cache.release(lock)
        lock = serve(cache, *range(1, end))
        assert cache.begin_offloads(99) == []
    assert cache_counters.stats().offloads.num_wanted <= 19
    cache.tiers.free_host(held)
    cache.release(lock)
