"""Groups of ranks: shares, exchanges, orders."""

from hiserve import layers
from hiserve.cache.storage import host_segment, inventory, shard_store
from hiserve.distributed import collectives, peer_memory, shard
from hiserve.engine import executor, host_adoption, joined_acks, rank, ranks, step_exchanges
from hiserve.kernels import push_sum, share_draw, step_reference
from hiserve.models import block_scales, decoder, draft_heads, names, shard_weights, shards, stream_decoder, stream_head, streams, weights
from hiserve.runners import dispatch, step_output
from hiserve.sampling import logit_shares
from tests.e2e import test_rank_processes, test_tensor_parallel
from tests.unit.distributed import test_collectives, test_peer_memory, test_shard
from tests.unit.engine import test_executor_faults, test_host_adoption, test_joined_acks, test_rank_memory, test_ranks, test_step_exchanges
from tests.unit.kernels import test_draw, test_push_sum
from tests.unit.models import test_expert_weights, test_shards
from tests.unit.runners import test_graph
from tests.unit.sampling import test_logit_shares
from tests.unit.storage import test_host_segment, test_shard_store

with layers.Embedding._of_all, test_tensor_parallel.test_a_group_has_the_tokens_of_one["preemption-eagle3-auto-1-2"]:
    "S1: each rank adds a vector for the tokens of others"
    (rows < 0) | (rows >= count)
    rows < 0
with shards.cut_table, test_shards.test_each_rank_has_its_heads_its_columns_and_its_tokens["2-auto"]:
    "S1: each rank adds the bias of an output"
    last in _ONCE and shard.rank
    False
with shard_weights.cut_whole, test_shards.test_all_experts_in_one_tensor_are_cut_inside["dummy"]:
    "S1: the first rank has all gates of an expert, and no rows of up"
    cut is not None and piece.is_interleaved
    False
with shards._cut_of_matrices, test_shards.test_all_experts_in_one_tensor_are_cut_inside["auto"]:
    "S1: experts in groups of numbers are cut by the other dimension"
    is_inner == (piece.form is Form.MXFP4)
    is_inner
with shard_weights.cut_quantized, test_shards.test_quantized_weights_are_cut_with_their_scales["blocks"]:
    "S1: a rank multiplies its columns by the scales of others"
    _part_of(weight.scales, pieces, max(1, of_rows), of_columns)
    _part_of(weight.scales, pieces, max(1, of_rows), 0)
with weights.draw_parameters, test_shards.test_weights_that_become_quantized_have_the_scales_of_the_whole["fp8-dummy"]:
    "S1: each rank rounds its columns by its own largest value"
    cut_quantized(quantize(one[name], kept[name]), cut[name], param="model")
    quantize(cut_whole(one[name], cut[name]), kept[name])
