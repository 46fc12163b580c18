"""Snapshots of recurrent states: their slots, their boundaries, and the rows that start from them."""

from hiserve.core import kv_groups
from hiserve.engine import row_snapshots, row_tails
from tests.invariants import test_snapshots
from tests.unit.core import test_kv_groups
from tests.unit.engine import test_row_snapshots

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
with row_snapshots.RowSnapshots.plan, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["1-3"]:
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
with row_snapshots.RowSnapshots.admit, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["0-0"]:
    "INV H1: a row does not hold the slot that it starts from"
    self._pool.hold(slots)
    pass
with row_snapshots.RowSnapshots.release, test_snapshots.test_random_workloads_resume_from_the_states_of_their_prefixes["0-0"]:
    "INV H1: the slots of a row that ends are lost"
    self._pool.drop(slot)
    pass
with row_tails.RowTails.cut, test_row_snapshots.test_a_prompt_leaves_the_tail_that_another_request_waits_for:
    "INV H9: a chunk passes two boundaries that are wanted, and stores one snapshot"
    most < allocation.num_new
    most < 0
