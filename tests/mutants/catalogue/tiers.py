"""Copies between tiers: loads, offloads, prefetches, uploads."""

from hiserve.cache.index import eviction, locks, prefixes, radix, store_sync, tiers, transfer_ops, transfers, uploads
from hiserve.cache.storage import page_streams, transfer
from hiserve.engine import build, cache_counters, rows, tier_transfers
from tests.invariants import test_reported_bugs_costs, test_reported_bugs_index, test_reported_bugs_streams, test_tier_machine
from tests.unit.cache import test_eviction_reserve, test_tiers, test_uploads
from tests.unit.engine import test_build_host, test_cache_counters, test_executor_faults
from tests.unit.storage import test_page_streams

with prefixes.Prefixes.match, test_reported_bugs_index.test_tc_62_prompts_around_whole_pages_on_either_tier:
    "TC-62: pages of the host count as cached on the device"
    -num_beyond
    0
with rows.RowState.publish, test_reported_bugs_streams.test_tc_20_a_store_begins_when_the_forward_that_wrote_its_pages_is_done:
    "TC-20: a page is published while the forward that writes it runs"
    self.settled
    self.computed
with transfers.Transfers.begin_offloads, test_eviction_reserve.test_pages_in_use_wait_while_a_large_host_has_nothing_to_give_for_them:
    "pages in use that found no room on a large host are forgotten"
    self.enqueue(chain[-1])
    pass
with transfers.Transfers._has_room, test_eviction_reserve.test_pages_in_use_wait_while_a_large_host_has_nothing_to_give_for_them:
    "an engine asks for ever for room that a large host does not have"
    not self._is_stuck
    True
with transfers.Transfers.begin_load, test_tiers.test_a_load_of_several_pages_waits_for_the_last_forward_of_all:
    "INV 26: a load waits for the first of the forwards that may touch its pages"
    tiers.device.last_step[pages].max(initial=0)
    tiers.device.last_step[pages].min()
with transfer.TransferQueue._may_begin, test_reported_bugs_streams.test_tc_21_a_load_waits_for_the_forwards_that_may_touch_its_pages:
    "TC-21: a copy does not wait for its step"
    bool(queue) and queue[0].after_step <= self._done_step
    bool(queue)
with radix.RadixTree.split, test_reported_bugs_index.test_tc_22_a_split_of_a_pending_store_keeps_it_on_every_fragment:
    "TC-22: a split drops the pending offload of its upper part"
    upper.host_ready_op = node.host_ready_op
    pass
with (
    transfers.Transfers.begin_load,
    test_reported_bugs_index.test_tc_23_what_is_loaded_begins_after_the_device_and_ends_at_the_match,
    test_tier_machine.test_two_tiers_agree_with_the_model_and_order_every_access,
):
    "TC-23: a load starts at the wrong page"
    [node for node in path(lock.node) if node.is_on_host_only]
    [node for node in path(lock.node) if node.is_on_host_only][::-1]
with store_sync.StoreSync.begin_prefetch, test_reported_bugs_index.test_tc_25_what_a_prefetch_continues_is_no_leaf_any_more:
    "TC-25: a prefetch does not lock the node that it continues"
    self._locks.lock_host(end)
    self._locks.lock_host(next(reversed(list(path(end)))))
with transfers.Transfers._fail_load, test_reported_bugs_index.test_tc_26_pages_of_a_load_that_fails_are_freed_once_and_found_by_nobody:
    "TC-26: pages of a failed load are freed twice"
    node.pages = NO_PAGES
    pass
with locks.Locks.cut, test_reported_bugs_index.test_tc_26_pages_of_a_load_that_fails_are_freed_once_and_found_by_nobody:
    "TC-26: a row is not told that its pages were lost"
    lost.append(lock)
    pass
with transfers.Transfers._offload, test_reported_bugs_index.test_tc_29_an_order_names_the_same_pages_whatever_becomes_of_the_nodes:
    "TC-29: an offload does not lock its nodes"
    self._locks.lock(chain[-1], is_use=False)
    self._locks.lock_host(chain[-1])
with transfer_ops.TransferOps.free[1], test_reported_bugs_index.test_tc_42_host_pages_are_freed_once_at_whatever_step_a_request_ends:
    "TC-42: pages of a removed node are freed while a copy uses them"
    node.pending_op
    0
with store_sync.StoreSync.arriving_by, test_reported_bugs_index.test_tc_44_a_prefetch_that_hangs_is_given_up_and_keeps_nobody_from_another:
    "TC-44: a prefetch that was given up counts as in flight"
    0 if number and self._ops[number].lock.is_lost else number
    number
