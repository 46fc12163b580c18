"""Triton kernels and their torch twins."""

from hiserve.kernels import (
    attention_blocks,
    attention_decode,
    attention_extend,
    attention_join,
    delta,
    delta_chunks,
    delta_inputs,
    delta_rings,
    delta_step,
    draft_reference,
    draw,
    exact_decode,
    exact_linear,
    exact_reference,
    expert_products,
    experts,
    few_experts,
    fused,
    gated_norm_triton,
    latent_decode,
    latent_store,
    noise,
    packed_products,
    packed_triton,
    parts_triton,
    reference,
    routing_triton,
    skinny_linear,
    step_inputs,
    step_reference,
    term_products,
    terms_triton,
)
from tests.e2e import test_exact
from tests.unit.kernels import (
    test_attention_decode,
    test_attention_extend,
    test_compiling,
    test_delta,
    test_delta_triton,
    test_draft_triton,
    test_draft_window,
    test_draw,
    test_exact_attention,
    test_exact_linear,
    test_exact_reference,
    test_experts,
    test_fused,
    test_large_pools,
    test_latent_decode,
    test_launch,
    test_packed_experts,
    test_random,
    test_reference,
    test_routing,
    test_skinny_linear,
    test_step_triton,
    test_terms,
)

with attention_decode._attend_part, test_attention_decode.test_equals_the_oracle_and_reads_nothing_that_a_row_does_not_own["edges"]:
    "INV 37: the decode kernel reads keys after the end of a row"
    is_key = (key >= begin) & (key < end)
    is_key = key >= begin
with attention_blocks._are_adjacent, test_attention_extend.test_equals_the_oracle_and_follows_no_entry_that_a_row_does_not_own["runs"]:
    "INV 37: the extend kernel treats scattered pages as adjacent"
    tl.min
    tl.max
with attention_decode._attend_part, test_large_pools.test_slots_beyond_what_32_bits_count_are_found:
    "decode kernel: slot offsets are 32-bit"
    page.to(tl.int64)
    page
with reference.is_last_loc_legal, test_reference.test_legal_last_locs_are_none_or_a_slot_past_the_sink_that_agrees_with_the_length:
    "INV 9: last_loc may disagree with the length of its row"
    in_range & agrees
    in_range
with step_inputs._check_rows, test_step_triton.test_triton_does_what_the_twins_do:
    "INV 9: kernel: a stale page is no fault"
    num_stale == 0
    num_stale >= 0
with step_reference.accept, test_step_triton.test_a_row_emits_its_drafts_up_to_the_first_that_was_not_drawn:
    "INV 38: a draft after a rejected one is accepted"
    agrees.to(torch.int64).cumprod(1)
    agrees.to(torch.int64)
with noise._words, test_random.test_each_part_of_the_key_gives_other_noise:
    "INV 11: noise is the same at every position"
    position[:, None]
    0
with draw._better, test_draw.test_triton_chooses_the_tokens_that_the_twins_choose:
    "INV 37: the draw kernel breaks ties arbitrarily"
    x > best
    x >= best
with draft_reference._own_pages, test_draft_triton.test_draft_tokens_stand_in_the_pages_of_their_rows_and_else_in_the_sink:
    "INV 43: a draft reads a page that changed owners"
    is_own &= state.page_owner[table.clamp(0, num_pages - 1).long()] == owners
    pass
with draft_reference.draft_window, test_draft_window.test_no_page_with_a_token_that_the_head_left_out_is_drafted_or_attended_over:
    "INV 68: a draft attends over pages that a cold head left out"
    torch.minimum(progress.start_page.index_select(0, rows), last) * legal
    0 * last
with fused._norm_kernel, test_launch.test_a_kernel_that_begins_early_awaits_the_one_before_it_first:
    "a norm reads its input before the kernel that writes it has ended"
    await_previous(IS_EARLY)
    pass
with attention_decode._attend, test_attention_decode.test_equals_the_oracle_and_reads_nothing_that_a_row_does_not_own["windows"]:
    "INV 37: a score without a value takes part in each part of a row"
    close(mixed, top, total, None)
    close(mixed, top, total, 0.0)
with attention_join.join_parts, test_attention_decode.test_equals_the_oracle_and_reads_nothing_that_a_row_does_not_own["edges"]:
    "a row of many parts is joined of the parts of its first group"
    _joined(first_part, _GROUP, num_groups, token, head, max_q_len, q_len, results, SHAPE)
    _joined(first_part, 1, num_groups, token, head, max_q_len, q_len, results, SHAPE)
with experts._sum_kernel, test_experts.test_kernels_of_experts_compute_what_their_twins_do["False"]:
    "of several tokens an expert that computes all counts whole, whatever its gate"
    value if NUM_SHARES == NUM_CHOSEN else value * tl.load(shares + token * NUM_SHARES + NUM_CHOSEN)
    value
with experts._route_kernel, test_experts.test_kernels_of_experts_compute_what_their_twins_do["False"]:
    "the gate of a shared expert is not rounded as other products of the tokens"
    tl.sum(values * weights, 0).to(x.dtype.element_ty).to(tl.float32)
    tl.sum(values * weights, 0)
