"""Layers with a window: their pages, tails and resume points."""

from hiserve.attention import reference_attention
from hiserve.cache.index import eviction, nodes, prefixes, radix, retention, tail_pool, tails, tier_pages, tiers, transfers
from hiserve.cache.storage import cuda_transfer, host, page_streams, records, transfer
from hiserve.core import memory_plan, window_pool
from hiserve.engine import admission, host_adoption, row_tails
from hiserve.kernels import step_inputs
from hiserve.runners import device_rows, inputs
from tests.contract import test_attention
from tests.e2e import test_host_tails, test_windows_freed
from tests.invariants import test_tails
from tests.unit.cache import test_radix, test_tail_shares, test_window_pages
from tests.unit.core import test_resolve, test_window_pool
from tests.unit.engine import test_build_host, test_window_admission
from tests.unit.kernels import test_step_triton
from tests.unit.runners import test_device_rows
from tests.unit.storage import test_host_pool, test_page_streams, test_tail_records

with tail_pool.TailPool.drop, test_window_pages.test_free_and_held_pages_partition_the_pool_whatever_rows_and_tails_do:
    "INV H1: a window page is free while a tail holds it"
    pages[left == 0]
    pages
with transfers.Transfers.begin_offloads, test_tails.test_tails_keep_pace_with_history_that_takes_every_order_of_a_step:
    "tails: history takes every order of a step, and tails wait until it is lost"
    max(MIN_TAILS, max_copies - len(copies))
    max_copies - len(copies)
with tails.TailTiers.begin_load, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H1: a load does not hold the window pages that it fills"
    pool.num_pinned += held.size
    pool.drop(held)
with tail_pool.TailPool.reorder, test_window_pages.test_the_least_recently_used_tails_go_first_and_only_when_pages_are_short:
    "tails: a use does not move a tail to the end of the order"
    self._order.add(tail)
    pass
with eviction.LeafHeap._counts, test_window_pages.test_sweeps_keep_the_order_and_lose_no_tail:
    "tails: a sweep keeps a former use of a tail, and not the latest"
    is_current and self._is_victim(node)
    self._is_victim(node)
with prefixes.Prefixes.lock, test_tails.test_a_boundary_that_is_used_keeps_its_tail_longer["a match"]:
    "tails: a match does not count as a use"
    self._tails.settle(lock.tail)
    pass
with (
    reference_attention.ReferenceAttention.plan,
    test_windows_freed.test_tokens_depend_neither_on_freed_pages_nor_on_hits["reference attention-greedy"],
):
    "INV H5: layers with a window read the pages of the others"
    inputs.window_table, unread | (self._keys <= first - window)
    inputs.page_table, unread | (self._keys <= first - window)
with row_tails.RowWindows.leave, test_windows_freed.test_tokens_depend_neither_on_freed_pages_nor_on_hits["plain-greedy"]:
    "INV H2: a page is given back that the next token sees"
    self._first_of(num_tokens)
    self._first_of(num_tokens) + 1
with prefixes.Prefixes.retain, test_tail_shares.test_a_retained_prefix_keeps_its_tail_until_its_time:
    "INV 77: the tail of a retained prefix goes as any other"
    self._tails.retain(tail, until_s)
    pass
with row_tails.RowTails.want_retained, test_tail_shares.test_a_prompt_gets_a_tail_where_its_request_retains_it[26]:
    "INV 77: a retained prefix gets no tail at its end"
    self._want(row, boundary)
    pass
with tails.TailTiers._offload, test_tail_shares.test_a_flood_leaves_others_their_share_of_the_host:
    "INV 70: frames of all tails count as those of one account"
    self._tiers.host.shares.charge(tail.account, count)
    tail.account = b""
    self._tiers.host.shares.charge(tail.account, count)
with tails.TailTiers._reorder, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "the host never evicts a tail that was offloaded"
    self._tiers.host.eviction.add(tail)
    pass
with nodes.Tail.is_host_evictable, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "the host evicts frames that a copy reads or writes"
    self.frames is not None and (not (self.pending_op or self.is_uploading))
    self.frames is not None
with tails.TailTiers.assign_account, test_tail_shares.test_an_account_is_charged_for_adopted_tails_wherever_they_are:
    "adopted tails have no place in the order of their account"
    self._reorder(tail)
    pass
