"""Why a prompt was not found any further: each reason, and what it does not tell."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.miss_reasons import LostPages, Miss
from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, Tier
from hiserve.cache.index.radix import RadixTree
from hiserve.core.digest import pack_tokens
from tests.helpers.tiers import (
    PAGE_SIZE,
    TENANT,
    backed,
    cached,
    demoted,
    load,
    lock,
    new_cache,
    prompt,
    serve,
    squeeze,
    squeeze_host,
    take,
)


@pytest.fixture
def cache() -> PrefixCache:
    return new_cache()


def miss(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> tuple[str, int]:
    """Returns why a prompt that takes all that is cached of it finds no more."""
    found = cache.explain(tenant, prompt(*pages), sum(cached(cache, *pages, tenant=tenant)) * PAGE_SIZE)
    return found.reason.value, found.num_tokens


def test_nothing_was_cached_before(cache: PrefixCache) -> None:
    assert miss(cache, 1, 2) == ("cold", 0)
    backed(cache, 7)
    assert miss(cache, 1, 2) == ("cold", 0)


def test_what_follows_a_cached_prompt_is_new(cache: PrefixCache) -> None:
    backed(cache, 1, 2)
    assert miss(cache, 1, 2, 3) == ("cold", 4)


def test_all_whole_pages_were_found(cache: PrefixCache) -> None:
    backed(cache, 1, 2)
    assert miss(cache, 1, 2) == ("page_remainder", 4)
    assert miss(cache) == ("page_remainder", 0)


def test_others_went_on_differently(cache: PrefixCache) -> None:
    backed(cache, 1, 2, 3)
    assert miss(cache, 1, 9, 9) == ("diverged_at", 2)
    backed(cache, 1, 2, 4)
    assert miss(cache, 1, 2, 5) == ("diverged_at", 4)


def test_where_others_went_on_differently_is_told_to_the_token(cache: PrefixCache) -> None:
    receipt = lock(cache)
    cache.insert(receipt, pack_tokens(np.array([5, 6, 5, 7])), take(cache, 2))
    for tokens, expected in (([5, 8, 0], 1), ([5, 6, 5, 8, 0], 3), ([5, 6, 8, 7, 0], 2)):
        key = pack_tokens(np.array(tokens))
        num_used = cache.match(TENANT, key).num_tokens
        assert cache.explain(TENANT, key, num_used) == Miss(MissReason.DIVERGED, expected)
    cache.release(receipt)


def test_of_many_others_the_closest_tells_where_a_prompt_diverged() -> None:
    rng, tree = np.random.default_rng(3), RadixTree(4)
    for _ in range(100):
        pages, page = rng.integers(0, 3, (rng.integers(1, 33), 4)), rng.integers(0, 3, 4)
        expected = max(next((at for at in range(4) if other[at] != page[at]), 4) for other in pages)
        assert tree.closest([pack_tokens(other) for other in pages], pack_tokens(page)) == expected


def test_what_was_evicted_is_remembered_on_every_way_out(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2))
    squeeze(cache)
    assert miss(cache, 1, 2) == ("evicted", 0)
    demoted(cache, 3, 4)
    squeeze_host(cache)
    assert miss(cache, 3, 4) == ("evicted", 0)
    backed(cache, 5)
    cache.flush()
    assert miss(cache, 5) == ("evicted", 0)
    demoted(cache, 6, 7)
    receipt, copy = load(cache, 6, 7)
    cache.complete(copy.op, ok=False)
    assert miss(cache, 6, 7) == ("evicted", 0)
    cache.release(receipt)


def test_an_evicted_tail_is_remembered_too() -> None:
    cache = new_cache(num_pages=5, num_host_pages=0)
    cache.release(serve(cache, 1, 2, 3))
    for left in (2, 1):
        cache.free(take(cache, cache.device.pages.num_free + 1))
        assert miss(cache, 1, 2, 3) == ("evicted", left * PAGE_SIZE)


def test_what_comes_from_the_store_is_in_flight(cache: PrefixCache) -> None:
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2), 1)
    assert begun is not None and miss(cache, 1, 2) == ("in_flight", 0)
    cache.store_sync.end_prefetch(begun.op, 1)
    assert miss(cache, 1, 2) == ("cold", 2)


def test_what_a_store_has_and_nobody_brought_is_neither_cold_nor_evicted(cache: PrefixCache) -> None:
    def reason(*pages: int, num_used: int) -> MissReason:
        return cache.explain(TENANT, prompt(*pages), num_used, is_in_store=True).reason

    assert reason(1, 2, num_used=0) is MissReason.NOT_FETCHED
    backed(cache, 1)
    assert cache.explain(TENANT, prompt(1, 2), 2, is_in_store=True) == Miss(MissReason.NOT_FETCHED, 2)
    assert reason(1, num_used=2) is MissReason.PAGE_REMAINDER
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2), 1)
    assert begun is not None and reason(1, 2, num_used=2) is MissReason.IN_FLIGHT
    cache.store_sync.end_prefetch(begun.op, 0)


@pytest.mark.parametrize("way", ["flush", "flush of the host", "eviction"])
def test_what_was_lost_is_remembered_though_others_cached_its_beginning_again(way: str) -> None:
    """A common beginning comes back with the first who asks for it; what others had after it was lost no less."""
    cache = new_cache(num_host_pages=32 if way == "flush of the host" else 0)
    if way == "flush of the host":
        demoted(cache, 1, 2, 3)
        demoted(cache, 1, 2, 4)
        cache.flush(Tier.HOST)
    else:
        cache.release(serve(cache, 1, 2, 3))
        cache.release(serve(cache, 1, 2, 4))
        if way == "flush":
            cache.flush()
        else:
            squeeze(cache)
    for pages in ((1, 2, 3), (1, 2, 4)):
        assert miss(cache, *pages) == ("evicted", 0)
    cache.release(serve(cache, 1, 2, 9))
    for pages in ((1, 2, 3), (1, 2, 4)):
        assert miss(cache, *pages) == ("evicted", 2 * PAGE_SIZE)
    cache.release(serve(cache, 1, 2, 3))
    assert miss(cache, 1, 2, 3) == ("page_remainder", 3 * PAGE_SIZE)
    assert miss(cache, 1, 2, 8) == ("diverged_at", 2 * PAGE_SIZE)


def test_what_was_left_on_the_host_was_not_worth_loading(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    assert cache.explain(TENANT, prompt(1, 2), 0) == Miss(MissReason.NOT_WORTH_LOADING, 0)
    assert cache.explain(TENANT, prompt(1, 2, 3), 2) == Miss(MissReason.NOT_WORTH_LOADING, 2)


def test_a_namespace_without_pages_is_told_apart_but_not_what_others_hold(cache: PrefixCache) -> None:
    backed(cache, 1, 2)
    assert miss(cache, 1, 2, tenant=b"other") == miss(cache, 8, 9, tenant=b"other") == ("namespace", 0)


def test_only_so_many_digests_are_remembered() -> None:
    recent = LostPages(3)
    recent.add([b"a", b"b", b"c"])
    recent.add([b"a", b"d"])
    assert len(recent) == 3
    assert [digest in recent for digest in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