with shards._cut_of_matrices, test_shards.test_plain_experts_in_one_tensor_are_cut_inside:
    "S1: the first rank has all gates of an expert, and no ups"
    _sections(1, shard, *[piece.shape[1] // 2] * 2)
    Cut(1, *shard.part(piece.shape[1]))
with shards._cut, test_shards.test_heads_of_latents_are_shared_out["24-auto"]:
    "S1: latents of queries are cut like heads"
    model.latent.query_rank is not None
    False
with shards._cut, test_shards.test_heads_that_share_one_row_are_shared_out_by_groups["auto"]:
    "S5: each rank has some queries of an index, and chooses other rows"
    index or (name == "latents" and model.latent is not None and model.latent.query_rank is not None)
    name == "latents" and model.latent is not None and model.latent.query_rank is not None
with streams.Mix._whole, test_tensor_parallel.test_a_group_has_the_tokens_of_one_with_compressed_rows["False-1-2"]:
    "S1: what a rank has of a block's output goes into its streams"
    self.exchange is None
    True
with stream_decoder.StreamDecoder.exchanges, test_tensor_parallel.test_a_group_has_the_tokens_of_one_with_compressed_rows["False-1-2"]:
    "S4: sums of all tokens are expected behind the last experts, where few logits are wanted"
    num_tokens if self._has_aux and wants_hidden_states else num_logits
    num_tokens
with stream_head.StreamHead.exchanges, test_tensor_parallel.test_a_group_has_the_tokens_of_one_with_compressed_rows["False-1-2"]:
    "S4: sums of a head's attention are expected, where only rows are stored"
    [whole, whole, wanted] if num_logits else [whole]
    [whole, whole, wanted]
with shards._sections, test_shards.test_heads_of_states_are_shared_out["qwen3_5_text-fp8"]:
    "S1: each rank has its queries of states, and keys and values of the first rows"
    start + part[0]
    part[0]
with block_scales.multiply, test_shards.test_heads_of_states_are_shared_out["qwen3_5_text-fp8"]:
    "S1: keys and values of states are multiplied by the scales of other rows"
    piece.spans(dim)
    piece.spans(dim)[:1] * len(piece.spans(dim))
with decoder.adding_exchange, test_tensor_parallel.test_a_group_has_the_tokens_of_one_with_windows["gemma3_text-2"]:
    "S1: outputs that are whole are summed again"
    config.has_out_norms
    False
with weights.draw_parameters, test_shards.test_each_rank_has_its_heads_its_columns_and_its_tokens["2-dummy"]:
    "S1: dummy weights of a group are those of another model"
    _allocate({name: pieces}, dtype, device, norm_dtype)
    _allocate({name: cut.get(name, pieces)}, dtype, device, norm_dtype)
with shard_weights.held_parts, test_shards.test_each_rank_has_its_heads_its_columns_and_its_tokens["2-auto"]:
    "S1: every rank reads the first rows"
    tensor.begin + piece.cut.begin * num_bytes
    tensor.begin
with shard.Shard.kv_heads, test_shard.test_with_fewer_key_heads_than_ranks_neighbours_hold_the_same["2-4-heads1"]:
    "S1: ranks beyond the key heads hold the wrong ones"
    self.rank * count // self.size
    self.rank % count
with rank.Follower.execute, test_ranks.test_an_order_that_is_missing_ends_the_rank_and_says_so:
    "S2: a rank executes whatever order comes"
    order.number == self._number + 1
    True
with rank.Follower.settle, test_ranks.test_a_verdict_is_made_once_and_every_order_arrives:
    "S3: each rank has a gate of its own"
    self._order.decision
    decide()
with collectives.Collectives.gather_columns, test_collectives.test_sums_and_logits_have_the_same_bits_everywhere["dtype0-2"]:
    "S5: the last rank's tokens lie where others were expected"
    x = F.pad(x, (0, share - x.shape[1]), value=-torch.inf)
    x = F.pad(x, (share - x.shape[1], 0), value=-torch.inf)
with decoder.Decoder.exchanges, test_tensor_parallel.test_a_group_has_the_tokens_of_one["preemption-eagle3-auto-1-2"]:
    "S4: the exchanges of a step are not those that were listed"
    2 * len(self._layers) - 1
    2 * len(self._layers)
with step_exchanges.StepExchanges.abandon, test_rank_memory.test_memory_that_runs_out_anywhere_on_a_rank_costs_one_step["1-2-free-337"]:
    "S7: a rank that ran out of memory leaves the others waiting for its drafts"
    self._parts and not is_half
    False
with (
    step_exchanges.StepExchanges._of_forward,
    test_rank_memory.test_memory_that_runs_out_at_any_launch_of_a_graph_costs_one_step["1-3-eagle3-3"],
):
    "S4: a graph exchanges the rows of the step alone"
    decision.bucket * _width(plan)
    plan.num_tokens
with step_exchanges.StepExchanges._of_draw, test_tensor_parallel.test_a_group_has_the_tokens_of_one["preemption-eagle3-auto-1-2"]:
    "S4: logits are gathered whole for scores, and the list says that entries are"
    decision.sampling == Drawing.ANY.value or bool(plan.num_scored.any())
    False
with step_exchanges.StepExchanges.abandon, test_step_exchanges:
    "S7: a rank whose forward failed draws before the others may, which wait for its order"
    self._parts and not is_half
    self._parts
with logit_shares.LogitShares._join, test_logit_shares:
    "S1: a rank draws with the noise and the masks of the first rank's tokens"
    self.first
    0
with step_reference.best_entries, test_logit_shares:
    "S1: a share whose tokens are all forbidden has a token to draw"
    _widened(logits, masks)
    _widened(logits, None)
with step_reference.join_entries, test_logit_shares:
    "S1: of equal tokens of two ranks the last wins"
    tokens.masked_fill(~is_best, torch.inf).amin(-1).long()
    tokens.masked_fill(~is_best, -torch.inf).amax(-1).long()
with step_reference.join_entries, test_logit_shares:
    "S1: scores of two ranks are compared, each below its own maximum"
    maximum.amax(-1, keepdim=True)
    maximum
with share_draw._pack_best, test_draw.test_triton_chooses_the_tokens_that_the_twins_choose:
    "S1: in Triton, other ranks get the noise of another token"
    entry % 4
    entry % 2
with share_draw._join_entries, test_draw.test_triton_chooses_the_tokens_that_the_twins_choose:
    "S1: in Triton, a logit that is no number counts as nothing, and no token is the best"
    tl.where(score != score, float("inf"), score)
    score
with step_output.finish_step[1], test_tensor_parallel.test_a_group_drafts_with_a_head_of_few_tokens:
    "S1: a rank scores a prompt by the logits of its own tokens"
    inputs.scored_tokens is not None
    False
with executor.Executor._launch_draw, test_executor_faults.test_a_first_half_that_was_deferred_exchanges_nothing:
    "S4: the draw of a step that was deferred exchanges what was never listed"
    self._exchanges is not None and not isinstance(half, DeviceOutput)
    self._exchanges is not None
with shard_weights.held_parts, test_shards.test_packed_rows_that_are_spelled_out_are_cut_too:
    "S1: a rank takes two values a byte for one"
    tensor.shape == piece.shape
    True
with block_scales.multiply, test_shards.test_heads_of_latents_in_8_bits_may_end_within_a_block:
    "columns of a rank have the scales of the first rank's"
    columns // BLOCK
    (columns - columns[0]) // BLOCK
with block_scales.multiply, test_shards.test_heads_of_latents_in_8_bits_may_end_within_a_block:
    "S1: a rank multiplies its rows by the scales of the first ones"
    torch.arange(*span, device=scales.device)
    torch.arange(span[1] - span[0], device=scales.device)
with names.TensorSource.in_units, test_expert_weights.test_a_rank_has_its_part_of_packed_numbers_and_their_scales["v3"]:
    "S1: packed experts of a rank have the scales of the first one"
    cut.begin // unit
    0
with shards._expert_unit, test_shards.test_no_rank_has_a_part_of_a_block_or_of_a_column_of_the_shared_expert:
    "S1: ranks get parts of an expert that share a scale"
    max(spec.group)
    1
with draft_heads.Eagle3Head.__init__, test_tensor_parallel.test_a_group_drafts_with_a_head_of_few_tokens:
    "every rank drafts the tokens of the first one's share"
    tokens is not None and target.exchange is not None
    False
with rank.Follower._compare, test_ranks.test_a_rank_whose_rows_got_other_tokens_ends_the_group["tokens"]:
    "S5: ranks go on with different tokens"
    self._checksums[step_id] != checksum
    False
with rank.Follower._compare, test_ranks.test_a_step_may_end_while_earlier_ones_are_compared:
    "S5: a step that ends while others are compared ends the rank, or is not compared"
    list(self._checksums)
    self._checksums
with ranks.Ranks.void, test_ranks.test_steps_in_flight_behind_one_that_failed_are_not_compared:
    "S5: steps behind one that failed, whose rows may differ, are compared and end the group"
    step_id + MAX_IN_FLIGHT
    step_id
with ranks.Ranks.settle, test_ranks.test_the_first_rank_alone_looks_into_the_store:
    "S9: each rank looks into the store, and nothing takes the answers of the others"
    plan.lookups
    False
with collectives._finish, test_collectives.test_a_collective_that_is_on_the_stream_is_not_waited_for:
    "a group on GPUs ends with its first exchange, as NCCL returns nothing to wait for"
    work is not None
    True
with dispatch.Dispatch.forward, test_graph.test_a_mixed_step_waits_for_a_load_that_ended_on_another_rank_alone:
    "a rank ends at a mixed step whose load has ended on the first rank and not here"
    decision.is_whole or decision.reason is Reason.MIXED
    decision.is_whole
with joined_acks.JoinedAcks.add, test_joined_acks:
    "S6: a copy has ended when the first rank has ended it"
    len(got) == self._num_ranks
    len(got) == 1
with joined_acks._joined, test_joined_acks:
    "S9: pages arrived that one rank has not got"
    min(ack.num_pages for ack in acks)
    max(ack.num_pages for ack in acks)
with shard_store.ShardStore.exists, test_shard_store:
    "S9: pages are found of which the first rank alone has its share"
    not self._rank
    False
with host_adoption._common, test_host_adoption:
    "S9: a group adopts pages of which one rank has others under their numbers"
    other.identities[theirs]
    identities
with rank._adopt, test_tensor_parallel.test_a_group_adopts_the_pages_on_the_host_that_all_its_ranks_have:
    "S9: a rank keeps pages whose history another rank has lost, and ends when they are written again"
    host.recover()
    pass
with host_segment._names, test_tensor_parallel.test_a_group_adopts_the_pages_on_the_host_that_all_its_ranks_have:
    "S9: a group of four adopts the heads of a group of two"
    f"{each}-{rank}-of-{size}"
    f"{each}-{rank}"
with joined_acks._joined, test_tensor_parallel.test_a_load_that_fails_on_another_rank_alone_is_computed_on_all:
    "S6: a load that failed on another rank counts as done"
    next((ack for ack in acks if not ack.is_ok), acks[0])
    acks[0] if acks[0].is_ok else acks[1]
with executor.Executor._join, test_rank_memory.test_memory_that_runs_out_anywhere_on_a_rank_costs_one_step["1-2-free-337"]:
    "S7: a step that failed on another rank counts as done"
    result if fault is None else self._failed(plan, fault)
    result
with ranks.Ranks._listen, test_rank_processes.test_a_rank_that_is_killed_ends_its_engine_by_name_and_nothing_stays:
    "S8: nobody learns how a rank ended"
    how = rank.how_it_ended()
    how = "somehow"
with ranks.Ranks.agree, test_ranks.test_ranks_that_differ_do_not_serve:
    "S11: ranks on different devices serve together"
    theirs.get(name) != ours
    False
with collectives._open, test_collectives.test_a_group_listens_on_loopback_alone:
    "S13: gloo listens on all interfaces"
    dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)
    dist.ProcessGroupGloo.create_device(hostname="0.0.0.0")
with executor.Executor._abandon, test_executor_faults.test_exchanges_that_a_failed_half_owes_are_launched_like_a_step:
    "S7: what a failed half owes to other ranks is launched on another stream"
    self._launching()
    nullcontext()
with (
    rank.Follower.settle,
    test_ranks.test_a_rank_waits_for_each_load_of_a_step_though_the_first_rank_has_seen_it_end["Action.REPLAY-waits0"],
):
    "S6: a rank waits for the loads alone that the first rank waits for"
    plan.waits
    decision.loads
with push_sum._push_kernel, test_push_sum.test_words_are_taken_when_they_have_the_count_of_their_row:
    "S22: a rank that is one sum ahead overwrites words that were not read"
    count & 1
    0
with push_sum._await_words[2], test_push_sum.test_words_are_taken_when_they_have_the_count_of_their_row:
    "S22: words of a former sum are taken"
    (words >> 32).to(tl.int32) != count
    (words >> 32).to(tl.int32) == 0
with push_sum._await_words[1], test_push_sum.test_words_are_taken_when_they_have_the_count_of_their_row:
    "S22: words that are there are taken, whatever their count"
    (words >> 32).to(tl.int32) != count
    (words >> 32).to(tl.int32) == 0
with push_sum._push_kernel, test_push_sum.test_ranks_have_the_sums_of_all_in_their_order:
    "S5: each rank adds its own part first"
    rank == RANK
    rank == 0
with collectives.Collectives.sum, test_collectives.test_few_rows_are_pushed_and_noted_as_any_sum:
    "S22: what a rank owes of a step that failed goes another way than the others wait for"
    self._push is not None and self._push.takes(x)
    False
with peer_memory.map_memory, test_peer_memory.test_what_one_rank_cannot_map_no_rank_has["0 opens 2"]:
    "S22: some ranks write into memory, while others sum by NCCL"
    any(failures)
    failure
with inventory.named_caches, test_host_segment.test_parts_of_groups_of_another_size_are_told_with_their_sizes:
    "a start locks each named host cache of its user for a moment"
    re.fullmatch(names, name)
    True
