"""The cache index: pages, locks, eviction, versions, shares."""

from hiserve.cache.index import allocator, eviction, miss_reasons, prefixes, radix, retention, tiers, transfers
from hiserve.cache.storage import cache_identity
from hiserve.core import digest
from tests.invariants import test_index_machine
from tests.unit.cache import test_allocator, test_eviction, test_miss_reasons, test_prefix_cache, test_radix, test_tenant_shares, test_tiers
from tests.unit.cache import test_retention as test_retained_pages
from tests.unit.core import test_digest
from tests.unit.engine import test_retention
from tests.unit.storage import test_host_segment

with allocator.PageAllocator.__init__, test_allocator.test_a_wish_for_the_sink_or_a_used_page_or_one_outside_the_pool_is_no_wish:
    "INV 2: the padding page is allocated"
    self._is_free[PADDING_PAGE] = False
    pass
with allocator.PageAllocator.free, test_allocator.test_giving_a_page_twice_at_once_is_our_own_fault:
    "INV 2: one call frees a page twice"
    assert np.unique(pages).size == pages.size, f"a page is freed twice in {pages}"
    pass
with allocator.PageAllocator._number, test_allocator.test_each_allocation_of_a_page_has_a_number_of_its_own:
    "INV 9: two allocations have the same owner number"
    self._num_taken += pages.size
    pass