with few_experts._down_kernel, test_experts.test_kernels_of_experts_compute_what_their_twins_do["False"]:
    "of a token alone an expert that computes all counts whole, whatever its gate"
    tl.load(shares + token * NUM_SHARES + turn, mask=turn < NUM_SHARES, other=1.0)
    tl.load(shares + token * NUM_SHARES + turn, mask=turn < NUM_CHOSEN, other=1.0)
with reference.act_mul, test_reference.test_a_limited_activation_cuts_the_gate_above_and_up_on_both_sides:
    "the limit of an activation cuts the gate alone"
    up.clamp(-activation.limit, activation.limit)
    up
with routing_triton._best, test_routing.test_triton_chooses_what_its_twin_chooses:
    "kernel: the bias of an expert is part of its share"
    tl.where(is_best, score, 0.0)
    tl.where(is_best, left, 0.0)
with latent_store._store_latents, test_fused.test_fused_kernels_compute_what_their_twins_do:
    "queries of latents are rotated the other way"
    ones * cosine[None, :] - others * sine[None, :]
    ones * cosine[None, :] + others * sine[None, :]
with latent_decode._join, test_latent_decode.test_parts_of_rows_are_joined_by_their_sums_whatever_the_lengths:
    "parts of a row of latents count alike"
    tl.exp2((logs - base) * _LOG2_E)
    tl.where(logs > -float("inf"), 1.0, 0.0)
with latent_decode._attend_plain, test_compiling.test_absorbed_queries_of_large_models:
    "Triton 3.6 cannot compile the kernel of absorbed queries"
    tl.full((SHAPE.num_queries,), 0.0, tl.float32)
    tl.zeros((SHAPE.num_queries,), tl.float32)
with latent_decode._attend_plain, test_latent_decode.test_ragged_rows_see_what_the_reference_sees:
    "a draft sees the drafts after it"
    is_key[None, :] & (key[None, :] <= last[:, None])
    is_key[None, :]
with few_experts._gate_kernel, test_experts.test_the_turn_of_the_expert_that_computes_all_reads_no_choice:
    "an expert that computes all tokens reads a choice behind those of the last"
    tl.load(chosen + token * NUM_CHOSEN + turn, mask=turn < NUM_CHOSEN, other=0)
    tl.load(chosen + token * NUM_CHOSEN + turn)
with expert_products._multiply, test_experts.test_products_of_experts_read_nothing_beside_their_tensors:
    "products of experts read behind the last expert's columns"
    (first_column + lane % COLUMNS) % num_columns
    first_column + lane % COLUMNS
with expert_products._multiply, test_experts.test_products_of_experts_read_nothing_beside_their_tensors:
    "products of experts read behind the last pair"
    tl.load(order + tl.minimum(row, end - 1))
    tl.load(order + row)
with packed_triton.unpack_group, test_packed_experts.test_numbers_are_upcast_exactly:
    "kernel: all groups of a block of packed weights have the scale of the first"
    (scales >> (8 * NUMBER)) & 255
    scales & 255
with packed_products.packed_sums, test_packed_experts.test_products_are_those_with_plain_weights:
    "kernel: up has the scales of gate"
    tl.where(part == 0, next_gate, next_up)
    next_gate + part * 0
with packed_products._packed_kernel, test_packed_experts.test_products_are_those_with_plain_weights:
    "kernel: the shared expert beside packed ones is the last of these"
    tl.where(is_shared, 0, expert)
    expert
with packed_products._packed_kernel, test_packed_experts.test_experts_mix_as_their_twin_does:
    "kernel: a token alone takes the activated row of its first packed expert for all"
    pair * 0 if IS_GATED else pair
    pair * 0
with packed_products._packed_kernel, test_packed_experts.test_experts_mix_as_their_twin_does:
    "kernel: a token alone has no shared expert beside packed ones"
    tl.load(chosen + block, mask=block < num_chosen, other=num_experts - 1)
    tl.load(chosen + block, mask=block < num_chosen, other=0)
with delta._advance, test_delta.test_chunks_and_rejected_drafts_change_no_bit_with_the_least_ring["2"]:
    "INV H6: the stored state covers drafts"
    at < rows.state_ends
    at >= 0
with delta._advance, test_delta.test_a_snapshot_is_stored_when_the_state_passes_its_boundary_and_not_when_drafts_do:
    "INV H7: a snapshot covers drafts"
    is_used & (rows.state_lens < rows.snap_at) & (rows.snap_at <= rows.state_ends)
    is_used & (rows.state_lens < rows.snap_at)
with delta._advance, test_delta.test_an_empty_state_is_zeros_whatever_the_memory_holds:
    "INV H2: a new row reads the state of the one before it"
    rows.state_lens > 0
    rows.state_lens >= 0
with delta._Made.of, test_delta.test_chunks_and_rejected_drafts_change_no_bit_with_the_least_ring["2"]:
    "the gates of few heads are rounded by their place in the chunk"
    -shape.num_value_heads % _LANES
    0
with delta_step._advance, test_delta_triton.test_steps_of_few_tokens_replay_fold_and_snapshot_as_the_twin_does:
    "kernel: the stored state covers drafts"
    t + 1 == state_end
    t + 1 == end
