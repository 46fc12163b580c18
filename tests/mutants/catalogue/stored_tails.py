"""Tails in stores: uploaded and fetched whole."""

from hiserve.cache.index import prefixes, retention, store_sync, tail_uploads, tails
from hiserve.cache.storage import file_store, page_order, store_transfers
from hiserve.engine import store_prefetch
from tests.e2e import test_store_tails
from tests.invariants import test_stored_tails, test_tails
from tests.unit.cache import test_tail_shares
from tests.unit.engine import test_tail_prefetch
from tests.unit.storage import test_file_store, test_store_transfers

with tail_uploads.TailUploads._may_begin, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "INV H10: a tail is uploaded before its history"
    self._uploads.is_awaited(tail.digest)
    False
with (
    tail_uploads.TailUploads._must_stage,
    test_store_tails.test_a_server_resumes_at_the_deepest_point_that_the_one_before_it_stored["a host of a few tails"],
):
    "a full host keeps tails from the store"
    count <= host.pages.num_free + host.num_evictable and self._memory.has_spare(tail)
    False
with tail_uploads.TailUploads.end, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "the window pages and the slot of a staged tail stay taken"
    pool.unpin(held)
    pass
with tails.TailTiers.begin_upload, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "the host counts on frames that an upload reads"
    self._tiers.host.num_evictable -= tail.frames.size
    pass
with tails.TailTiers.leave_host, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "frames that an upload reads are given to others"
    self._ops.free_host(frames)
    self._tiers.free_host(frames)
with store_sync.StoreSync.end_prefetch, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "INV H10: a tail is found that did not arrive"
    image is not None and num_pages == op.num_pages
    image is not None
with prefixes.Prefixes.missing, test_stored_tails.test_resume_points_go_to_a_store_and_come_back_whole:
    "a store is asked for pages of another prefix where the cached history goes on behind the resume point"
    _before(match._node, match._num_beyond)
    (match._node, match._num_beyond)
with store_transfers.StoreTransfers._get, test_store_transfers.test_a_tail_that_is_damaged_or_whose_history_is_does_not_come:
    "INV H10: a damaged tail is taken from a store"
    copy.num_host_pages if count > num_pages else count
    copy.num_host_pages if count >= num_pages else count
with store_transfers.StoreTransfers._upload, test_store_transfers.test_a_tail_of_which_a_frame_changed_is_not_stored:
    "a damaged tail gets a valid header in the store"
    num_intact if num_intact == pages.size else 0
    num_intact
with store_transfers.StoreTransfers._look_up, test_store_transfers.test_a_lookup_finds_the_tails_behind_pages_that_are_here_or_there:
    "a lookup tells of pages without a tail"
    lookup.needs_tail
    False
with store_prefetch.StorePrefetcher._num_affordable, test_tail_prefetch.test_a_resume_point_that_cannot_be_in_time_as_a_whole_is_not_begun:
    "a part of a resume point is fetched, which is of no use"
    num_pages * page_size if has_tail else page_size
    page_size
with store_prefetch.StorePrefetcher._part, test_tail_prefetch.test_history_comes_in_pieces_and_the_tail_with_the_last:
    "a tail comes before its history"
    (num_pages, wanted.end) if num_pages <= MAX_PAGES else (MAX_PAGES, 0)
    (num_pages, wanted.end)
with tails.TailTiers.leave_host, test_tails.test_a_tail_whose_offload_lost_its_place_makes_room_for_rows:
    "a tail whose offload lost its place on the host is never evicted from the device"
    self._reorder(tail)
    pass
with tails.TailTiers.put_on_host, test_tail_shares.test_the_records_get_the_time_of_a_retained_tail_that_comes_from_a_store:
    "the next process does not retain a tail that came from a store"
    self._record_retention(tail)
    pass
with store_sync.StoreSync._insert_tail, test_tail_prefetch.test_a_tail_that_came_alone_is_not_the_next_to_leave_a_full_host:
    "what a request waited for leaves a full host before the request is admitted"
    self._use(end)
    pass
with store_prefetch.StorePrefetcher.found, test_tail_prefetch.test_what_is_here_does_not_count_as_left_in_a_store_that_is_late:
    "pages that are here count as left in a store"
    self._cache_counters.not_fetched(wanted.num_left, TOO_LATE)
    self._cache_counters.not_fetched(num_pages, TOO_LATE)
with tail_uploads.TailUploads.take, test_stored_tails.test_nobody_waits_for_a_tail_that_does_not_fit_on_the_host["0"]:
    "a server that ends waits for a tail that never gets to the store"
    count >= self._tiers.host.pages.num_pages
    False
with file_store.FileStore.put, test_file_store.test_a_full_store_removes_no_history_before_its_tails[True]:
    "a full store keeps tails whose history it has removed"
    self._use([*before, *keys[:count]])
    self._use(keys[:count])
with store_transfers.StoreTransfers._put_tail, test_store_transfers.test_a_tail_is_not_stored_where_a_page_before_it_is_missing:
    "a store takes a tail whose history it has removed"
    self._store.exists(before) < len(before)
    False
with page_order.PageOrder._push, test_file_store.test_the_end_of_a_prefix_goes_before_a_start_that_another_call_wrote:
    "a full store removes the first turns of conversations, without which the others are of no use"
    page is None or self._num_behind[key] > 0
    page is None
with retention.Retention.retain, test_tail_shares.test_a_prefix_longer_than_the_quota_leaves_room_for_the_tail_that_it_needs:
    "pages take the quota of the tail without which they cannot be resumed behind"
    self.quota.room(node.account) - num_beside
    self.quota.room(node.account)
with (
    store_prefetch.StorePrefetcher._begin_fetches,
    test_tail_prefetch.test_the_resume_point_before_comes_in_place_of_one_that_cannot["5-600-too_late-1-3"],
):
    "a resume point that cannot arrive in time is not replaced by one before it"
    num_wanted and not num_pages and self._step_back(wanted, reason)
    False
with store_prefetch.StorePrefetcher._fetch, test_tail_prefetch.test_a_tail_whose_history_the_device_has_comes_behind_it[True]:
    "a tail whose history is on its way to the host is not fetched"
    wanted.num_frames and not self._has_history(wanted)
    False
with prefixes.Prefixes.back_up, test_tail_prefetch.test_no_history_is_waited_for_that_a_full_host_does_not_take:
    "a request waits for history that the host does not get"
    num_missing > host.num_unused or num_missing + num_more > host.num_available
    num_missing + num_more > host.num_available