with tails.TailTiers.retain, test_tail_shares.test_a_tail_that_is_retained_again_keeps_its_later_time:
    "INV 77: a tail is retained for the shortest time that was asked for"
    until_s <= tail.retained_until_s
    until_s == tail.retained_until_s
with retention.RetentionEnds.add, test_tail_shares.test_tails_that_are_retained_for_ever_have_a_bounded_record:
    "tails that were evicted stay in memory until the end of their retention"
    len(self._heap) >= self._sweep_at
    False
with tails.TailTiers._begin_retention, test_tail_shares.test_frames_of_retained_tails_count_in_the_quota_until_they_are_gone:
    "INV 77: frames of retained tails count for nobody"
    self._tiers.retention.quota.charge(tail.account, count)
    count = 0
with (
    tails.TailTiers.retain,
    test_tail_shares.test_a_shorter_prefix_has_its_own_tail_whichever_is_retained_first_if_the_quota_has_room["6-times1"],
):
    "INV 77: an account retains tails beyond its quota"
    count > max(0, quota.room(tail.account))
    False
with tails.TailTiers.leave_host, test_tail_shares.test_frames_of_retained_tails_count_in_the_quota_until_they_are_gone:
    "INV 77: a tail that is gone counts in the quota of its account"
    self._end_retention(tail)
    pass
with prefixes.Prefixes.retain, test_tail_shares.test_a_prefix_longer_than_the_quota_leaves_room_for_the_tail_that_it_needs:
    "INV 77: a retained prefix takes the room of its tail, and cannot be resumed behind"
    0 if last is None else self._tails.num_to_retain(last)
    0
with (
    prefixes.Prefixes.retain,
    test_tail_shares.test_a_shorter_prefix_has_its_own_tail_whichever_is_retained_first_if_the_quota_has_room["8-times0"],
):
    "INV 77: a prefix that is retained after a longer one has no tail of its own"
    num_behind >= node.num_pages
    False
with (
    transfer.TransferQueue.take_tails,
    test_page_streams.test_tails_that_wait_behind_a_copy_are_taken_together_as_far_as_one_slot_holds_them,
):
    "offloads of history are taken for tails, and answered without a copy"
    queue[0].is_tail_alone
    True
with tails.TailTiers._offload, test_tail_shares.test_the_records_get_the_time_of_every_retained_tail_and_the_next_process_retains_each:
    "INV 77: a tail that is offloaded later is not recorded as retained"
    self._record_retention(tail)
    pass
with tails.TailTiers.retain, test_tail_shares.test_the_records_get_the_time_of_every_retained_tail_and_the_next_process_retains_each:
    "INV 77: a tail that is retained later is not recorded as retained"
    self._record_retention(tail)
    pass
with records.whole_tails, test_tail_records.test_a_restart_gets_back_until_when_a_tail_is_retained:
    "INV 77: the next process forgets until when tails are retained"
    int(table["retained_until_s"][frames].min())
    0
with admission.Admission._admit, test_window_admission.test_a_row_that_loads_its_tail_waits_for_room_for_both["7-False"]:
    "INV H12: a row is admitted to pages that the load of its tail holds"
    num_host > 0
    False
with tails.TailTiers.expire, test_tail_shares.test_a_tail_that_is_retained_again_keeps_its_later_time:
    "INV 77: the first time of a tail ends its retention"
    0 < tail.retained_until_s <= now_s
    tail.retained_until_s
with tails.TailTiers.touch, test_tail_shares.test_a_tail_has_the_priority_of_the_requests_that_used_it:
    "a tail keeps the priority of its first request"
    tail.last_used, tail.priority = last_used, tail.node.priority
    tail.last_used = last_used
with tails.TailTiers.put_on_host, test_tails.test_tails_of_a_former_process_are_adopted_whole_and_once:
    "INV H11: nobody is told of adopted resume points"
    self._on_host.add_tail(tail.digest)
    pass
with tails.TailTiers.put_on_host, test_tails.test_a_node_adopts_the_tails_of_all_its_boundaries:
    "of two adopted tails of a node the last one alone is found, and the frames of the other are lost"
    node.tails | {at: tail}
    {at: tail}