with delta_inputs.ends_of, test_delta_triton.test_steps_of_few_tokens_replay_fold_and_snapshot_as_the_twin_does:
    "kernel: a snapshot covers drafts"
    (slot > 0) & (boundary > state_len) & (boundary <= state_end)
    (slot > 0) & (boundary > state_len)
with delta_inputs.convolved, test_delta_triton.test_steps_of_few_tokens_replay_fold_and_snapshot_as_the_twin_does:
    "kernel: the convolution of a new row reads the ring of the one before it"
    (t >= ago) & (t < start + ago)
    t < start + ago
with delta_rings.store_inputs, test_delta_triton.test_steps_of_few_tokens_replay_fold_and_snapshot_as_the_twin_does:
    "kernel: the last input of a step is not kept"
    (end - 1 - ago).to(tl.int64)
    (end - 2 - ago).to(tl.int64)
with delta_chunks._inverse, test_delta_triton.test_prompts_fold_and_snapshot_as_the_twin_does:
    "kernel: the inverse of a chunk lacks the products between its least blocks"
    (pair >> level) == 1
    (pair >> level) == 9
with delta_chunks._inverse, test_delta_triton.test_keys_that_are_alike_lose_no_digits:
    "kernel: the inverse of a chunk lacks the products between its larger blocks"
    (apart >> level) == 1
    (apart >> level) == 9
with delta_inputs._make_inputs, test_delta_triton.test_prompts_fold_and_snapshot_as_the_twin_does:
    "kernel: inputs of a prompt that reach into the ring are read before the step's own"
    low > start + SIZES.taps - 2
    low > start + SIZES.taps - 3
with delta_chunks.chunk_of, test_delta_triton.test_prompts_fold_and_snapshot_as_the_twin_does:
    "kernel: a chunk passes the end of the certain tokens, whose state is then lost"
    tl.where(number < second, state_end, end)
    end
with gated_norm_triton._gated_norm_kernel, test_fused.test_fused_kernels_compute_what_their_twins_do:
    "a gated norm is not rounded before its gate, as checkpoints were trained"
    ((value * scale).to(dtype).to(wide) * weights).to(dtype).to(wide)
    value * scale * weights
with terms_triton._store_terms, test_terms.test_kernels_split_as_the_twin:
    "kernel: the scale of inputs in two terms follows half of a group"
    _size(high)
    _size(low)
with term_products.reads_terms, test_terms.test_norms_and_activations_split_for_their_reader:
    "a norm splits inputs of a weight that reads them in another order"
    reader.order is None
    True
with term_products._scaled, test_terms.test_products_are_those_of_the_values:
    "kernel: codes of 4 bits without zero points of their own are not centered"
    MIDDLE_ZERO if zero.dtype.is_floating() else zero.to(tl.float32)[:, None]
    0.0 if zero.dtype.is_floating() else zero.to(tl.float32)[:, None]
with term_products._given, test_terms.test_products_are_those_of_the_values:
    "kernel: behind the last of an odd number of blocks its zero points are subtracted again"
    row < num_rows * (tile < end)
    row < num_rows
with exact_decode._attend, test_exact_attention.test_the_bits_of_a_query_depend_on_its_row_alone["orders"]:
    "INV 85: keys are joined where the split of the row ends, not at multiples of a segment"
    ((place + KEYS) % SHAPE.segment == 0) | (place + KEYS >= end)
    place + KEYS >= end
with exact_linear.count_parts, test_exact_linear.test_every_tile_makes_the_same_bits_for_a_row_whatever_its_neighbours:
    "INV 85: a weight's depth is split by another number of parts"
    depth // _PART_DEPTH
    1
with exact_reference._row_by_row, test_exact.test_nothing_changes_a_bit:
    "INV 85: on a CPU two rows are one product, whose sums have another order than one row's"
    torch.split(x, 1)
    torch.split(x, 2)
with exact_reference.act_mul, test_exact_reference.test_a_row_has_the_same_bits_beside_others_and_alone:
    "INV 85: on a CPU activations of several rows are computed together, whose last ones have other instructions"
    _row_by_row(partial(reference.act_mul, activation=activation), gate_up)
    reference.act_mul(gate_up, activation)
with skinny_linear.results_of, test_skinny_linear.test_the_activation_of_a_projection_has_the_bits_of_its_own_launch:
    "gates and ups are not rounded before they meet, so that a batch of another size has other bits"
    total.to(dtype).to(tl.float32)
    total
with parts_triton.load_delta, test_fused.test_fused_kernels_compute_what_their_twins_do:
    "a norm does not round the sum of parts before it adds it to the residual stream"
    total.to(dtype)
    total
with (
    attention_extend.head_blocks,
    test_exact_attention.test_the_bits_of_a_query_depend_on_its_row_alone["limits"],
    test_attention_extend.test_equals_the_oracle_and_follows_no_entry_that_a_row_does_not_own["edges"],
):
    "kernel: the copy engine is to load heads that are no multiple of 16 bytes"
    x.shape[2] * x.itemsize % 16
    False