with radix.RadixTree.common_pages, test_radix.test_find_stops_where_tokens_differ_and_counts_whole_pages:
    "INV 3: half a page matches"
    self.common_tokens(edge, key, offset) // self.page_size
    -(-self.common_tokens(edge, key, offset) // self.page_size)
with prefixes.Prefixes.usable, test_prefix_cache.test_the_last_token_of_a_prompt_is_left_to_compute:
    "INV 4: the last token of a prompt comes from the cache"
    len(key) // 4 - 1
    len(key) // 4
with prefixes.Prefixes.release, test_prefix_cache.test_a_receipt_is_released_once:
    "INV 5: a lock is released twice"
    assert lock.is_open, "this lock was released before"
    pass
with radix.RadixTree.split, test_prefix_cache.test_a_lock_holds_across_splits_of_its_node:
    "INV 5: a split drops the locks of its upper part"
    upper.num_locks = node.num_locks
    pass
with eviction.LeafHeap._counts, test_eviction.test_what_is_locked_has_children_or_is_gone_is_passed_over:
    "INV 6: a locked leaf is evicted"
    is_current and self._is_victim(node)
    is_current
with prefixes.Prefixes.root, test_prefix_cache.test_tenants_and_namespaces_do_not_see_each_other:
    "INV 7, TC-70: tenants share cached pages"
    namespace_digest(self._namespace, tenant)
    namespace_digest(self._namespace)
with prefixes.Prefixes.insert, test_prefix_cache.test_copies_of_cached_pages_are_given_back_and_the_cached_ones_used:
    "INV 8: moving a page of a running row does not raise relocation_version"
    self._tiers.relocation_version += 1
    pass
with transfers.Transfers._fail_load, test_tiers.test_a_load_that_fails_takes_what_was_computed_from_it:
    "INV 8: losing pages of a failed load does not raise relocation_version"
    self._tiers.relocation_version += bool(lost)
    pass
with tiers.CacheTiers.evict, test_prefix_cache.test_taking_free_pages_makes_no_match_stale_but_eviction_does:
    "INV 8: eviction does not raise tree_epoch"
    self.tree_epoch += 1
    pass
with tiers.CacheTiers._delete, test_prefix_cache.test_events_name_pages_that_came_and_went_since_last_asked:
    "INV 14: evicted pages send no event"
    self.device.remove(digests)
    pass
with digest.chain_of, test_digest.test_a_store_wants_the_chain_that_nobody_can_make_collide:
    "with a store, digests are not collision resistant"
    strong_chain if is_strong else chain
    chain
with cache_identity.identify, test_host_segment.test_digests_know_the_secret_of_a_name_and_nothing_else_has_one:
    "digests do not contain the secret"
    server_secret(settings, directory)
    b""
with eviction.TenantShares.next, test_tenant_shares:
    "INV 70: tenants have no share of a tier"
    len(self._held) <= 1
    len(self._held) <= 1000
with eviction.AccountHeaps.add, test_tenant_shares.test_what_was_adopted_counts_for_its_tenant_from_its_first_request_on:
    "INV 70: an adopted page counts for its former owner"
    leaf.account == account and is_victim(leaf)
    is_victim(leaf)
with (
    tiers.CacheTiers.make_host_room,
    test_tiers.test_what_the_device_has_too_leaves_the_host_first_and_what_was_used_last_before_the_others,
):
    "INV 69: the host evicts a page that only it holds before one that the device holds too"
    self._free_copies(short, keeps_tails=keeps_tails)
    False
with tiers.CacheTiers._delete, test_miss_reasons.test_what_was_evicted_is_remembered_on_every_way_out:
    "miss reasons: pages evicted from the device are not remembered"
    self.lost.add(digests)
    pass
with miss_reasons.explain, test_miss_reasons.test_a_namespace_without_pages_is_told_apart_but_not_what_others_hold:
    "miss reasons: a tenant learns that others hold its tokens"
    return Miss(MissReason.NAMESPACE if tree.roots.keys() - {root.digests[0]} else MissReason.COLD, 0)
    others = any(rest[:page_bytes] in other.children for other in tree.roots.values())
    return Miss(MissReason.NAMESPACE if others else MissReason.COLD, 0)
with eviction.LeafHeap.add, test_eviction.test_the_heap_stays_bounded_under_endless_use:
    "the order of eviction keeps every entry that is out of date"
    len(self._heap) >= self._sweep_at
    False
with eviction.LeafHeap.sweep, test_eviction.test_a_sweep_keeps_what_nobody_used_since:
    "a sweep of the order of eviction loses leaves"
    self._counts(entry)
    entry[0] == self._heap[0][0]
with transfers.Transfers.sweep, test_tiers.test_a_flush_leaves_the_offload_of_a_locked_prefix_waiting:
    "a flush forgets the pages that wait for their offload"
    self._queue, deque()
    deque(), deque()
with eviction.Eviction.__init__, test_retention.test_a_retained_prefix_outlives_a_flood_until_its_time:
    "INV 77: retained pages are evicted in the order of their use"
    ("retained_until_s", "priority") if order == "priority" else ("retained_until_s",)
    ("priority",) if order == "priority" else ()
with retention.Retention.retain, test_retention.test_a_caller_retains_a_quarter_of_the_host_and_no_more:
    "INV 77: a caller retains all that it asks for"
    node.num_pages if node.retained_until_s else self.quota.room(node.account) - num_beside
    node.num_pages
with retention.Retention.expire, test_retention.test_a_retained_prefix_outlives_a_flood_until_its_time:
    "INV 77: retention has no end"
    0 < step.retained_until_s <= now_s
    False
with retention.RetentionEnds.add, test_retained_pages.test_a_prefix_that_is_used_for_ever_has_a_bounded_record:
    "INV 77: a sweep of the ends of retention loses nodes, which are then retained for ever"
    enumerate(self._retained())
    enumerate([each])
with retention.Retention.restore, test_retained_pages.test_recovered_pages_are_retained_until_the_time_that_was_recorded:
    "INV 77: recovered pages are evicted like all others"
    until_s > 0
    False
with retention.Retention.restore, test_retained_pages.test_recovered_pages_are_retained_no_longer_than_those_above_them:
    "INV 77: recovered pages are retained longer than those above them"
    min(until_s, parent.retained_until_s)
    until_s
with tiers.CacheTiers.free_host, test_retained_pages.test_a_page_that_was_freed_has_no_time_and_its_next_use_has_its_own:
    "INV 77: a page that was freed is recorded as retained"
    self.retention.host_times.drop(pages)
    pass
with radix.RadixTree.split, test_index_machine.test_retained_pages_go_last_until_their_time:
    "INV 77: the upper part of a node that is split is not retained"
    upper.retained_until_s = node.retained_until_s
    pass
with prefixes.Prefixes._insert_pages, test_index_machine.test_retained_pages_go_last_until_their_time:
    "INV 77: pages that grow a retained node are retained beyond the quota"
    not is_chosen and node.priority == path_lock.priority and not node.retained_until_s
    not is_chosen and node.priority == path_lock.priority
