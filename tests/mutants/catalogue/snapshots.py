"""Snapshots of recurrent states: their slots, their boundaries, and the rows that start from them."""

from hiserve.cache.index import tails
from hiserve.cache.storage import host, transfer
from hiserve.core import kv_groups, window_pool
from hiserve.engine import admission, row_snapshots, row_tails
from tests.contract import test_transfers
from tests.invariants import test_snapshots
from tests.unit.core import test_kv_groups, test_snapshot_slots
from tests.unit.engine import test_row_snapshots
from tests.unit.storage import test_snapshot_image

with (
    kv_groups.CacheGroupSpec.snapshot_bytes,
    test_kv_groups.test_a_row_carries_its_state_and_all_of_its_ring_and_a_snapshot_the_newest_rows,
):
    "a snapshot is counted as a whole ring"
    self.slot_bytes * self.snapshot_rows
    self.row_bytes
with row_snapshots.RowSnapshots.plan, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["1-3"]:
    "INV H6: drafts count as folded where the next boundary is chosen"
    before - self._last_drafts[rows]
    before - self._num_drafts[rows] - 4
with row_snapshots.RowSnapshots.plan, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["2-3"]:
    "INV H7: a row gets the next slot before it has passed the boundary of the last one"
    self._assigned[rows] <= least
    self._assigned[rows] <= most
with row_snapshots.RowSnapshots.settle, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["0-3"]:
    "INV H6: a snapshot counts as stored once drafts have passed its boundary"
    settled - num_draft
    settled
with row_snapshots.RowSnapshots.take_due, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["1-0"]:
    "INV H7: a tail gets a slot that its step has not stored into yet"
    min(int(self.folded[row]), num_published)
    num_published + 1
with (
    row_snapshots.RowSnapshots.take_due,
    test_row_snapshots.test_of_two_boundaries_that_steps_in_flight_pass_the_later_has_its_tail_at_once,
):
    "INV H9: the later of two boundaries waits for the next page"
    stores[0].boundary if stores else _NEVER
    _NEVER
with (
    row_snapshots.RowSnapshots.want,
    test_row_snapshots.test_a_boundary_that_a_request_has_waited_for_keeps_its_tail_until_the_request_gets_a_row,
):
    "the tail that a request waits for goes with the next boundary of its row"
    store.is_wanted |= store.boundary == boundary
    pass
with row_snapshots.RowSnapshots.admit, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["0-0"]:
    "INV H1: a row does not hold the slot that it starts from"
    self._pool.hold(slots)
    pass
with row_snapshots.RowSnapshots.release, test_snapshots.test_failed_and_refused_steps_leave_no_slot_and_no_state_behind[1]:
    "INV H1: the slots of a row that ends are lost"
    self._pool.drop(slot)
    pass
with row_tails.RowTails.cut, test_row_snapshots.test_a_prompt_leaves_the_tail_that_another_request_waits_for:
    "INV H9: a chunk passes two boundaries that are wanted, and stores one snapshot"
    most < allocation.num_new
    most < 0
with row_snapshots.RowSnapshots.keep, test_row_snapshots.test_only_the_newest_snapshot_of_a_reply_goes_to_the_host:
    "snapshots: each boundary of a reply keeps its tail"
    former.is_provisional
    False
with row_snapshots.RowSnapshots.keep, test_row_snapshots.test_a_row_that_goes_on_keeps_the_tail_that_another_row_has_at_the_same_boundary:
    "INV H9: a row that goes on drops the last tail of another row"
    former not in self.latest.values()
    True
with tails.TailTiers.keep, test_row_snapshots.test_a_boundary_that_the_host_has_stays_on_the_device_when_a_row_has_passed_it_again:
    "snapshots: a boundary that was used before goes with the next one of the row that passes it"
    slots.size > 0 and tail.frames is None
    slots.size > 0
with tails.TailTiers.settle, test_row_snapshots.test_only_the_newest_snapshot_of_a_reply_goes_to_the_host:
    "INV H9: the last snapshot of a reply whose history is on the host stays off it"
    self.enqueue(tail)
    pass
with tails.TailTiers._is_due, test_row_snapshots.test_only_the_newest_snapshot_of_a_reply_goes_to_the_host:
    "snapshots: tails that rows are about to replace go to the host"
    not tail.is_provisional
    True
with row_tails.RowTails.release, test_row_snapshots.test_only_the_newest_snapshot_of_a_reply_goes_to_the_host:
    "INV H9: the last snapshot of a request stays off the host"
    self._tails.settle(latest)
    pass
with row_tails.RowTails.want, test_row_snapshots.test_a_request_waits_for_a_boundary_that_a_step_in_flight_passes:
    "a request does not wait for the snapshot of a step in flight"
    self.snapshots.want(row, num_tokens)
    False
with row_tails.RowTails.want, test_row_snapshots.test_nobody_waits_for_a_boundary_that_was_passed_without_a_slot:
    "a request waits for a boundary that its row has passed without a slot"
    num_tokens > num_computed
    True
with admission.Admission._may_load, test_row_snapshots.test_a_prompt_whose_snapshot_finds_no_slot_waits_for_one:
    "a snapshot is loaded into a slot that is not there"
    tails.has_slot_for(match.host_tail)
    True
with window_pool.rows_within, test_snapshot_slots.test_fewer_requests_run_at_once_if_what_they_carry_takes_more_than_a_quarter:
    "states of requests leave no memory to the cache"
    room // ROW_SHARE
    room
with transfer.ThreadTransfers._execute, test_transfers.test_a_snapshot_arrives_with_the_window_pages_of_its_tail:
    "INV H10: a tail arrives without its snapshot"
    copy.slots.tolist()
    []
with host.SnapshotImage.runs, test_snapshot_image.test_pieces_between_device_and_frames_are_the_parts_of_the_image:
    "INV H10: a piece of a snapshot goes on behind the end of its frame"
    min(end - at, frame_bytes - within)
    end - at
with tails.TailTiers.settle, test_row_snapshots.test_the_end_of_a_prompt_goes_first_unless_its_reply_ends_within_the_same_page:
    "snapshots: the resume point of a short reply goes first"
    self.touch(tail, self._tiers.clock)
    pass
