"""What rows carry along: recurrent states, rings of inputs, snapshots."""

from hiserve.kernels import step_inputs, step_reference, step_triton
from hiserve.runners import row_states
from tests.unit.kernels import test_step_triton
from tests.unit.runners import test_row_states

with step_reference.advance, test_step_triton.test_rows_advance_by_what_was_emitted_and_faulted_ones_forget:
    "INV H6: a state covers drafts that may be rejected"
    kv_lens - inputs.num_draft
    kv_lens
with step_triton._advance_rows, test_step_triton.test_triton_does_what_the_twins_do:
    "INV H6: kernel: a state covers drafts that may be rejected"
    tl.load(kv_lens + number) - tl.load(num_draft + number)
    tl.load(kv_lens + number)
with step_reference._fill_states, test_step_triton.test_rows_are_legal_by_the_rules_and_the_others_work_in_the_sink:
    "HB-12: an illegal row writes its own state"
    inputs.rows * inputs.legal
    inputs.rows
with step_inputs._fill_states, test_step_triton.test_triton_does_what_the_twins_do:
    "HB-12: kernel: an illegal row wants a snapshot"
    tl.load(states.snap_slot + row, mask=is_legal, other=0)
    tl.load(states.snap_slot + row)
with row_states.RowStates.clear, test_row_states.test_a_row_without_a_snapshot_starts_empty_whatever_its_memory_holds:
    "INV H14: a row inherits the snapshot that was wanted of its last request"
    (self.tensors.lens, self.tensors.snap_at, self.tensors.snap_slot)
    (self.tensors.lens,)
with row_states.RowStates.clear, test_row_states.test_a_row_that_changes_hands_starts_from_no_snapshot_of_its_last_request:
    "INV H14: a row starts from the snapshot of its last request"
    self._starts.pop(row, None)
    pass
with row_states.RowStates.restore, test_row_states.test_a_snapshot_is_read_before_the_first_step_of_its_row_and_at_no_other_time:
    "INV H7: inputs of a snapshot lie in the ring where they lay in the snapshot"
    positions % ring
    positions % 1 + torch.arange(kept, device=self._device)