with tails.TailTiers.recover, test_tail_shares.test_an_adopted_tail_is_charged_and_retained_as_its_history_is:
    "INV 77: the next process forgets the retention of tails"
    self._begin_retention(node.tails[at], until_s)
    pass
with nodes.Tail.assign_account, test_tail_shares.test_an_adopted_tail_is_charged_and_retained_as_its_history_is:
    "INV 70: an adopted tail counts for nobody"
    self._pools.assign_account(self, account)
    pass
with tail_pool.TailPool.keep, test_tail_shares.test_a_flood_leaves_others_their_share_of_window_pages:
    "INV 70: all tails count as those of one account"
    self.shares.charge(tail.account, pages.size)
    tail.account = b""
    self.shares.charge(tail.account, pages.size)
with prefixes.deepest_tail, test_tails.test_match_is_the_deepest_resume_point_whatever_came_and_went[7]:
    "INV H3: a tail behind the match is taken"
    at <= num_pages and has(tail)
    has(tail)
with nodes.Tail.is_on_host_only, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H3: a tail is matched on the host before it has arrived there"
    not self.host_ready_op
    True
with tiers.CacheTiers._demote, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H3: a tail on the device outlives its history there"
    tail.leave_device()
    pass
with tiers.CacheTiers.take_off_host, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H3: a tail on the host outlives its history there"
    tail.leave_host()
    pass
with radix.RadixTree.trim, test_radix.test_a_trim_closes_the_tails_behind_it_alone:
    "INV H3: a tail outlives the pages before it"
    close_tails(leaf, keep)
    pass
with nodes.split_tails, test_tails.test_match_is_the_deepest_resume_point_whatever_came_and_went[19]:
    "INV H3: the tails of the lower part of a node keep their places when it is cut"
    tail.at - upper.num_pages
    tail.at
with row_tails.RowWindows._first_of, test_windows_freed.test_a_tail_suffices_and_one_row_less_does_not[18]:
    "INV H4: a tail lacks its first position"
    num_tokens - self._limits.window + 1
    num_tokens - self._limits.window + 5
with reference_attention.ReferenceAttention.plan, test_attention.test_equals_the_oracle_on_ragged_batches:
    "INV H8: a token sees the row of the token after it"
    new > torch.arange(inputs.max_q_len, device=device)[:, None]
    new > torch.arange(inputs.max_q_len, device=device)[:, None] + 1
with transfers.Transfers._lose_tail, test_tails.test_a_row_whose_tail_was_lost_is_told_as_one_that_moved:
    "tails: a graph may be replayed over a row whose tail was lost"
    self._tiers.relocation_version += bool(lost)
    pass
with tails.TailTiers._may_begin, test_tails.test_a_tail_is_offloaded_to_memory_that_is_ready_and_from_pages_that_nobody_was_promised:
    "tails: an offload evicts from a host that gets more room by itself"
    host.num_ready == host.num_pages or host.num_free > self._memory.num_frames(tail)
    True
with tails.TailTiers._may_begin, test_tails.test_a_tail_is_offloaded_to_memory_that_is_ready_and_from_pages_that_nobody_was_promised:
    "INV H12: an offload holds window pages that rows were promised"
    self._memory.has_spare(tail)
    True
with nodes.Node.is_copy, test_tails.test_the_host_keeps_history_whose_tail_it_alone_has:
    "tails: a host copy is freed with the only copy of a tail"
    not (self.tails and any(tail.pages is None and tail.frames is not None for tail in self.tails.values()))
    True
with tails.TailTiers.leave_device, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H11: a tier still tells pages behind which it has lost the last tail"
    self._on_device.remove_tail(tail.digest)
    pass
with tier_pages.ResumablePages.insert, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H11: pages are not told whose tail arrived first"
    digest in self._num_behind
    False
with row_tails.RowTails.release, test_windows_freed.test_drafts_shorten_no_hit["drafts"]:
    "INV H9: the end of a request gets no tail"
    self._keep(row, num_pages * self._page_size, num_pages, lock)
    pass
with prefixes.Prefixes.lock, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H10: a row does not wait for a tail that another row loads"
    0 if lock.tail is None else lock.tail.device_ready_op
    0
