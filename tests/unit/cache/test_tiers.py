"""Two tiers: what is stored and loaded when, what each end changes, and which fences an order carries."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, Tier
from hiserve.cache.index.radix import MAX_NODE_PAGES
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import CopyKind
from tests.helpers.tiers import (
    NAMESPACE,
    PAGE_SIZE,
    TENANT,
    backed,
    cached,
    demoted,
    digests,
    is_whole,
    key,
    load,
    lock,
    new_cache,
    prompt,
    run_of,
    serve,
    squeeze,
    squeeze_host,
    states,
    store,
    take,
)
from tests.invariants.index_checks import check_structure
from tests.invariants.tier_model import ints


@pytest.fixture
def cache() -> PrefixCache:
    return new_cache()


# ---- stores


def test_published_pages_are_stored_with_a_record_of_what_they_are(cache: PrefixCache) -> None:
    receipt = serve(cache, 1, 2, 3)
    (copy,) = cache.begin_offloads(99)
    assert (copy.op, copy.kind, copy.device_pages.tolist()) == (1, CopyKind.OFFLOAD, [1, 2, 3])
    assert copy.run is not None and copy.run.pages is copy.host_pages
    assert (copy.run.digests, copy.run.key) == (digests(1, 2, 3), key(1, 2, 3))
    assert copy.run.namespace == copy.run.parent == namespace_digest(NAMESPACE, TENANT)
    assert states(cache) == "DW" and cached(cache, 1, 2, 3) == (3, 0)
    cache.complete(copy.op, ok=True)
    assert states(cache) == "DH" and cache.num_arrived[CopyKind.OFFLOAD] == 3
    cache.release(receipt)


def test_without_a_host_tier_nothing_is_stored() -> None:
    cache = new_cache(num_host_pages=0)
    cache.release(serve(cache, 1, 2))
    assert cache.begin_offloads(99) == []
    squeeze(cache)
    assert cached(cache, 1, 2) == (0, 0)


def test_what_is_stored_survives_on_the_host_what_is_not_does_not(cache: PrefixCache) -> None:
    backed(cache, 1, 2)
    cache.release(serve(cache, 3, 4))
    squeeze(cache)
    assert (cached(cache, 1, 2), cached(cache, 3, 4)) == ((0, 2), (0, 0))
    assert (cache.device.num_evicted, cache.tiers.num_unbacked) == (4, 2)


def test_eviction_takes_only_what_is_short_off_the_device(cache: PrefixCache) -> None:
    backed(cache, 1, 2, 3, 4)
    for left in (3, 2, 1, 0):
        cache.free(take(cache, cache.device.pages.num_free + 1))
        assert cached(cache, 1, 2, 3, 4) == (left, 4 - left)
        check_structure(cache)
    assert states(cache) == "H", "what was taken off page by page is one run again"


def test_a_store_waits_for_the_step_that_wrote_its_pages_and_no_later_one(cache: PrefixCache) -> None:
    cache.begin_after(7)
    first = serve(cache, 1, 2, step=5)
    second = serve(cache, 8, step=6)
    assert [copy.after_step for copy in cache.begin_offloads(99)] == [5, 6]
    cache.insert(first, key(3), take(cache, 1), 7)
    cache.release(first)
    cache.release(second)


def test_a_store_takes_no_more_pages_than_it_may_and_the_rest_follows(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2, 3, 4, 5))
    cache.release(serve(cache, 8, 9))
    assert cache.begin_offloads(0) == []
    stored = [copy.run.digests for copy in store(cache, 2)]  # type: ignore[union-attr]
    path = digests(1, 2, 3, 4, 5)
    assert stored == [path[:2], digests(8, 9), path[2:4], path[4:]]
    assert states(cache) == "DH DH"


def test_a_parent_that_others_published_goes_with_its_child(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1))
    cache.release(serve(cache, 1, 2))
    cache.release(serve(cache, 1, 3))
    copies = cache.begin_offloads(99)
    assert [copy.run.digests for copy in copies] == [digests(1, 2)]  # type: ignore[union-attr]
    cache.complete(copies[0].op, ok=True)
    assert [copy.run.digests for copy in store(cache)] == [digests(1, 3)[1:]]  # type: ignore[union-attr]


def test_a_store_that_fails_leaves_the_page_on_the_device_alone(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2))
    (copy,) = cache.begin_offloads(99)
    assert cache.device.num_evictable == 0
    cache.complete(copy.op, ok=False)
    assert (states(cache), cache.device.num_evictable, cache.transfers.num_failed[CopyKind.OFFLOAD]) == ("D", 2, 2)
    assert cache.host.pages.num_free == 31 and cache.take_events(Tier.HOST) == (b"", b"")
    assert cache.begin_offloads(99) == [], "it is not tried again for its own sake"


def test_what_is_new_takes_no_room_from_what_is_nowhere_else() -> None:
    cache = new_cache(num_host_pages=4)
    demoted(cache, 1)
    demoted(cache, 2)
    backed(cache, 3, 4)
    assert [cached(cache, page) for page in (1, 2)] == [(0, 1), (0, 1)] and cached(cache, 3, 4) == (2, 0)
    assert states(cache) == "H H DH D" and not cache.has_offloads


def test_what_the_device_would_lose_next_is_stored_before_it_goes_and_the_oldest_gives_way() -> None:
    cache = new_cache(num_pages=9, num_host_pages=5)
    for page in range(20):
        cache.release(serve(cache, page))
        store(cache)
    found = [cached(cache, page) for page in range(20)]
    assert cache.tiers.num_unbacked == 0, "the device lost what was nowhere else"
    assert found[-8:] == [(1, 0)] * 8, "the device has what was used last"
    assert found[-11:-8] == [(0, 1)] * 3, "the host has what was used before, and one page that goes next"
    assert found[:-11] == [(0, 0)] * 9


def test_pages_do_not_die_while_the_host_has_room() -> None:
    """Stores are behind; what they are given first is what the device would lose next."""
    cache = new_cache(num_pages=17, num_host_pages=200)
    rng = np.random.default_rng(5)
    for turn in range(40):
        for page in range(int(rng.integers(1, 4))):
            cache.release(serve(cache, 10 * turn + page))
        for copy in cache.begin_offloads(99, 3):
            cache.complete(copy.op, ok=True)
    assert cache.device.num_evicted > 40 and cache.tiers.num_unbacked == 0


def test_what_waited_for_the_first_pages_of_its_path_is_stored_after_them() -> None:
    """The host is full: only pages that the device loses next are stored, a few at a time."""
    cache = new_cache(num_pages=33, num_host_pages=17)
    demoted(cache, *range(100, 116))
    cache.release(serve(cache, *range(6)))
    cache.release(serve(cache, *range(200, 226)))
    for number in range(3):
        (copy,) = cache.begin_offloads(2, 1)
        assert copy.run is not None and copy.run.digests == digests(*range(6))[2 * number :][:2]
        cache.complete(copy.op, ok=True)
    squeeze(cache)
    assert cached(cache, *range(6)) == (0, 6)


def test_what_is_not_worth_a_copy_is_lost_and_asks_no_more() -> None:
    cache = new_cache(num_pages=9, num_host_pages=3)
    for page in range(12):
        cache.release(serve(cache, page))
        for copy in cache.begin_offloads(99, is_worth=lambda num_pages: False):
            cache.complete(copy.op, ok=True)
    assert cache.num_arrived[CopyKind.OFFLOAD] == 2 and not cache.has_offloads


def test_what_finds_no_place_on_a_host_that_is_held_is_counted_and_lost() -> None:
    cache = new_cache(num_pages=9, num_host_pages=5)
    demoted(cache, 1, 2, 3, 4)
    held = lock(cache, 1, 2, 3, 4)
    for page in range(10, 30):
        cache.release(serve(cache, page))
        assert cache.begin_offloads(99) == []
    assert cache.transfers.num_without_room > 0 and cached(cache, 29) == (1, 0)
    cache.release(held)
    assert is_whole(cache)


def test_a_store_that_fails_does_not_keep_the_device_from_losing_the_page() -> None:
    cache = new_cache(num_pages=9, num_host_pages=5)
    for page in range(20):
        cache.release(serve(cache, page))
        for copy in cache.begin_offloads(99):
            cache.complete(copy.op, ok=False)
    assert [cached(cache, page)[0] for page in range(20)] == [0] * 12 + [1] * 8, "least recently used first"
    assert not cache.has_offloads


def test_what_the_device_has_too_leaves_the_host_first_and_what_was_used_last_before_the_others() -> None:
    cache = new_cache(num_host_pages=5)
    demoted(cache, 1)
    for page in (2, 3, 4):
        backed(cache, page)
    cache.release(lock(cache, 2))
    free = cache.host.pages.num_free
    assert free == 0 and cache.tiers.make_host_room(2) == 2
    assert states(cache) == "H D DH D", "page 3 was used before 2 and 4"
    assert cache.tiers.make_host_room(4) == 4 and states(cache) == "D D D"


def test_a_copy_that_a_running_row_has_on_the_device_may_leave_the_host() -> None:
    cache = new_cache(num_host_pages=2)
    demoted(cache, 1)
    receipt, copy = load(cache, 1)
    assert cache.tiers.make_host_room(1) == 0, "the load still reads it"
    cache.complete(copy.op, ok=True)
    assert cache.tiers.make_host_room(1) == 1 and states(cache) == "D"
    cache.release(receipt)
    assert is_whole(cache)


def test_a_page_that_another_server_computed_is_stored_again_before_the_device_loses_it() -> None:
    cache = new_cache(num_pages=9, num_host_pages=3)
    assert cache.recover([run_of(ints([1]), 50)]) == 1
    receipt, copy = load(cache, 50)
    cache.complete(copy.op, ok=True)
    cache.release(receipt)
    assert cache.tiers.make_host_room(2) == 2 and states(cache) == "D"
    for page in range(8):
        cache.release(serve(cache, page))
        store(cache)
    assert cache.tiers.num_unbacked == 0 and cached(cache, 50) == (0, 1)


def test_storing_a_page_is_no_use_of_it() -> None:
    cache = new_cache()
    cache.release(serve(cache, 1))
    cache.release(serve(cache, 2))
    (first, second) = cache.begin_offloads(99)
    cache.complete(second.op, ok=True)
    cache.complete(first.op, ok=True)
    cache.free(take(cache, cache.device.pages.num_free + 1))
    assert (cached(cache, 1), cached(cache, 2)) == ((0, 1), (1, 0))


def test_a_joined_run_is_stored_after_the_last_step_that_wrote_any_of_it() -> None:
    cache = new_cache()
    demoted(cache, 1, 2)
    cache.begin_after(9)
    row = cache.lock(cache.match(TENANT, prompt(1)))
    cache.insert(row, key(1), take(cache, 1), 9)  # computed again, over the host's copy
    second = cache.lock(cache.match(TENANT, prompt(0)))
    cache.release(row)
    cache.release(second)
    receipt, copy = load(cache, 1, 2)
    cache.complete(copy.op, ok=True)
    cache.release(receipt)
    (node,) = [node for node in cache.tree.nodes() if node.children]
    cache.tiers.join(next(iter(node.children.values())))
    assert states(cache) == "DH", "both parts lie on the same tiers and were used together"
    cache.flush(Tier.HOST)
    cache.release(lock(cache, 1, 2))
    cache.transfers.enqueue(next(iter(cache.tree.nodes())))
    assert [copy.after_step for copy in cache.begin_offloads(99)] == [9]


def test_a_run_is_stored_as_far_as_the_host_has_room() -> None:
    cache = new_cache(num_host_pages=4)
    cache.release(serve(cache, 1, 2, 3, 4, 5))
    assert sum(copy.host_pages.size for copy in store(cache)) == 3
    squeeze(cache)
    assert cached(cache, 1, 2, 3, 4, 5) == (0, 3)


def test_selective_admission_stores_what_a_second_request_uses() -> None:
    cache = new_cache(admission=HostAdmission.SELECTIVE)
    cache.release(serve(cache, 1, 2, 3))
    assert cache.begin_offloads(99) == []
    second = serve(cache, 1, 2, 9)
    assert [copy.run.digests for copy in cache.begin_offloads(99)] == [digests(1, 2)]  # type: ignore[union-attr]
    third = cache.lock(cache.match(b"", prompt(0)))
    cache.release(third)
    late = cache.lock(cache.match(b"late", prompt(0)))
    cache.release(serve(cache, 7, tenant=b"late"))
    cache.insert(late, key(7), take(cache, 1))
    (copy,) = cache.begin_offloads(99)
    assert copy.run is not None and copy.run.digests == digests(7, tenant=b"late"), "computing it again is a use, too"
    cache.release(second)


def test_selective_admission_does_not_store_what_is_new_below_a_hit() -> None:
    cache = new_cache(admission=HostAdmission.SELECTIVE)
    cache.release(serve(cache, 1))
    serve(cache, 1, 2)
    assert [copy.run.digests for copy in store(cache)] == [digests(1)]  # type: ignore[union-attr]


def test_what_waits_for_its_turn_to_be_stored_grows_meanwhile(cache: PrefixCache) -> None:
    rows = [serve(cache, page) for page in (1, 2, 3)]
    assert [copy.host_pages.size for copy in cache.begin_offloads(100, 2)] == [1, 1]
    for page, row in zip((11, 12, 13), rows, strict=True):
        cache.insert(row, key(page), take(cache, 1))
    assert [copy.host_pages.size for copy in cache.begin_offloads(100, 2)] == [2]  # the others wait for their parents
    assert not cache.begin_offloads(100, 0)


def test_the_queue_of_stores_forgets_nodes_that_are_gone(cache: PrefixCache) -> None:
    for i in range(5000):
        cache.release(serve(cache, i % 100, i // 100))
    assert len(cache.transfers._queue) <= 64
    assert {copy.run.digests[0] for copy in cache.begin_offloads(99)} <= {  # type: ignore[union-attr]
        digest for node in cache.tree.nodes() for digest in node.digests
    }


def test_after_a_flush_no_list_keeps_a_node_that_is_gone(cache: PrefixCache) -> None:
    demoted(cache, 100)
    for page in range(5):
        backed(cache, page)
        cache.release(serve(cache, page, 50 + page))
    lists = cache.device.eviction, cache.host.eviction, cache.tiers.copies, cache.transfers._queue
    assert all(len(each) > 0 for each in lists) and cache.tiers.reserve.has_candidates
    cache.flush()
    assert not any(len(each) for each in lists[:3])
    assert not cache.transfers.num_to_offload and not cache.tiers.reserve.has_candidates


def test_what_is_left_of_a_run_whose_end_was_evicted_is_stored(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2, 3))
    held = lock(cache, 1)
    squeeze(cache)
    assert [copy.run.digests for copy in store(cache)] == [digests(1)]  # type: ignore[union-attr]
    cache.release(held)


def test_pages_stored_one_by_one_become_one_node_again(cache: PrefixCache) -> None:
    cache = new_cache(num_pages=400, num_host_pages=400)
    receipt = cache.lock(cache.match(TENANT, prompt(0)))
    for page in range(MAX_NODE_PAGES + 10):
        cache.insert(receipt, key(page), take(cache, 1))
        store(cache)
        check_structure(cache)
    assert sorted(node.num_pages for node in cache.tree.nodes()) == [10, MAX_NODE_PAGES]
    cache.release(receipt)


def test_nodes_that_somebody_tells_apart_stay_apart(cache: PrefixCache) -> None:
    first = serve(cache, 1)
    store(cache)
    second = serve(cache, 1, 2)
    store(cache)
    assert states(cache) == "DH DH", "the first holds its own prefix only"
    cache.release(first)
    cache.release(second)
    squeeze(cache)
    assert cached(cache, 1, 2) == (0, 2)


# ---- loads


def test_a_load_puts_pages_on_the_device_at_once_for_those_who_wait(cache: PrefixCache) -> None:
    demoted(cache, 1, 2, 3)
    epoch = cache.tiers.tree_epoch
    receipt, copy = load(cache, 1, 2, 3)
    assert (states(cache), copy.kind, copy.run) == ("HL", CopyKind.LOAD, None)
    assert cache.tiers.tree_epoch > epoch and cached(cache, 1, 2, 3) == (3, 0)
    assert receipt.ops == {copy.op} and receipt.pages.tolist() == copy.device_pages.tolist()
    other = lock(cache, 1, 9)
    assert other.ops == {copy.op} and other.host_pages.size == 0
    early = lock(cache, 7)
    assert early.ops == set()
    assert cache.complete(copy.op, ok=True) == []
    assert not receipt.ops and not other.ops and set(states(cache).split()) == {"DH"}
    assert cache.begin_offloads(99) == [], "the host has them"
    for each in (receipt, other, early):
        cache.release(each)
    assert is_whole(cache)


def test_a_part_of_what_the_host_has_can_be_loaded(cache: PrefixCache) -> None:
    demoted(cache, 1, 2, 3)
    match = cache.match(TENANT, prompt(1, 2, 3))
    receipt = cache.lock(match, 4)
    copy = cache.begin_load(receipt, take(cache, 2))
    assert cached(cache, 1, 2, 3) == (2, 1) and copy.host_pages.size == 2
    cache.complete(copy.op, ok=True)
    cache.release(receipt)


def test_a_lock_that_wants_no_host_pages_holds_none(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    receipt = cache.lock(cache.match(TENANT, prompt(1, 2)))
    assert receipt.node.is_root and receipt.pages.size == receipt.host_pages.size == 0
    squeeze_host(cache)
    assert cached(cache, 1, 2) == (0, 0)
    cache.release(receipt)


@pytest.mark.parametrize("num_host_tokens", [-2, 1, 6])
def test_a_lock_holds_whole_pages_that_were_matched(cache: PrefixCache, num_host_tokens: int) -> None:
    demoted(cache, 1, 2)
    with pytest.raises(AssertionError):
        cache.lock(cache.match(TENANT, prompt(1, 2)), num_host_tokens)


def cache_used_in_steps() -> PrefixCache:
    """Pages 1 and 2 are on the host; steps 3 and 6 used device pages of 7 and 8."""
    cache = new_cache(num_pages=5)
    demoted(cache, 1, 2)
    for step, page in ((3, 7), (6, 8)):
        receipt = serve(cache, page)
        cache.begin_after(step)
        cache.release(receipt)
    return cache


def test_a_load_waits_for_the_last_forward_that_could_touch_its_pages() -> None:
    cache = cache_used_in_steps()
    private = take(cache, 2)
    cache.begin_after(9)
    receipt = lock(cache, 1)
    assert cache.begin_load(receipt, take(cache, 1)).after_step == 3, "page 7 was last used in step 3"
    cache.free(private)
    other = lock(cache, 1, 2)
    assert cache.begin_load(other, take(cache, 1)).after_step == 9, "these pages were in use until now"


def test_a_load_of_several_pages_waits_for_the_last_forward_of_all() -> None:
    cache = cache_used_in_steps()
    take(cache, 2)
    cache.begin_after(9)
    assert cache.begin_load(lock(cache, 1, 2), take(cache, 2)).after_step == 6, "page 8 was last used in step 6"


def test_a_request_makes_its_account_active_on_both_tiers(cache: PrefixCache) -> None:
    backed(cache, 1, 2)
    (account,) = cache.host.shares.held
    tiers = (cache.device, cache.host)

    def shares() -> list[bool]:
        return [next(tier.shares._floors())[account] > 0 for tier in tiers]

    for tier in tiers:
        tier.shares._num_given += 1000 * tier.pages.num_pages  # long without a request
    assert shares() == [False, False]
    cache.release(lock(cache, 1))
    assert shares() == [True, True]


def test_a_load_needs_a_page_for_each_host_page_of_an_open_receipt(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    receipt, pages = lock(cache, 1, 2), take(cache, 3)
    with pytest.raises(AssertionError, match="3 pages for 2"):
        cache.begin_load(receipt, pages)
    cache.release(receipt)
    with pytest.raises(AssertionError):
        cache.begin_load(receipt, pages[:2])


def test_a_load_of_what_others_loaded_meanwhile_is_refused(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    late = lock(cache, 1, 2)
    receipt, copy = load(cache, 1, 2)
    with pytest.raises(AssertionError, match="match again"):
        cache.begin_load(late, take(cache, 2))
    cache.complete(copy.op, ok=True)
    cache.release(late)
    cache.release(receipt)


def test_a_receipt_with_host_pages_to_load_cannot_publish(cache: PrefixCache) -> None:
    demoted(cache, 1)
    receipt = lock(cache, 1)
    with pytest.raises(AssertionError, match="neither loaded nor released"):
        cache.insert(receipt, key(2), take(cache, 1))


def test_a_load_in_flight_outlives_the_request_that_wanted_it(cache: PrefixCache) -> None:
    cache = new_cache(num_pages=4)
    demoted(cache, 1, 2)
    receipt, copy = load(cache, 1, 2)
    cache.release(receipt)
    assert cache.allocate(np.zeros(2, dtype=np.int32)) is None
    cache.complete(copy.op, ok=True)
    assert take(cache, 2).size == 2 and cached(cache, 1, 2) == (1, 1)


def test_a_load_that_fails_takes_what_was_computed_from_it(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    receipt, copy = load(cache, 1, 2)
    cache.insert(receipt, key(3), take(cache, 1))
    assert cache.begin_offloads(99) == [], "it may be computed from nothing"
    keeper = lock(cache, 9)
    relocations = cache.tiers.relocation_version
    assert cache.complete(copy.op, ok=False) == [receipt]
    assert receipt.pages.size == 0 and receipt.node.is_root and cached(cache, 1, 2, 3) == (0, 0)
    assert cache.tiers.relocation_version == relocations + 1
    assert cache.transfers.num_failed[CopyKind.LOAD] == 2
    cache.release(receipt)
    cache.release(keeper)
    assert is_whole(cache)


def test_a_load_that_fails_costs_nobody_the_prefix_before_it(cache: PrefixCache) -> None:
    backed(cache, 1, 2, 3)
    cache.free(take(cache, cache.device.pages.num_free + 2))
    bystander = lock(cache, 1)
    receipt, copy = load(cache, 1, 2, 3)
    before = bystander.pages.tolist()
    assert cache.complete(copy.op, ok=False) == [receipt]
    assert receipt.pages.tolist() == bystander.pages.tolist() == before
    cache.insert(receipt, key(2, 3), take(cache, 2))
    assert cached(cache, 1, 2, 3) == (3, 0)
    cache.release(receipt)
    cache.release(bystander)
    assert is_whole(cache)


def test_a_failed_load_below_one_in_flight_leaves_the_other_waiting(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    match = cache.match(TENANT, prompt(1, 2))
    first = cache.lock(match, 2)
    upper = cache.begin_load(first, take(cache, 1))
    second, lower = load(cache, 1, 2)
    assert second.ops == {upper.op, lower.op}
    assert cache.complete(lower.op, ok=False) == [second]
    assert second.ops == first.ops == {upper.op} and second.pages.size == 1
    cache.complete(upper.op, ok=True)
    cache.release(first)
    cache.release(second)


def test_a_failed_load_frees_the_pages_of_a_load_below_it_when_that_ends(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    first = cache.lock(cache.match(TENANT, prompt(1, 2)), 2)
    upper = cache.begin_load(first, take(cache, 1))
    second, lower = load(cache, 1, 2)
    cache.complete(upper.op, ok=False)
    free = set(cache.device.pages.free_pages().tolist())
    assert set(upper.device_pages.tolist()) <= free and free.isdisjoint(lower.device_pages.tolist())
    assert not second.ops and second.pages.size == 0
    assert cache.complete(lower.op, ok=True) == []
    assert cached(cache, 1, 2) == (0, 0)
    cache.release(first)
    cache.release(second)
    assert is_whole(cache)


def test_publishing_over_host_pages_gives_them_a_device_copy_and_moves_nothing(cache: PrefixCache) -> None:
    demoted(cache, 1, 2, 3)
    receipt = cache.lock(cache.match(TENANT, prompt(0)))
    pages, relocations = take(cache, 2), cache.tiers.relocation_version
    assert cache.insert(receipt, key(1, 2), pages) is pages
    assert (states(cache), cached(cache, 1, 2, 3)) == ("DH H", (2, 1))
    assert cache.tiers.relocation_version == relocations
    cache.release(receipt)
    check_structure(cache)


def test_publishing_stops_before_pages_that_are_being_loaded(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    late = cache.lock(cache.match(TENANT, prompt(0)))
    receipt, copy = load(cache, 1, 2)
    pages = take(cache, 3)
    assert cache.insert(late, key(1, 2, 3), pages).size == 0
    assert cache.device.num_evictable == 0 and late.node.is_root
    cache.complete(copy.op, ok=True)
    canonical = cache.insert(late, key(1, 2, 3), pages)
    assert canonical.tolist() == [*copy.device_pages.tolist(), pages[2]]
    for each in (late, receipt):
        cache.release(each)
    assert is_whole(cache)


# ---- flush, events, beyond the host


@pytest.mark.parametrize(
    ("tier", "expected", "num_freed"),
    [
        (None, ((0, 0), (0, 0), (1, 0)), 8),
        (Tier.DEVICE, ((0, 2), (0, 2), (1, 1)), 3),
        (Tier.HOST, ((2, 0), (0, 0), (2, 0)), 6),
    ],
)
def test_a_flush_empties_a_tier_but_for_what_is_held(
    cache: PrefixCache, tier: Tier | None, expected: tuple[tuple[int, int], ...], num_freed: int
) -> None:
    demoted(cache, 3, 4)
    backed(cache, 1, 2)
    backed(cache, 5, 6)
    held = lock(cache, 5)
    assert cache.flush(tier) == num_freed + (tier is None)
    assert tuple(cached(cache, *pages) for pages in ((1, 2), (3, 4), (5, 6))) == expected
    check_structure(cache)
    cache.release(held)
    assert is_whole(cache)


def test_what_was_in_flight_before_a_flush_ends_in_nothing(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    receipt, inward = load(cache, 1, 2)
    cache.release(receipt)
    cache.release(serve(cache, 5))
    (outward,) = cache.begin_offloads(99)
    begun = cache.store.begin_prefetch(TENANT, prompt(8), 9)
    cache.flush()
    assert not list(cache.tree.nodes())
    cache.release(serve(cache, 5))
    for op in (inward.op, outward.op):
        cache.complete(op, ok=True)
    assert begun is not None and cache.store_sync.end_prefetch(begun.op, 1) == 0
    assert (cached(cache, 1, 2), cached(cache, 5), cached(cache, 8)) == ((0, 0), (1, 0), (0, 0))
    assert states(cache) == "D" and cache.take_events(Tier.HOST)[0] == b""
    assert is_whole(cache)


def test_a_flush_of_the_host_lets_a_load_end_for_those_who_wait(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    receipt, copy = load(cache, 1, 2)
    cache.flush(Tier.HOST)
    assert states(cache) == "L" and receipt.ops == {copy.op}
    assert set(copy.host_pages.tolist()).isdisjoint(cache.host.pages.free_pages().tolist())
    cache.complete(copy.op, ok=True)
    assert states(cache) == "D" and cache.host.pages.num_free == 31 and not receipt.ops
    cache.release(receipt)


def test_events_tell_what_each_tier_can_give(cache: PrefixCache) -> None:
    links = digests(1, 2)
    joined = b"".join(links)
    cache.release(serve(cache, 1, 2))
    (outward,) = cache.begin_offloads(99)
    assert cache.take_events() == (joined, b"") and cache.take_events(Tier.HOST) == (b"", b"")
    cache.complete(outward.op, ok=True)
    assert cache.take_events(Tier.HOST) == (joined, b"")
    squeeze(cache)
    published, removed = cache.take_events()
    assert published == b"" and sorted(removed[i : i + 16] for i in (0, 16)) == sorted(links)
    receipt, inward = load(cache, 1, 2)
    assert cache.take_events() == (b"", b"")
    cache.complete(inward.op, ok=True)
    assert cache.take_events() == (joined, b"")
    cache.release(receipt)
    cache.flush(Tier.HOST)
    published, removed = cache.take_events(Tier.HOST)
    assert published == b"" and sorted(removed[i : i + 16] for i in (0, 16)) == sorted(links)


def test_freed_host_pages_are_told_before_they_are_used_again(cache: PrefixCache) -> None:
    cache = new_cache(num_host_pages=3)
    demoted(cache, 1, 2)
    assert cache.take_freed_host_pages().size == 0
    begun = cache.store.begin_prefetch(TENANT, prompt(5), 9)
    assert begun is not None and cache.take_freed_host_pages().tolist() == begun.run.pages.tolist()
    assert cache.take_freed_host_pages().size == 0


def test_a_prefetch_brings_the_pages_that_follow_and_tells_what_it_left_out() -> None:
    cache = new_cache(num_host_pages=5)
    demoted(cache, 1)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3, 4, 5, 6), 4)
    assert begun is not None and begun.run.digests == digests(1, 2, 3, 4)[1:] and begun.run.parent == digests(1)[0]
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2), 4) is None
    assert cache.store_sync.end_prefetch(begun.op, 2) == 2
    assert cached(cache, 1, 2, 3, 4) == (0, 3)
    store_sync = cache.store_sync
    assert store_sync.unfulfilled == {"host_full": 1, "in_flight": 1, "not_delivered": 1, "here_already": 0}
    assert store_sync.num_wanted == 5 and store_sync.num_prefetched == 2
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2), 4) is None, "there is nothing to fetch"
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2, 3, 4), 0) is None


def test_a_prefetch_begins_only_after_what_is_on_the_host(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1))
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2), 9) is None
    (copy,) = cache.begin_offloads(99)
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2), 9) is None
    cache.complete(copy.op, ok=True)
    assert cache.store.begin_prefetch(TENANT, prompt(1, 2), 9) is not None
    assert cache.store_sync.unfulfilled["not_backed"] == 2
    full = new_cache(num_host_pages=2)
    backed(full, 1)
    held = lock(full, 1)
    assert full.store.begin_prefetch(TENANT, prompt(8), 9) is None and len(full.tree.roots) == 1
    assert full.store.begin_prefetch(b"nobody", prompt(8), 9) is None and len(full.tree.roots) == 1
    full.release(held)


def test_prefetched_pages_that_were_computed_meanwhile_are_given_back_or_used(cache: PrefixCache) -> None:
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3), 9)
    assert begun is not None
    cache.release(serve(cache, 1))
    store(cache)
    cache.release(serve(cache, 1, 2))
    free = cache.host.pages.num_free
    assert cache.store_sync.end_prefetch(begun.op, 3) == 2
    assert cache.host.pages.num_free == free + 1, "the host had the first"
    assert cached(cache, 1, 2, 3) == (2, 1) and cache.begin_offloads(99) == []
    assert cache.store_sync.unfulfilled["here_already"] == 1
    check_structure(cache)
    assert is_whole(cache)


def test_a_place_just_prefetched_is_not_the_next_to_go() -> None:
    cache = new_cache(num_pages=4)
    backed(cache, 1)
    backed(cache, 2)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 5), 9)
    assert begun is not None and cache.store_sync.end_prefetch(begun.op, 1) == 1
    cache.free(take(cache, 2))
    assert (cached(cache, 1), cached(cache, 2)) == ((1, 0), (0, 1))
    cache.free(take(cache, 3))
    assert cached(cache, 1, 5) == (0, 2)


def test_an_aborted_prefetch_lets_go_of_its_place_but_not_of_its_pages(cache: PrefixCache) -> None:
    demoted(cache, 1)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert begun is not None
    cache.store.abort_prefetch(begun.op)
    squeeze_host(cache)
    assert cached(cache, 1) == (0, 0)
    assert set(begun.run.pages.tolist()).isdisjoint(cache.host.pages.free_pages().tolist())
    assert cache.store_sync.end_prefetch(begun.op, 1) == 0
    assert cache.store_sync.unfulfilled["place_lost"] == 1 and is_whole(cache)


def test_what_is_on_its_way_to_a_place_that_is_gone_can_be_fetched_again(cache: PrefixCache) -> None:
    demoted(cache, 1)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert begun is not None and cache.store.begin_prefetch(TENANT, prompt(1, 2), 9) is None, "it is on its way"
    cache.flush()
    again = cache.store.begin_prefetch(TENANT, prompt(2), 9)
    other = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert again is not None and other is not None
    for run in (begun, again, other):
        cache.store_sync.end_prefetch(run.op, run.run.pages.size)
    assert cached(cache, 1, 2) == (0, 2) and cached(cache, 2) == (0, 1)
    assert not cache.store_sync.is_arriving(other.run.digests[0])


def test_an_abandoned_place_is_no_place_for_what_arrives(cache: PrefixCache) -> None:
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert begun is not None and cache.store_sync.is_arriving(begun.run.digests[1])
    cache.store.abort_prefetch(begun.op)
    assert not cache.store_sync.is_arriving(begun.run.digests[1])
    again = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert again is not None
    assert cache.store_sync.end_prefetch(begun.op, 2) == 0 and cache.store_sync.is_arriving(again.run.digests[0])
    assert cache.store_sync.end_prefetch(again.op, 2) == 2


def test_uploads_keep_their_pages_and_are_as_many_as_they_may() -> None:
    cache = new_cache(max_upload_pages=2)
    backed(cache, 1, 2)
    backed(cache, 3)
    ((upload,), _) = cache.store.begin_uploads()
    assert upload.run.digests == digests(1, 2) and cache.uploads.num_waiting == 1
    assert cache.store.begin_uploads() == ([], [])
    assert not cache.uploads.has_uploads
    squeeze(cache)
    squeeze_host(cache)
    assert (cached(cache, 1, 2), cached(cache, 3)) == ((0, 2), (0, 0))
    assert (cache.uploads.num_waiting, cache.uploads.num_not_uploaded) == (0, 1)
    with pytest.raises(AssertionError, match="no prefetch"):
        cache.store.abort_prefetch(upload.op)
    cache.uploads.end_upload(upload.op)
    backed(cache, 4, 5)
    assert len(cache.store.begin_uploads()[0]) == 1


def test_a_host_page_that_is_being_uploaded_outlives_a_flush_and_its_request() -> None:
    cache = new_cache(max_upload_pages=9)
    receipt = serve(cache, 1, 2)
    store(cache)
    ((upload,), _) = cache.store.begin_uploads()
    cache.flush()
    cache.release(receipt)
    squeeze(cache)
    assert set(upload.run.pages.tolist()).isdisjoint(cache.host.pages.free_pages().tolist())
    cache.uploads.end_upload(upload.op)
    assert is_whole(cache)


def test_adopted_pages_are_found_parents_first(cache: PrefixCache) -> None:
    runs = [
        run_of(ints([7, 9]), 1, 2),
        run_of(ints([3]), 5, after=(1, 2)),
        run_of(ints([4]), 6, after=(1, 2)),
        run_of(ints([11]), 8, after=(1, 7)),
        run_of(ints([12]), 1, tenant=b"other"),
    ]
    assert cache.recover(runs) == 5
    assert [cached(cache, 1, 2, last) for last in (5, 6)] == [(0, 3), (0, 3)]
    assert cached(cache, 1, 7, 8) == (0, 1) and cached(cache, 1, tenant=b"other") == (0, 1)
    receipt = lock(cache, 1, 2, 5)
    assert receipt.host_pages.tolist() == [7, 9, 3]
    cache.release(receipt)
    assert cache.host.pages.num_free == 31 - 5
    assert len(cache.take_events(Tier.HOST)[0]) == 5 * 16
    check_structure(cache)
    assert is_whole(cache)


@pytest.mark.parametrize("page", [1, 30])
def test_adopted_pages_must_be_free_and_ready(page: int) -> None:
    cache = PrefixCache(
        num_pages=4,
        page_size=2,
        namespace=NAMESPACE,
        num_host_pages=32,
        num_ready_host_pages=16,
    )
    backed(cache, 1)
    with pytest.raises(AssertionError, match="not all free"):
        cache.recover([run_of(ints([page]), 3)])


def test_host_pages_can_be_used_when_they_are_ready() -> None:
    cache = PrefixCache(
        num_pages=16,
        page_size=2,
        namespace=NAMESPACE,
        num_host_pages=16,
        num_ready_host_pages=1,
    )
    cache.release(serve(cache, 1, 2))
    assert cache.begin_offloads(99) == []
    cache.grow_host(4)
    cache.release(serve(cache, 1, 2, 3))
    assert [copy.host_pages.tolist() for copy in cache.begin_offloads(99)] == [[1, 2, 3]]
    cache.grow_host(16)
    assert cache.host.pages.num_free == 12
    cache.grow_host(15)
    assert cache.host.pages.num_ready == 16
    with pytest.raises(AssertionError):
        cache.host.pages.grow(15)


def test_what_is_published_before_a_host_page_is_ready_waits_for_one() -> None:
    cache = PrefixCache(
        num_pages=8,
        page_size=PAGE_SIZE,
        namespace=NAMESPACE,
        num_host_pages=8,
        num_ready_host_pages=1,
    )
    cache.release(serve(cache, 1, 2))
    assert not cache.has_offloads
    assert cache.begin_offloads(10) == []
    cache.grow_host(8)
    assert cache.has_offloads
    assert [copy.device_pages.size for copy in store(cache)] == [2]
    assert not cache.has_offloads
    assert is_whole(cache)


def test_device_pages_that_a_pointless_store_reads_are_not_handed_out(cache: PrefixCache) -> None:
    """A flush of the host takes the store its purpose; it reads on, whatever leaves the device meanwhile."""
    cache.release(serve(cache, 1, 2))
    (copy,) = cache.begin_offloads(99)
    cache.flush(Tier.HOST)
    cache.flush()
    assert not list(cache.tree.nodes())
    assert set(copy.device_pages.tolist()).isdisjoint(cache.device.pages.free_pages().tolist())
    assert set(copy.host_pages.tolist()).isdisjoint(cache.host.pages.free_pages().tolist())
    cache.complete(copy.op, ok=True)
    assert is_whole(cache)


def test_a_flush_leaves_the_offload_of_a_locked_prefix_waiting() -> None:
    cache = new_cache()
    held = serve(cache, 1, 2)
    cache.flush()
    store(cache)
    cache.release(held)
    squeeze(cache)
    assert cached(cache, 1, 2) == (0, 2)
