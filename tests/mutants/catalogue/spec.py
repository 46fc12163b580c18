"""Speculation: heads, drafts, what it costs and tells."""

from hiserve.attention import cpu
from hiserve.cache.storage import transfer
from hiserve.engine import drafting, executing_half, page_tables, planner, rows
from hiserve.kernels import draft_reference, step_reference, tree_reference
from hiserve.runners import device_rows, draft_graphs, gate, mixed, step_output
from hiserve.spec import acceptance, adaptive, head, history, rehearsed
from tests.contract import test_attention
from tests.e2e import (
    test_rehearsed_drafts,
    test_spec_acceptance,
    test_spec_drafts,
    test_spec_hits,
    test_spec_parity,
    test_spec_sources,
    test_speed_matrix,
    test_tree_drafts,
    test_tree_graphs,
    test_tree_matrix,
)
from tests.invariants import test_reported_bugs_drafts
from tests.unit.engine import test_drafting, test_reply_drafts
from tests.unit.kernels import test_ngram_search, test_trees
from tests.unit.runners import test_draft_graphs, test_static_inputs, test_tree_steps
from tests.unit.spec import test_adaptive, test_cold, test_history, test_tree_choice, test_tree_head

with draft_reference.draft_hidden_states, test_spec_sources.test_prompts_that_part_right_behind_a_page_keep_their_acceptance:
    "INV 45: a prompt continues after a page with the hidden states of another row"
    torch.where((first % step.page_size == 0)[:, None], at_boundary, kept)
    kept.clone()
with (
    head.HeadProposer.draft,
    test_spec_acceptance.test_drafts_drawn_with_the_noise_of_their_places_are_accepted_more_often_than_the_likeliest,
):
    "INV 44: drafts are the likeliest tokens at any temperature"
    is_greedy
    True
with transfer.ThreadTransfers._execute, test_spec_sources.test_tc_01_what_was_evicted_to_the_host_and_loaded_keeps_its_drafts:
    "TC-01: the head's part of a page stays on the device"
    host.layout.groups if copy.device_pages.size else ()
    host.layout.groups[:1]
with rows.RowState.publish, test_spec_hits.test_tc_07_speculation_does_not_defeat_prefix_reuse:
    "TC-07: pages with drafts are found by the tokens that follow theirs"
    self.tokens[row, start * page_size : end * page_size]
    self.tokens[row, (ahead := min(1, self._num_ahead)) + start * page_size :][: (end - start) * page_size]
with device_rows.DeviceRows._admit, test_spec_hits.test_tc_09_lookups_in_the_text_work_over_the_host_tier:
    "TC-09: a row after a cached prefix does not know its tokens"
    self.tokens[each.row, : each.tokens.size].copy_(prompt)
    self.tokens[each.row, each.num_computed : each.tokens.size].copy_(prompt[each.num_computed :])
with draft_graphs.DraftCapture.after.after_step, test_draft_graphs.test_drafts_behind_graphs_are_those_of_eager_steps:
    "INV 42: draft graphs start where the captured step started"
    torch.sub(forward.kv_lens, width, out=first)
    pass
with head.HeadProposer.extend, test_spec_parity.test_drafts_are_those_of_the_head_wherever_the_prompt_came_from:
    "INV 42: a draft is computed from the state of the first"
    chain.carried.copy_(carried)
    pass
with head.HeadProposer.draft, test_spec_drafts.test_a_model_that_drafts_for_itself_is_right_every_time:
    "INV 41: drafts are drawn with the noise of another position"
    self._draw_ops.draw_free(chain.logits, temperature, seed, choice, chain.positions, temperature > 0)
    self._draw_ops.draw_free(chain.logits, temperature, seed, choice, chain.positions + 1, temperature > 0)
with adaptive.DraftController.stays_cold, test_cold.test_it_comes_back_where_drafts_are_accepted_again:
    "INV 68: a cold head is never tried again"
    schedule.note_cold(allowed.size, self._trial_cost)
    pass
with adaptive.DraftController._choose, test_adaptive.test_work_of_one_kind_is_done_as_fast_as_with_the_best_fixed_number:
    "adaptive drafts: the longest draft is chosen at any cost"
    tokens / seconds
    tokens
with gate.admit, test_reported_bugs_drafts.test_tc_05_steps_wait_for_the_loads_that_they_read_and_for_no_others:
    "TC-05: a step waits for every load in flight"
    (op for op in plan.waits if op in loads.open)
    loads.open
with planner.Planner.plan, test_reported_bugs_drafts.test_tc_05_steps_wait_for_the_loads_that_they_read_and_for_no_others:
    "TC-05: a step inherits the loads of the previous one"
    waits: tuple[int, ...] = ()
    waits = self._in_flight[-1].plan.waits if self._in_flight else ()
with page_tables.PageTables.grow, test_reported_bugs_drafts.test_tc_10_the_last_page_of_rejected_tokens_is_returned:
    "TC-10: rows get new pages for all drafts at each step"
    growing = (end > held * page_size).nonzero()[0]
    end = np.minimum(end + page_size, page_size * self.pages.shape[1])
    growing = (end > held * page_size).nonzero()[0]
with drafting.Drafting.verified, test_drafting.test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token:
    "accept length: the bonus token counts as a draft"
    counts[did, None] - 1
    counts[did, None]
with rehearsed.RehearsedProposer.draft, test_rehearsed_drafts.test_tokens_are_the_same_and_so_many_drafts_are_accepted:
    "a rehearsed draft is that of the next position"
    chain.positions - 1
    chain.positions
