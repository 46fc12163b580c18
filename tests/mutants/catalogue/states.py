"""What rows carry along: recurrent states, rings of inputs, snapshots."""

from hiserve.attention import triton
from hiserve.kernels import delta, delta_inputs, step_inputs, step_reference, step_triton
from hiserve.models import delta_config, delta_layer, family, gated_attention, weights
from hiserve.runners import mixed, row_states
from tests.e2e import test_state_families_oracle, test_state_graphs, test_state_rows
from tests.unit.attention import test_triton
from tests.unit.kernels import test_delta, test_delta_triton, test_step_triton
from tests.unit.models import test_delta_config, test_gated_attention, test_state_heads
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
with delta_config.DeltaConfig.groups, test_state_rows.test_hb_11_after_any_accept_pattern_the_state_is_that_of_plain_decoding[23]:
    "INV H6: the ring has no room for the inputs of drafts"
    kept + max_draft
    kept + 1
with delta._advance, test_state_rows.test_hb_11_after_any_accept_pattern_the_state_is_that_of_plain_decoding[9]:
    "HB-11: the stored state covers drafts that are rejected"
    at < rows.state_ends
    at < rows.starts + q_lens[:, 0]
with delta_inputs.ends_of, test_delta_triton.test_prompts_fold_and_snapshot_as_the_twin_does:
    "INV H7: a prompt writes its inputs into the snapshot of a boundary that it has passed before"
    (slot > 0) & (boundary > state_len) & (boundary <= state_end)
    (slot > 0) & (boundary <= state_end)
with (
    delta_layer._ordered,
    test_state_families_oracle.test_a_model_with_states_gives_the_logits_and_tokens_of_transformers["qwen3_next-overrides4-ways4"],
):
    "the gates of all key heads lie one after the other in Qwen3-Next"
    gates.view(heads, 2, -1, gates.shape[1]).unbind(1)
    gates.view(2, heads, -1, gates.shape[1]).unbind(0)
with (
    gated_attention.make_gated_attention,
    test_state_families_oracle.test_a_model_with_states_gives_the_logits_and_tokens_of_transformers["qwen3_5_text-overrides1-ways1"],
):
    "elements that are not rotated have YaRN's factor"
    torch.where(is_still, weight / config.rope.attention_factor, weight)
    weight
with gated_attention.GatedSelfAttention.store, test_gated_attention.test_gates_take_part_in_outputs_and_in_nothing_that_is_stored:
    "a draft head that only updates its cache takes gates of attention for values"
    self._project(x)[0]
    self.qkv(x).view(x.shape[0], -1, self.head_dim)
with mixed.MixedRunner.run, test_state_graphs.test_graphs_give_the_tokens_of_eager_steps["qwen3_5_text-overrides0-off-1"]:
    "the logits of a mixed graph are those of attention without its gates"
    captured.reached
    (self._out.flatten(1), *captured.reached[1:])
with triton.TritonAttention.__init__, test_triton.test_splits_are_made_in_the_first_layer_that_attends:
    "the splits of rows are made in a layer that has no attention"
    shape.first_layer
    0
with delta_config._kinds, test_delta_config.test_every_fourth_layer_has_attention_by_default:
    "the first of four layers has attention"
    (layer + 1) % interval == 0
    layer % interval == 0
with weights.load_head_parameters, test_state_heads.test_a_head_gives_the_logits_of_a_layer_of_transformers["40-qwen3_5_text"]:
    "norms of a head that are stored less 1 are taken as they are"
    _offset_norms(parameters, draft.model)
    pass
with (
    delta_config.DeltaConfig.groups,
    test_delta_config.test_states_have_the_type_of_the_settings_and_inputs_that_of_the_model["bfloat16-bfloat16-bfloat16"],
):
    "states are not of the type that the settings ask for"
    dtype if dtype == "float64" else self.state_dtype
    dtype if dtype == "float64" else "float32"
with delta.DeltaPools.wide, test_delta.test_states_of_another_type_are_rounded_where_they_are_stored_alone:
    "a narrow state is rounded after each token"
    torch.promote_types(self.state.dtype, torch.float32)
    self.state.dtype
with family, test_state_heads.test_a_head_comes_with_its_model_and_is_no_part_of_it["qwen3_next"]:
    "models: the head in the files of Qwen3-Next is not found, as config.json does not tell of it"
    _qwen_states(
        is_fused=True,
        hidden_size=2048,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
        num_nextn_predict_layers=1,
        **_SHARED_EXPERTS | {"vocab_size": 151_936},
    )
    _qwen_states(
        is_fused=True,
        hidden_size=2048,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
        **_SHARED_EXPERTS | {"vocab_size": 151_936},
    )
