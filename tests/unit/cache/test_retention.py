"""Retained pages: their time, their counts, and the size of the records about them."""

from __future__ import annotations

import pytest

from hiserve.cache.index import tiers
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.index.retention import MIN_SWEEP
from tests.helpers.tiers import PAGE_SIZE, TENANT, cached, new_cache, prompt, serve, squeeze, take


def retained(cache: PrefixCache, *pages: int, until_s: int) -> None:
    held = serve(cache, *pages)
    cache.retain(held, len(pages) * PAGE_SIZE, until_s)
    cache.release(held)


def test_it_ends_at_its_time_and_leaves_no_record_of_the_account() -> None:
    cache = new_cache(num_host_pages=0)
    retained(cache, 1, 2, 3, until_s=10)
    cache.expire(9)
    assert cache.stats().num_retained == 3
    cache.expire(10)
    assert cache.tiers.retention.held == {} and cache.stats().num_retained == 0


def test_pages_that_are_evicted_are_not_counted_and_the_others_are() -> None:
    cache = new_cache(num_host_pages=0)
    retained(cache, 1, 2, 3, 4, until_s=10)
    cache.free(take(cache, cache.device.pages.num_free + 2))
    assert cached(cache, 1, 2, 3, 4) == (2, 0) and cache.stats().num_retained == 2
    retained(cache, 11, 12, 13, 14, 15, 16, until_s=20)
    assert cache.stats().num_retained == 7, "a quarter of 31 pages"
    cache.expire(10)
    assert cache.stats().num_retained == 5
    squeeze(cache)
    assert cache.tiers.retention.held == {}


def test_both_parts_of_a_retained_path_that_is_cut_in_two_are_retained() -> None:
    cache = new_cache(num_host_pages=0)
    retained(cache, 1, 2, 3, until_s=10)
    held = serve(cache, 1, 9)
    assert sorted((node.num_pages, node.retained_until_s) for node in cache.tree.nodes()) == [(1, 0), (1, 10), (2, 10)]
    cache.release(held)
    cache.free(take(cache, cache.device.pages.num_free + 1))
    assert cached(cache, 1, 2, 3) == (3, 0)
    cache.expire(10)
    assert cache.tiers.retention.held == {}


def test_a_prefix_that_is_used_for_ever_has_a_bounded_record() -> None:
    cache = new_cache(num_host_pages=0)
    held = serve(cache, 1, 2, 3)
    for until_s in range(1, 3 * MIN_SWEEP):
        cache.retain(held, 3 * PAGE_SIZE, until_s)
    assert len(cache.tiers.retention._due) < MIN_SWEEP
    cache.expire(3 * MIN_SWEEP - 2)
    assert cache.stats().num_retained == 3
    cache.expire(3 * MIN_SWEEP - 1)
    assert cache.stats().num_retained == 0


def test_pages_that_become_those_of_an_account_count_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(num_host_pages=0)
    monkeypatch.setattr(tiers, "MAX_ACCOUNTS", 0)  # there is no room for another
    retained(cache, 1, 2, 3, 4, until_s=10)
    monkeypatch.setattr(tiers, "MAX_ACCOUNTS", 8)
    cache.release(cache.lock(cache.match(TENANT, prompt(1, 2, 3, 4)), account=b"caller"))
    assert cache.tiers.retention.held == {b"caller": 4}
    cache.expire(10)
    assert cache.tiers.retention.held == {}
