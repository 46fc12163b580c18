"""The manager: locks, publishing, eviction and versions, one promise at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.cache.index.radix import MAX_NODE_PAGES
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.plan import Int32Array

PAGE_SIZE = 2
TENANT = b"tenant"


def key(*pages: int) -> bytes:
    """Packs one page per number."""
    return pack_tokens(np.array([[page, page] for page in pages], dtype=np.int32))


def prompt(*pages: int) -> bytes:
    """Packs whole pages and the one token that is never cached."""
    return key(*pages) + bytes(4)


def new_cache(num_pages: int = 32, namespace: bytes = b"model") -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=PAGE_SIZE, namespace=namespace)


def take(cache: PrefixCache, count: int) -> Int32Array:
    pages = cache.allocate(np.zeros(count, dtype=np.int32))
    assert pages is not None
    return pages


def serve(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> PrefixLock:
    """Locks what is cached of a prompt, publishes the rest, and hands the lock over."""
    lock = cache.lock(cache.match(tenant, prompt(*pages)))
    new = pages[lock.pages.size :]
    cache.insert(lock, key(*new), take(cache, len(new)))
    return lock


def cached(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> int:
    """Returns how many pages of a prompt are cached."""
    return cache.match(tenant, prompt(*pages)).num_tokens // PAGE_SIZE


@pytest.fixture
def cache() -> PrefixCache:
    return new_cache()


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6)])
def test_the_last_token_of_a_prompt_is_left_to_compute(cache: PrefixCache, num_tokens: int, expected: int) -> None:
    cache.release(serve(cache, 1, 2, 3))
    assert cache.match(TENANT, prompt(1, 2, 3)[: 4 * num_tokens]).num_tokens == expected


def test_tenants_and_namespaces_do_not_see_each_other(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2))
    assert (cached(cache, 1, 2), cached(cache, 1, 2, tenant=b"other")) == (2, 0)
    events = []
    for namespace in (b"model", b"other"):
        other = new_cache(namespace=namespace)
        serve(other, 1, 2)
        events.append(other.take_events()[0])
    assert cache.take_events()[0] == events[0] != events[1]


def test_matching_makes_nothing(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2, 3))
    before = [(id(node), node.last_used) for node in cache.tree.nodes()]
    for i in range(1000):
        cache.match(b"tenant %d" % i, prompt(1, 2))
        cache.match(TENANT, prompt(1, 2))
    assert [(id(node), node.last_used) for node in cache.tree.nodes()] == before
    assert len(cache.tree.roots) == 1


def test_a_receipt_tells_where_the_prefix_lies(cache: PrefixCache) -> None:
    pages = take(cache, 3)
    with cache.lock(cache.match(TENANT, prompt(1, 2, 3))) as receipt:
        assert receipt.pages.size == 0
        cache.insert(receipt, key(1, 2, 3), pages)
    with cache.lock(cache.match(TENANT, prompt(1, 2, 9))) as lock:
        assert lock.pages.tolist() == pages[:2].tolist()


def test_a_match_from_before_the_tree_changed_is_refused(cache: PrefixCache) -> None:
    changes = [lambda: cache.release(serve(cache, 1, 2)), lambda: cache.release(serve(cache, 1, 3)), cache.flush]
    for change in changes:
        match = cache.match(TENANT, prompt(1, 2))
        change()
        with pytest.raises(AssertionError, match="match again"):
            cache.lock(match)
    assert cache.device.num_evictable == 0 and not cache.tree.roots


def test_taking_free_pages_makes_no_match_stale_but_eviction_does() -> None:
    cache = new_cache(num_pages=5)
    cache.release(serve(cache, 1, 2))
    match = cache.match(TENANT, prompt(1))
    take(cache, 2)
    cache.release(cache.lock(match))
    take(cache, 1)
    with pytest.raises(AssertionError, match="match again"):
        cache.lock(match)


def test_an_older_match_survives_splits_by_other_locks(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2, 3, 4, 5))
    matches = [cache.match(TENANT, prompt(*range(1, 1 + n))) for n in range(6)]
    receipts = [cache.lock(matches[n]) for n in (2, 4, 1, 3, 5, 0, 2)]
    assert [lock.pages.size for lock in receipts] == [2, 4, 1, 3, 5, 0, 2]
    for lock in receipts:
        cache.release(lock)
    assert cache.device.num_evictable == 5


def test_a_lock_holds_across_splits_of_its_node() -> None:
    cache = new_cache(num_pages=5)
    whole = serve(cache, 1, 2, 3, 4)
    for pages in [(1, 2, 3), (1,), (1, 2)]:
        cache.release(cache.lock(cache.match(TENANT, prompt(*pages))))
    assert cache.device.num_evictable == 0 and cache.allocate(np.zeros(1, dtype=np.int32)) is None
    cache.release(whole)
    assert cache.device.num_evictable == 4 and all(node.num_locks == 0 for node in cache.tree.nodes())


def test_two_locks_are_two_releases(cache: PrefixCache) -> None:
    first = serve(cache, 1, 2)
    second = cache.lock(cache.match(TENANT, prompt(1, 2)))
    cache.release(first)
    assert cache.device.num_evictable == 0
    cache.release(second)
    assert cache.device.num_evictable == 2


def test_a_receipt_is_released_once(cache: PrefixCache) -> None:
    first, second = serve(cache, 1), serve(cache, 1)
    cache.release(first)
    with pytest.raises(AssertionError, match="released before"):
        cache.release(first)
    assert second.is_open and cache.device.num_evictable == 0


def test_leaving_a_lock_releases_it(cache: PrefixCache) -> None:
    with cache.lock(cache.match(TENANT, prompt(1))) as lock:
        assert lock.is_open
    assert not lock.is_open and not cache.tree.roots


def test_an_error_inside_a_lock_returns_it_even_if_kept(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1))
    left, kept = cache.lock(cache.match(TENANT, prompt(1))), cache.lock(cache.match(TENANT, prompt(1))).detach()
    for lock in (left, kept):
        with pytest.raises(KeyError), lock:
            raise KeyError
        assert not lock.is_open
    assert cache.device.num_evictable == 1


def test_a_kept_lock_outlives_its_block(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1))
    with cache.lock(cache.match(TENANT, prompt(1))) as lock:
        assert lock.detach() is lock
    assert lock.is_open and cache.device.num_evictable == 0
    cache.release(lock)


def test_a_lock_released_inside_its_block_is_not_released_again(cache: PrefixCache) -> None:
    with cache.lock(cache.match(TENANT, prompt(1))) as lock:
        cache.release(lock)
    assert not lock.is_open


def test_roots_of_tenants_who_left_nothing_are_dropped(cache: PrefixCache) -> None:
    for i in range(1000):
        cache.release(cache.lock(cache.match(b"tenant %d" % i, prompt(1))))
    assert not cache.tree.roots


def test_roots_of_tenants_whose_pages_were_evicted_are_dropped() -> None:
    cache = new_cache(num_pages=5)
    for i in range(100):
        cache.release(serve(cache, 1, tenant=b"tenant %d" % i))
        assert len(cache.tree.roots) <= 4


def test_a_match_of_a_root_that_was_dropped_and_made_again_leads_to_the_new_one(cache: PrefixCache) -> None:
    old = cache.match(TENANT, prompt(1))
    cache.release(cache.lock(old))
    first, second = cache.lock(cache.match(TENANT, prompt(1))), cache.lock(old)
    assert first.node is second.node
    cache.insert(first, key(1), take(cache, 1))
    assert cached(cache, 1) == 1
    cache.release(second)
    assert cached(cache, 1) == 1


def test_published_pages_are_found_at_once_and_count_as_locked(cache: PrefixCache) -> None:
    lock = serve(cache, 1, 2)
    assert (cached(cache, 1, 2), cache.device.num_evictable) == (2, 0)
    cache.insert(lock, key(3), take(cache, 1))
    assert (cached(cache, 1, 2, 3), cache.device.num_evictable) == (3, 0)
    cache.release(lock)
    assert cache.device.num_evictable == 3


def test_new_pages_are_used_as_they_are_and_move_nothing(cache: PrefixCache) -> None:
    epoch, relocations = cache.tiers.tree_epoch, cache.tiers.relocation_version
    lock, pages = cache.lock(cache.match(TENANT, prompt(1, 2))), take(cache, 2)
    assert cache.insert(lock, key(1, 2), pages).tolist() == pages.tolist()
    assert cache.tiers.tree_epoch > epoch and cache.tiers.relocation_version == relocations


def test_copies_of_cached_pages_are_given_back_and_the_cached_ones_used() -> None:
    cache = new_cache()
    late = cache.lock(cache.match(TENANT, prompt(1, 2, 3)))
    serve(cache, 1, 2, 9)
    copies, free = take(cache, 3), cache.device.pages.num_free
    with cache.lock(cache.match(TENANT, prompt(1, 2, 9))) as lock:
        there = lock.pages[:2].tolist()
    relocations = cache.tiers.relocation_version
    assert cache.insert(late, key(1, 2, 3), copies).tolist() == [*there, copies[2]]
    assert cache.tiers.relocation_version == relocations + 1
    assert cache.device.pages.num_free == free + 2 and set(copies[:2]) <= set(cache.device.pages.free_pages())
    assert cached(cache, 1, 2, 3) == cached(cache, 1, 2, 9) == 3


def test_publishing_under_unlocked_pages_locks_them(cache: PrefixCache) -> None:
    late = cache.lock(cache.match(TENANT, prompt(1, 2)))
    cache.release(serve(cache, 1, 2, 3))
    assert cache.device.num_evictable == 3
    cache.insert(late, key(1, 2), take(cache, 2))
    assert cache.device.num_evictable == 1
    cache.flush()
    assert cached(cache, 1, 2, 3) == 2


def test_publishing_nothing_changes_nothing(cache: PrefixCache) -> None:
    lock = serve(cache, 1)
    versions = cache.tiers.tree_epoch, cache.tiers.relocation_version
    assert cache.insert(lock, b"", np.empty(0, dtype=np.int32)).size == 0
    assert (cache.tiers.tree_epoch, cache.tiers.relocation_version) == versions


def test_publishing_needs_an_open_receipt_and_a_page_for_each_page_of_the_key(cache: PrefixCache) -> None:
    lock, pages = serve(cache, 1), take(cache, 2)
    with pytest.raises(AssertionError):
        cache.insert(lock, key(2), pages)
    cache.release(lock)
    with pytest.raises(AssertionError):
        cache.insert(lock, key(2, 3), pages)


def test_decode_grows_one_node_until_it_is_full(cache: PrefixCache) -> None:
    cache = new_cache(num_pages=3 * MAX_NODE_PAGES)
    lock = cache.lock(cache.match(TENANT, prompt(0)))
    for page in range(MAX_NODE_PAGES + 2):
        cache.insert(lock, key(page), take(cache, 1))
    assert sorted(node.pages.size for node in cache.tree.nodes()) == [2, MAX_NODE_PAGES]


def test_a_node_that_two_hold_is_not_grown_under_the_other(cache: PrefixCache) -> None:
    first, second = serve(cache, 1), serve(cache, 1)
    cache.insert(first, key(2), take(cache, 1))
    cache.release(first)
    assert cache.device.num_evictable == 1, "the other's lock covers its own prefix only"
    cache.insert(second, key(3), take(cache, 1))
    cache.flush()
    assert (cached(cache, 1, 3), cached(cache, 1, 2)) == (2, 1)


def test_taking_more_than_can_be_freed_is_an_answer_and_evicts_nothing() -> None:
    cache = new_cache(num_pages=6)
    cache.release(serve(cache, 1, 2))
    held = serve(cache, 3)
    epoch = cache.tiers.tree_epoch
    assert cache.allocate(np.zeros(5, dtype=np.int32)) is None
    assert (cached(cache, 1, 2), cache.device.pages.num_free, cache.tiers.tree_epoch) == (2, 2, epoch)
    assert sorted(take(cache, 4)) == [1, 2, 4, 5]
    assert (cached(cache, 1, 2), cached(cache, 3)) == (0, 1)
    cache.release(held)


def test_only_what_is_short_is_evicted_from_the_tail_of_a_leaf() -> None:
    cache = new_cache(num_pages=6)
    cache.release(serve(cache, 1, 2, 3, 4, 5))
    for left in (4, 3, 2):
        take(cache, 1)
        assert (cached(cache, 1, 2, 3, 4, 5), cache.device.num_evictable) == (left, left)
    assert cache.device.num_evicted == 3


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = new_cache(num_pages=4)
    for page in (1, 2, 3):
        cache.release(serve(cache, page))
    cache.release(serve(cache, 1))
    take(cache, 1)
    assert [cached(cache, page) for page in (1, 2, 3)] == [1, 0, 1]
    take(cache, 1)
    assert [cached(cache, page) for page in (1, 2, 3)] == [1, 0, 0]


def test_a_leaf_held_for_long_counts_as_used_when_it_is_released() -> None:
    cache = new_cache(num_pages=3)
    held = serve(cache, 1)
    cache.release(serve(cache, 2))
    cache.release(held)
    take(cache, 1)
    assert [cached(cache, page) for page in (1, 2)] == [1, 0]


def test_a_shared_prefix_goes_after_its_branches() -> None:
    cache = new_cache(num_pages=4)
    for branch in (2, 3):
        cache.release(serve(cache, 1, branch))
    take(cache, 2)
    assert (cached(cache, 1), cached(cache, 1, 2), cached(cache, 1, 3)) == (1, 1, 1)
    take(cache, 1)
    assert cached(cache, 1) == 0 and not cache.tree.roots


def test_a_wish_reaches_the_allocator_and_owners_are_kept(cache: PrefixCache) -> None:
    pages = cache.allocate(np.array([9, 0], dtype=np.int32))
    assert pages is not None and pages.tolist() == [9, 1]
    assert cache.device.pages.owner[pages].tolist() == [1, 2]


def test_unpublished_pages_go_back_once(cache: PrefixCache) -> None:
    pages = take(cache, 2)
    cache.free(pages)
    assert cache.device.pages.num_free == 31
    with pytest.raises(AssertionError, match="not all in use"):
        cache.free(pages)


def test_flush_empties_all_but_what_is_locked(cache: PrefixCache) -> None:
    held = serve(cache, 1, 2)
    cache.release(serve(cache, 1, 2, 3, 4))
    cache.release(serve(cache, 5, tenant=b"other"))
    assert cache.flush() == 3
    assert (cached(cache, 1, 2, 3, 4), cache.device.num_evicted, cache.device.pages.num_free) == (2, 3, 29)
    epoch = cache.tiers.tree_epoch
    assert cache.flush() == 0 and cache.tiers.tree_epoch == epoch
    cache.release(held)
    assert cache.flush() == 2 and cache.device.pages.num_free == 31 and not cache.tree.roots


def test_endless_use_of_one_prefix_keeps_the_eviction_queue_small(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2))
    for _ in range(3000):
        cache.release(cache.lock(cache.match(TENANT, prompt(1, 2))))
    assert len(cache.device.eviction) <= 1024  # type: ignore[attr-defined]
    assert cache.flush() == 2


def test_events_name_pages_that_came_and_went_since_last_asked(cache: PrefixCache) -> None:
    root = namespace_digest(b"model", TENANT)
    digests = chain(root, key(1, 2, 3), PAGE_SIZE)
    cache.release(serve(cache, 1, 2, 3))
    assert cache.take_events() == (b"".join(digests), b"")
    assert cache.take_events() == (b"", b"")
    cache.flush()
    published, removed = cache.take_events()
    assert published == b"" and sorted(removed[i : i + 16] for i in range(0, len(removed), 16)) == sorted(digests)
    cache.release(serve(cache, 1, 2, 3))
    cache.take_events()
    take(cache, cache.device.pages.num_free + 1)
    assert cache.take_events() == (b"", digests[-1])


def test_what_came_and_went_or_went_and_came_back_is_not_reported(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1))
    cache.flush()
    assert cache.take_events() == (b"", b"")
    cache.release(serve(cache, 1))
    cache.take_events()
    cache.flush()
    cache.release(serve(cache, 1))
    assert cache.take_events() == (b"", b"")