with prefixes.Prefixes._insert_pages, test_reported_bugs_index.test_tc_45_every_chunk_of_a_prefill_is_stored:
    "TC-45: the pages of a chunk are not offloaded"
    self._writes_through
    self._writes_through and end is node
with transfers.Transfers.begin_load, test_reported_bugs_index.test_tc_46_pages_that_copies_use_are_waited_for:
    "TC-46: pages that a load fills are evicted"
    self._locks.lock
    self._locks.lock_host
with transfers.Transfers.begin_load, test_reported_bugs_costs.test_tc_80_a_host_hit_costs_the_loop_no_more_when_it_is_long:
    "TC-80: ordering a load touches each of its pages"
    pages.copy()
    np.array([page.item() for page in pages], dtype=np.int32)
with transfer.TransferQueue.start, test_reported_bugs_costs.test_tc_81_a_load_is_one_order_carried_out_by_another_thread:
    "TC-81: the thread that orders a copy carries it out"
    self._queues[copy.kind].append(copy)
    self._execute(copy)
    self._queues[copy.kind].append(copy)
with transfers.Transfers.begin_offloads, test_reported_bugs_costs.test_tc_83_storing_a_node_costs_the_same_whatever_else_is_cached:
    "TC-83: each offload walks over the whole tree"
    node.is_queued = False
    _ = list(self._tiers.tree.nodes())
    node.is_queued = False
with eviction.LeafHeap.pop, test_reported_bugs_costs.test_tc_84_eviction_looks_at_what_it_evicts_and_not_at_every_leaf:
    "TC-84: each eviction looks at every leaf"
    heapq.heappop(self._heap)
    heapq.heappop(self.sweep() or self._heap)
with transfers.Transfers.begin_load, test_tiers.test_a_load_waits_for_the_last_forward_that_could_touch_its_pages:
    "INV 26: a load does not wait for the forwards that read its pages"
    int(tiers.device.last_step[pages].max(initial=0))
    0
with prefixes.Prefixes.lock, test_reported_bugs_index.test_tc_26_pages_of_a_load_that_fails_are_freed_once_and_found_by_nobody:
    "INV 26: a hit on a page being loaded does not wait for the load"
    self._ops.num_loads
    False
with cache_counters.CacheCounters.ended, test_cache_counters.test_every_wanted_page_is_fulfilled_unfulfilled_or_in_flight:
    "INV 30: pages of a failed load are in no counter"
    ended.unfulfilled[ack.reason or PLACE_LOST] += num_lost
    ended.unfulfilled[PLACE_LOST] += num_lost if ack.is_ok else 0
with tiers.CacheTiers.put_on_device, test_tiers.test_events_tell_what_each_tier_can_give:
    "INV 33: an event announces a load before it has arrived"
    not ready_op
    True
with uploads.Uploads._must_stage, test_uploads.test_a_full_host_is_passed_by:
    "uploads stop when the host is full"
    not (node.pending_op or node.host_pages.size or is_next)
    False
with (
    tier_transfers.TierTransfers.launching,
    test_executor_faults.test_stores_give_way_while_a_step_is_launched_and_no_longer_also_when_it_fails,
):
    "a launch that fails leaves offloads waiting"
    self._transfers.launch_ends()
    pass
with page_streams.PageStreams._yield_copy_engine, test_page_streams.test_every_byte_arrives_whichever_stream_runs_first:
    "INV 26: staging memory is filled again before it was emptied"
    self._kernels.wait_event(crossed)
    pass
with page_streams.PageStreams.begin, test_page_streams.test_an_offload_reads_what_was_computed_before_its_fence:
    "INV 26: an offload does not wait for the step that computes its pages"
    self._first.wait_event(fence)
    pass
with page_streams.PageStreams._pieces, test_page_streams.test_pieces_are_equal_and_nothing_is_left_to_prepare_while_one_crosses:
    "a short piece crosses before the next copy is prepared"
    -(-ours.size // num_pieces)
    self._pages_per_slot // count
with transfers.Transfers.complete, test_tiers.test_what_waited_for_the_first_pages_of_its_path_is_stored_after_them:
    "pages that waited for an offload are not among those that the device loses next"
    self._tiers.queue(_surviving(node))
    pass
with build.recover_host_pages, test_build_host.test_no_record_retains_pages_longer_than_a_request_can_ask:
    "INV 77: a forged record retains pages for ever"
    min(run.retained_until_s, latest_s)
    run.retained_until_s
with (
    eviction.EvictionReserve.is_outrun,
    test_eviction_reserve.test_where_one_step_takes_most_of_the_device_its_pages_replace_others_on_the_host,
):
    "pages that one step replaces are not on the host, or those of others are not either"
    self._host_pages.num_ready < HOST_SHARE * self._pages.num_pages
    False