with transfers.Transfers._lose_tail, test_host_tails.test_a_load_that_fails_is_computed_again["history"]:
    "INV H10: a row goes on without the tail that did not arrive"
    lock.is_open and op.tail is not None and lock.tail is op.tail
    False
with records.whole_tails, test_tail_records.test_a_tail_is_recovered_whole_and_behind_its_history:
    "INV H10: a tail is adopted that lacks a frame"
    parts.keys() == set(range(num_parts))
    True
with row_tails.RowTails.release, test_host_tails.test_a_load_that_fails_is_computed_again["history"]:
    "INV H5: a row whose load failed leaves a tail of what it has not read"
    num_pages and lock.is_whole
    num_pages
with window_pool.WindowLimits.row_pages, test_window_pages.test_the_bound_of_a_row_is_attained_and_not_exceeded[4]:
    "INV H12: the bound of a row leaves out its drafts"
    (self.depth + 1) * (self.num_draft + 1) + self.num_draft
    self.depth + 1
with window_pool.WindowLimits.row_pages, test_window_admission.test_a_row_whose_state_lags_behind_its_drafts_keeps_within_its_bound["1-6"]:
    "INV H12: the bound of a row leaves out the pages that it has published behind its next snapshot"
    max(1, -(-self.num_draft // self.page_size))
    1
with row_tails.RowTails.cut, test_window_admission.test_a_chunk_that_is_cut_gives_its_window_pages_back:
    "INV H12: a row keeps the window pages of tokens that its chunk has no more"
    self.windows.shrink(int(rows[at]), int(computed[at] + most[at]))
    pass
with tail_pool.TailMemory.num_pages_in, test_window_pages.test_frames_that_are_no_tail_are_known_by_their_number:
    "INV H10: any number of frames is taken for a tail"
    num_frames < 0 or (num_frames and not self.frames_per_page)
    False
with window_pool.WindowLimits.least_pages, test_window_pool.test_a_row_can_start_with_a_load_in_the_smallest_pool:
    "tails: the smallest pool has no room for a load"
    1 + self.row_pages + 1 + self.step_pages + self.tail_pages
    1 + self.row_pages + 1 + self.step_pages
with window_pool.WindowLimits.step_pages, test_window_pages.test_two_rows_that_share_the_prompt_tokens_in_flight_keep_within_their_bounds:
    "INV H12: the bound of a step leaves out the prompt tokens of steps planned ahead"
    self.depth + 1
    1
with inputs.put_tokens, test_windows_freed.test_tokens_depend_neither_on_freed_pages_nor_on_hits["graphs-greedy"]:
    "INV H13: a replay writes the window pages of another step"
    static.window_slots[:num_tokens].copy_(inputs.window_slots)
    pass
with nodes.join_tails, test_radix.test_tails_keep_their_boundaries_when_a_node_is_split_and_joined[2]:
    "tails: those of the lower part keep their places when it absorbs the upper one"
    parent.num_pages + tail.at
    tail.at
with tails.TailTiers.keep, test_tails.test_a_match_from_before_a_tail_is_matched_again:
    "INV H3: a match from before a tail is taken for the deepest resume point"
    self._tiers.tree_epoch += 1
    pass
with (
    window_pool.WindowLimits.promised_pages,
    test_window_pages.test_rows_whose_prompt_tokens_start_and_end_within_pages_keep_within_their_bounds,
):
    "INV H12: the promise to a row leaves out the page in which its prompt tokens begin"
    self.row_pages + 1
    self.row_pages
with device_rows.DeviceRows._clear, test_device_rows.test_a_new_tenant_inherits_no_window_entry_of_the_last:
    "INV H1: a row inherits the window pages of the request before it"
    self._tables()
    self._tables()[:1]
with window_pool.WindowPool.size, test_window_pool.test_given_pages_that_do_not_fit_name_what_to_lower:
    "windows: more pages than memory are promised"
    given * self.page_bytes > room
    False
with window_pool.WindowPool.pages_beside, test_window_pool.test_both_pools_fit_into_their_memory_and_leave_less_than_a_page[3]:
    "windows: pages of the other layers take the memory of the smallest pool of windows"
    min(pages, max(0, num_bytes - fixed - least) // page_bytes)
    pages
with step_inputs._check_rows, test_step_triton.test_triton_does_what_the_twins_do:
    "INV H2: kernel: a freed page below the window is a fault"
    tl.maximum(computed - window + 1, 0) // PAGE_SIZE
    computed * 0
with step_inputs._place_tokens, test_step_triton.test_triton_does_what_the_twins_do:
    "INV H5: kernel: layers with a window store where the others do"
    tl.load(windows.table + row * num_entries + position // PAGE_SIZE, mask=mask & is_legal, other=SINK)
    page
with tails.TailTiers.leave_host, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H1: frames are free while a transfer reads or writes them"
    op.deferred_host_frees.append(frames)
    self._tiers.free_host(frames)
with tails.TailTiers.end, test_tails.test_match_knows_the_deepest_resume_point_of_each_tier:
    "INV H10: a tail is matched on the host whose offload failed"
    not ok and is_here
    False
with transfers.Transfers.begin_load, test_tails.test_a_load_waits_for_the_last_forward_over_its_window_pages:
    "INV 26: a load does not wait for the forwards that may touch its window pages"
    max(after_step, self._tails.last_step(tail))
    after_step
with tails.TailTiers.put_on_host, test_tails.test_tails_of_a_former_process_are_adopted_whole_and_once:
    "INV H10: a part of a window page is adopted"
    self._memory.num_pages_in(frames.size) < 0
    False
with records.Records.recover, test_tail_records.test_a_tail_is_recovered_whole_and_behind_its_history:
    "INV H10: the records of adopted frames are free"
    kept[tail.frames] = True
    pass
with host.HostPool.recover, test_host_pool.test_frames_of_a_former_process_are_verified_until_they_are_written_again:
    "INV H10: frames of a former process are not verified"
    (*(run.pages for run in runs), *(tail.frames for tail in self.tails()))
    [run.pages for run in runs]
with host_adoption.find_pages, test_build_host.test_frames_of_tails_behind_their_history_are_waited_for:
    "INV H10: frames are adopted before their memory is ready"
    _numbers(runs, tails)
    _numbers(runs, [])
with step_inputs._check_rows, test_step_triton.test_triton_does_what_the_twins_do:
    "INV H2: kernel: pages of windows are bounded by the pool of the other layers"
    _count_stale(its_pages, its_owners, windows.page_owner, first, num_used, num_window_pages, BLOCK)
    _count_stale(its_pages, its_owners, windows.page_owner, first, num_used, num_pages, BLOCK)
with page_streams.PageStreams.begin, test_page_streams.test_the_last_event_of_a_load_is_behind_its_tail:
    "INV H10: on CUDA, steps do not wait for the tail of a load"
    end.record(self._last)
    pass
with cuda_transfer.CudaTransfers._begin, test_page_streams.test_a_load_whose_tail_finds_no_memory_fails_when_its_history_writes_no_more:
    "INV H10: a load whose tail cannot be enqueued is answered while its history still writes"
    self._streams[copy.kind].drain()
    pass
with page_streams.PageStreams.drain, test_page_streams.test_an_offload_that_fails_between_two_pieces_writes_no_more_after_its_answer:
    "an offload that failed is answered while the copy engine still writes its host pages"
    (self._kernels, self._crossing)
    (self._kernels,)
with page_streams.PageStreams._may_split, test_page_streams.test_the_last_event_of_a_load_is_behind_its_tail:
    "INV H10: a load with a tail is split by the layers of its history"
    by_layer and is_large and (not (self._has_windows or self._has_snapshots))
    by_layer and is_large
with page_streams.PageStreams._pieces, test_page_streams.test_every_byte_of_a_resume_point_arrives_whichever_stream_runs_first:
    "INV H10: the image of a window page is taken for one page of the host"
    self._pages_per_image if space is Space.WINDOW else 1
    1
with memory_plan._Worker._beside_pool, test_resolve.test_images_larger_than_the_staging_memory_of_pages_have_room:
    "images of window pages pass through memory that was not planned"
    max(self.page_bytes, self.windows.image_bytes(self.page_bytes))
    self.page_bytes
with tails.TailTiers._offload, test_tails.test_an_idle_host_does_not_exchange_history_and_tails_of_two_prefixes_for_ever:
    "a tail replaces history and another tail, which come back for it"
    self._tiers.make_host_room(count, keeps_tails=True)
    self._tiers.make_host_room(count)
