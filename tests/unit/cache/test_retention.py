"""Retained pages: their time, their counts, and the size of the records about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hiserve.cache.index import tiers
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.index.retention import MIN_SWEEP, RetentionEnds
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import PageRun
from tests.helpers.tiers import (
    NAMESPACE,
    PAGE_SIZE,
    TENANT,
    backed,
    cached,
    key,
    new_cache,
    prompt,
    serve,
    squeeze,
    store,
    take,
)


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
    assert cache.tiers.retention.quota.held == {} and cache.stats().num_retained == 0


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
    assert cache.tiers.retention.quota.held == {}


def test_both_parts_of_a_retained_path_that_is_cut_in_two_are_retained() -> None:
    cache = new_cache(num_host_pages=0)
    retained(cache, 1, 2, 3, until_s=10)
    held = serve(cache, 1, 9)
    assert sorted((node.num_pages, node.retained_until_s) for node in cache.tree.nodes()) == [(1, 0), (1, 10), (2, 10)]
    cache.release(held)
    cache.free(take(cache, cache.device.pages.num_free + 1))
    assert cached(cache, 1, 2, 3) == (3, 0)
    cache.expire(10)
    assert cache.tiers.retention.quota.held == {}


def test_a_prefix_that_is_used_for_ever_has_a_bounded_record() -> None:
    cache = new_cache(num_host_pages=0)
    retained(cache, 7, 8, until_s=3 * MIN_SWEEP)
    held = serve(cache, 1, 2, 3)
    for until_s in range(1, 3 * MIN_SWEEP):
        cache.retain(held, 3 * PAGE_SIZE, until_s)
    assert len(cache.tiers.retention.ends) < MIN_SWEEP
    for now_s, left in ((2, 5), (1, 2), (0, 0)):
        cache.expire(3 * MIN_SWEEP - now_s)
        assert cache.stats().num_retained == left


def test_pages_that_become_those_of_an_account_count_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(num_host_pages=0)
    monkeypatch.setattr(tiers, "MAX_ACCOUNTS", 0)  # there is no room for another
    retained(cache, 1, 2, 3, 4, until_s=10)
    monkeypatch.setattr(tiers, "MAX_ACCOUNTS", 8)
    cache.release(cache.lock(cache.match(TENANT, prompt(1, 2, 3, 4)), account=b"caller"))
    assert cache.tiers.retention.quota.held == {b"caller": 4}
    cache.expire(10)
    assert cache.tiers.retention.quota.held == {}


def times(cache: PrefixCache) -> dict[int, int]:
    """Takes the times for the records of host pages."""
    pages, until_s = cache.host_times.take()
    return dict(zip(pages.tolist(), until_s.tolist(), strict=True))


def host_pages(cache: PrefixCache) -> list[int]:
    return [page for node in cache.tree.nodes() for page in node.host_pages.tolist()]


def test_the_records_get_the_time_of_every_retained_page_whichever_comes_first() -> None:
    cache = new_cache()
    backed(cache, 1, 2, 3)
    assert times(cache) == {} and cache.host_times.is_empty
    retained(cache, 1, 2, until_s=10)
    assert not cache.host_times.is_empty
    assert times(cache) == dict.fromkeys(sorted(host_pages(cache))[:2], 10)
    assert times(cache) == {} and cache.host_times.is_empty
    retained(cache, 7, 8, until_s=20)
    assert times(cache) == {}, "the host has no copy"
    store(cache)
    assert sorted(times(cache).values()) == [20, 20]
    retained(cache, 1, 2, 3, until_s=30)
    assert sorted(times(cache).values()) == [30, 30, 30]


def test_a_page_that_was_freed_has_no_time_and_its_next_use_has_its_own() -> None:
    cache = new_cache(num_host_pages=5)
    backed(cache, 1, 2)
    retained(cache, 1, until_s=10)
    cache.flush()
    assert times(cache) == {}
    backed(cache, 1, 2, 3, 4)
    retained(cache, 1, until_s=10)
    (page,) = times(cache)
    retained(cache, 1, until_s=20)
    cache.flush()
    held = serve(cache, 5, 6, 7, 8)
    cache.retain(held, PAGE_SIZE, 30)
    store(cache)
    assert page in host_pages(cache)
    assert list(times(cache).values()) == [30]


def run_of(cache: PrefixCache, pages: list[int], until_s: int, above: PageRun | None = None) -> PageRun:
    """A recovered run of one page of the prompt for each host page."""
    root = namespace_digest(NAMESPACE, TENANT)
    parent = root if above is None else above.digests[-1]
    words = key(*pages)
    return PageRun(np.array(pages, dtype=np.int32), root, parent, cache.tree.chain(parent, words), words, 0, until_s)


def test_recovered_pages_are_retained_until_the_time_that_was_recorded() -> None:
    cache = new_cache(num_pages=12, num_host_pages=12)
    kept = run_of(cache, [1, 2, 3, 4], until_s=10)
    rest = run_of(cache, [5], until_s=0, above=kept)
    assert cache.recover([kept, rest]) == 5
    assert cache.is_retaining and cache.stats().num_retained == 4, (
        "above the quota of 2 pages, as other accounts have it"
    )
    assert cache.host_times.is_empty, "the records have them"
    other = run_of(cache, [6, 7], until_s=0)
    assert cache.recover([other]) == 2
    for room, left in ((5, 4), (7, 4), (8, 3)):
        cache.tiers.make_host_room(room)
        assert cached(cache, 1, 2, 3, 4, 5) == (0, left)
    cache.expire(10)
    assert cache.tiers.retention.quota.held == {} and not cache.is_retaining


def test_recovered_pages_are_retained_no_longer_than_those_above_them() -> None:
    cache = new_cache()
    first = run_of(cache, [1], until_s=10)
    second = run_of(cache, [2], until_s=99, above=first)
    third = run_of(cache, [3], until_s=-7, above=second)
    cache.recover([first, second, third])
    assert [node.retained_until_s for node in cache.tree.nodes()] == [10, 10, 0]


@dataclass(eq=False)
class Retained:
    """As nodes and tails, which have no order."""

    retained_until_s: int


def test_ends_out_of_date_are_dropped_and_those_of_one_time_are_all_taken() -> None:
    """Of one whose end moves on, and of many that end at once, added before all are made anew and after."""
    retained: list[Any] = [Retained(retained_until_s=0)]
    num_made = 0

    def all_of_them() -> list[Any]:
        nonlocal num_made
        num_made += 1
        return retained

    ends, (moving,) = RetentionEnds[Any](all_of_them), retained
    for until_s in range(10, 4 * MIN_SWEEP):
        moving.retained_until_s = until_s
        ends.add(moving)
        assert len(ends) <= MIN_SWEEP
    others = [Retained(retained_until_s=9) for _ in range(MIN_SWEEP + MIN_SWEEP // 2)]
    for each in others:
        retained.append(each)
        ends.add(each)
    assert 4 <= num_made <= 8
    assert {id(each) for each in ends.take(9)} == {id(each) for each in others}
    assert list(ends.take(8)) == []