with rehearsed.RehearsedProposer.draft, test_rehearsed_drafts.test_tokens_are_the_same_and_so_many_drafts_are_accepted:
    "all requests rehearse the reply of the first"
    seeds.clamp(0, num_requests - 1) * max_len
    seeds * 0
with history.ReplyHistory.follow, test_history.test_rows_of_a_step_are_searched_at_once:
    "n-gram drafts: a tenant gets what was said to another"
    self._regions.get(tenant, 0) << self._num_bits
    1 << self._num_bits
with history.ReplyHistory._forget_oldest, test_history.test_the_tenant_whose_last_reply_is_oldest_makes_room_and_leaves_nothing:
    "n-gram drafts: a tenant's region still has the replies to another"
    self._text[region * self._stride : (region + 1) * self._stride] = 0
    pass
with draft_reference._follow, test_ngram_search.test_a_continuation_is_followed_while_more_tokens_agree_with_it:
    "n-gram drafts: a continuation is followed though another token came"
    (got == following) | (index >= num_since)
    index >= 0
with drafting.Drafting.continuations, test_reply_drafts.test_a_row_of_few_tokens_is_not_searched_with_those_of_the_request_before_it:
    "n-gram drafts: a short row is searched with the tokens of the request before it"
    np.maximum(known[:, None] - _BACK, 0)
    known[:, None] - _BACK
with planner.Planner.flush, test_reply_drafts.test_a_flush_of_the_device_forgets_replies:
    "n-gram drafts: a flush leaves replies"
    self._drafting.forget()
    pass
with rehearsed.RehearsedReplies.record, test_rehearsed_drafts.test_tokens_are_the_same_and_so_many_drafts_are_accepted:
    "rehearsed drafts are right less often than asked for"
    chances(seeds, positions) < acceptance
    chances(seeds, positions) < acceptance**2
with step_output.record, test_tree_matrix.test_trees_change_nothing:
    "INV 81: keys and values of accepted nodes stay where they were computed"
    rows.ops.move(rows.storages, inputs.forward.slots, starts, path, counts)
    pass
with executing_half._moved_storages, test_speed_matrix.test_nothing_changes_a_token:
    "INV 81: scales of keys and values in 8 bits stay where accepted nodes were computed"
    (*plan.groups, *debug_groups(settings.cache))
    (plan.groups[0], *debug_groups(settings.cache))
with step_reference.fill_inputs, test_tree_matrix.test_trees_change_nothing:
    "INV 81: a node stands at its number"
    torch.where(nodes == 0, positions, positions - inputs.offsets + depths)
    positions
with step_output.draft_step, test_tree_drafts.test_branches_bring_more_tokens_a_step_than_a_chain_as_deep:
    "drafts in trees: the head gets the states of the first nodes instead of the accepted ones"
    states.index_select(0, _on_paths(plan, q_lens, inputs.path))
    states
with step_output._ahead, test_tree_steps.test_the_tokens_before_a_node_are_those_of_its_path:
    "drafts in trees: penalties count the first nodes instead of the path"
    is_ancestor.int().argmax(2)
    depth[:, 0]
with tree_reference.write_trees, test_tree_head.test_drafts_are_written_in_slots_of_their_own_row_alone["branched"]:
    "drafts in trees: nodes past the last slot of a row are written into the next one"
    places < row_len
    places >= 0
with tree_reference.write_trees, test_trees.test_a_row_that_gets_a_chain_gets_the_best_path_and_an_illegal_one_nothing:
    "drafts in trees: rows with a grammar get nodes of a tree"
    torch.where(is_chain, path[:, index.clamp(max=shape.depth - 1)], tree.drafts)
    tree.drafts
with head.TreeProposer.prepare, test_tree_head.test_drafts_are_a_chain_until_a_tree_is_written:
    "drafts in trees: a chain is verified as if it were the tree before it"
    self._masks.index_copy_(0, chain.rows, self._chain.expand(chain.rows.shape[0], -1))
    pass
with head.HeadProposer.compute, test_tree_drafts.test_a_tree_of_one_candidate_a_level_is_a_chain:
    "drafts in trees: each level is stored in the places of the one before"
    chain.positions + nodes.num_before
    chain.positions
with cpu.CpuAttention._see_trees, test_attention.test_a_node_sees_its_ancestors_that_were_computed_before:
    "INV 36: masks count from a step's own tokens where nodes were computed before"
    row.kv_len - row.num_new - num_before
    row.kv_len - row.num_new
with acceptance.TierAcceptance.add, test_tree_choice.test_trees_are_left_where_they_fail_and_found_again:
    "drafts in trees: what is verified step after step tells nothing of other kinds"
    other.follow(known.after / np.maximum(before, LEAST_CHANCE))
    other.update()
with acceptance.TierAcceptance.tokens, test_tree_choice.test_rows_with_few_drafts_get_chains_and_beside_others_count_as_chains:
    "drafts in trees: rows that have chains are taken to have trees"
    allowed < self._tiers[tier]
    allowed < 0
with draft_graphs.DraftCapture.after, test_tree_graphs.test_as_many_drafts_are_accepted_after_replays_as_after_eager_steps:
    "drafts in trees: after a replay the head gets the states of the first nodes instead of the accepted ones"
    path[:, :num_kept]
    path[:, :num_kept] * 0
with mixed.StaticInputs.fill, test_static_inputs.test_nodes_of_the_step_before_are_causal_again:
    "drafts in trees: a replay reads masks of the step before"
    static.tree_mask[:bucket].zero_()
    pass
