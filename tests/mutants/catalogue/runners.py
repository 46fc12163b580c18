"""Rows on the device, graphs and what they read."""

from hiserve.kernels import step_reference
from hiserve.runners import canary, capture, device_rows, dispatch, graph, step_output
from tests.unit.engine import test_executor
from tests.unit.runners import test_canary, test_capture, test_device_rows, test_eager, test_graph, test_verify

with step_reference._check, test_executor.test_a_stale_entry_faults_its_row_and_leaves_the_neighbours_pages_untouched:
    "INV 9: the owner of a row's pages is not checked"
    is_table_owned(table, owners, state.page_owner, end, page_size)
    True
with device_rows.DeviceRows.apply, test_device_rows.test_release_comes_before_admission_and_admission_before_the_table:
    "a row is cleared after its page table was written"
    self._write_table(plan.table)
    self._write_table(plan.table)
    self._clear(plan.release, plan.admit)
with device_rows.DeviceRows._clear, test_device_rows.test_a_new_tenant_inherits_no_entry_of_the_last:
    "INV 9: a row keeps the owners of the entries of the request before it"
    entry_owner.index_fill_(0, rows, NO_OWNER)
    pass
with device_rows.DeviceRows.apply, test_executor.test_plans_are_applied_in_the_order_in_which_they_were_made:
    "INV 8: an older plan is applied after a newer one"
    plan.relocation_version >= before
    True
with step_output._positions, test_verify.test_tokens_are_those_of_plain_decoding:
    "INV 40: a draft is drawn at the position of the last token"
    _drawing_tokens(inputs)
    _drawing_tokens(inputs)[:: inputs.width].repeat_interleave(inputs.width)
with graph.GraphRunner._fill, test_graph.test_replays_over_garbage_give_the_tokens_of_eager_steps:
    "INV 35: padding rows keep the data of the previous replay"
    host[0, :num_rows], host[0, num_rows:] = (plan.rows, 0)
    host[0], host[0, :num_rows] = (captured.varying[0], plan.rows)
with graph._check_replay, test_graph.test_a_replay_that_differs_from_the_eager_step_is_not_used:
    "INV 35: a replay is not compared with the eager step"
    not torch.equal(made, expected)
    expected is None
with dispatch.Dispatch.forward, test_eager.test_a_step_waits_layer_by_layer_for_the_loads_that_it_reads_and_for_no_others:
    "INV 29: a forward does not wait for its loads"
    forward = replace(forward, before_layer=wait)
    pass
with canary.Canary.note, test_canary.test_a_prefix_that_holds_something_else_is_named:
    "INV 34: a prefix is not marked for the canary check"
    self._due.update(table.rows[is_filled].tolist())
    pass
with capture.Capture.check_failure, test_capture.test_a_failure_of_the_device_is_none_of_a_capture_alone:
    "a lost device counts as a capture that failed"
    self._stream.synchronize()
    pass
