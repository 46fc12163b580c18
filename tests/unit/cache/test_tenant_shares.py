"""Tenants and their shares of each tier: a flood costs others nothing below their share, and unused shares are lent."""

from __future__ import annotations

import pytest

from hiserve.cache.index.eviction import MAX_ACCOUNTS, MAX_IDLE_TURNOVERS
from hiserve.cache.index.prefix_cache import PrefixCache
from tests.helpers.tiers import cached, lock, new_cache, run_of, serve, store, take
from tests.invariants.tier_model import ints

NUM_PAGES = 40


def flood(cache: PrefixCache, num_pages: int, tenant: bytes = b"flood", first: int = 1000) -> None:
    for page in range(first, first + num_pages):
        cache.release(serve(cache, page, tenant=tenant))
        store(cache)


def num_found(cache: PrefixCache, num_pages: int, tenant: bytes) -> tuple[int, int]:
    """Returns how many of a tenant's first one-page prompts are on the device, and on the host alone."""
    found = [cached(cache, page, tenant=tenant) for page in range(1, num_pages + 1)]
    return sum(device for device, _ in found), sum(host for _, host in found)


def test_a_flood_leaves_others_their_share_of_the_device() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 19, b"calm", first=1)  # of 40 pages one is being computed
    flood(cache, 10 * NUM_PAGES)
    assert num_found(cache, 19, b"calm") == (19, 0)


def test_what_is_more_than_the_share_goes_oldest_first() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 30, b"calm", first=1)
    flood(cache, 10 * NUM_PAGES)
    kept = [page for page in range(1, 31) if cached(cache, page, tenant=b"calm")[0]]
    assert kept == list(range(12, 31))


def test_a_flood_leaves_others_their_share_of_both_tiers() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=NUM_PAGES + 1)
    flood(cache, 35, b"calm", first=1)
    flood(cache, 20 * NUM_PAGES)
    device, host = num_found(cache, 35, b"calm")
    assert device + host == 35, "half of each tier is its share"


def test_a_share_that_nobody_uses_is_lent() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 3, b"calm", first=1)
    flood(cache, 37, b"other", first=1)
    assert num_found(cache, 37, b"other") == (37, 0) and num_found(cache, 3, b"calm") == (3, 0)


def test_one_tenant_evicts_as_if_there_were_no_shares() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 3 * NUM_PAGES, first=1)
    kept = [page for page in range(1, 3 * NUM_PAGES + 1) if cached(cache, page, tenant=b"flood")[0]]
    assert kept == list(range(2 * NUM_PAGES + 1, 3 * NUM_PAGES + 1))


def test_a_tenant_that_sends_nothing_for_long_has_no_share_any_more() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 20, b"gone", first=1)
    flood(cache, (MAX_IDLE_TURNOVERS + 2) * NUM_PAGES)
    assert num_found(cache, 20, b"gone") == (0, 0)


def test_a_tenant_without_a_share_makes_those_of_others_no_smaller() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    held = serve(cache, 1, 2, 3, 4, tenant=b"gone")  # and never released
    flood(cache, (MAX_IDLE_TURNOVERS + 2) * NUM_PAGES)
    flood(cache, 15, b"calm", first=1)
    flood(cache, 10 * NUM_PAGES)
    assert num_found(cache, 15, b"calm") == (15, 0), "a share of two, not of three"
    cache.release(held)


def test_accounts_join_what_several_tenants_have() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    for tenant in (b"a", b"b", b"c"):
        receipt = cache.lock(cache.match(tenant, bytes(4)), account=b"one")
        flood(cache, 10, tenant, first=1)
        cache.release(receipt)
    assert cache.device.shares.held == {b"one": 30}


def test_too_many_owners_have_one_share_together() -> None:
    cache = new_cache(num_pages=200, num_host_pages=0)
    for i in range(MAX_ACCOUNTS + 10):
        cache.release(serve(cache, 1, tenant=b"%d" % i))
    assert len(cache.device.shares.held) == MAX_ACCOUNTS + 1 and cache.device.shares.held[b""] == 10


@pytest.mark.parametrize("num_host_pages", [0, 30])
def test_who_holds_pages_keeps_them_whatever_its_share(num_host_pages: int) -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=num_host_pages)
    flood(cache, 30, b"calm", first=1)
    held = [lock(cache, page, tenant=b"calm") for page in range(1, 31) if cached(cache, page, tenant=b"calm")[0]]
    flood(cache, 5 * NUM_PAGES)
    assert num_found(cache, 30, b"calm")[0] == len(held)
    for receipt in held:
        cache.release(receipt)


def test_who_has_more_than_the_share_gives_first_then_who_has_more_than_the_mean_then_whoever_was_away_longest() -> (
    None
):
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 15, b"older", first=1)
    cache.release(serve(cache, *range(1, 26), tenant=b"newer"))  # a single leaf, of more than its share of 20
    cache.free(take(cache, 10))
    # 5 pages beyond the share, then 3 beyond the mean of 17; of the other 2 the oldest.
    assert cached(cache, *range(1, 26), tenant=b"newer") == (17, 0)
    assert num_found(cache, 15, b"older") == (13, 0)


def test_of_several_who_have_more_than_their_share_the_oldest_pages_go_first() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=0)
    flood(cache, 4, b"small", first=1)
    for page in range(1, 19):  # of a share of 13
        flood(cache, 1, b"odd", first=page)
        flood(cache, 1, b"even", first=page)
    cache.free(take(cache, 6))
    assert num_found(cache, 18, b"odd") == num_found(cache, 18, b"even") == (15, 0)
    assert num_found(cache, 4, b"small") == (4, 0)


def test_what_was_adopted_counts_for_its_tenant_from_its_first_request_on() -> None:
    cache = new_cache(num_pages=NUM_PAGES + 1, num_host_pages=NUM_PAGES + 1)
    runs = [run_of(ints([page]), page, tenant=b"calm") for page in range(1, 11)]
    runs += [run_of(ints([page]), page, tenant=b"other") for page in range(11, NUM_PAGES + 1)]
    assert cache.recover(runs) == NUM_PAGES
    cache.release(cache.lock(cache.match(b"calm", bytes(4))))
    cache.tiers.free_host(cache.tiers.allocate_host(10))
    assert num_found(cache, 10, b"calm") == (0, 10), "it has less than its share"
    assert set(cache.host.shares.held.values()) == {10, 20}
