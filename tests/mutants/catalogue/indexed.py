"""An index beside latents (DeepSeek-V3.2, GLM-5)."""

from hiserve.attention import chosen_prompts, indexed
from hiserve.kernels import chosen_prompts as chosen_kernel
from hiserve.kernels import (
    chosen_reference,
    chosen_triton,
    index_rows,
    index_store,
    index_topk,
    latent_rows,
    packed_latents,
    reference,
    row_codec_triton,
)
from hiserve.models import index_config, latent_attention, model_config
from hiserve.text.template import deepseek_v32
from tests.e2e import test_index_graphs, test_index_oracle, test_packed_latents
from tests.unit.attention import test_chosen_prompts
from tests.unit.kernels import test_chosen_prompts as test_chosen_kernel
from tests.unit.kernels import test_fused, test_index_store, test_index_topk, test_latent_decode
from tests.unit.models import test_index_config
from tests.unit.text import test_deepseek_v32_prompts

with indexed.IndexedAttention.plan, test_index_oracle.test_logits_are_those_of_transformers["deepseek"]:
    "rows that are longer than what is chosen see all tokens"
    inputs.max_kv_len > self._most
    False
with indexed.IndexedAttention.choose, test_index_oracle.test_logits_are_those_of_transformers["deepseek"]:
    "a short row has one chosen token less"
    (rows.positions + 1).clamp_(max=self._most)
    (rows.positions + 1).clamp_(max=self._most - 1)
with chosen_prompts.plan_prompts, test_chosen_prompts.test_beginnings_of_prompts_are_expanded_while_there_is_room_for_the_keys_before_them:
    "keys of any prefix are expanded, whatever memory they take"
    (counts < least) | (sizes - counts > room)
    counts < least
with chosen_prompts._split, test_chosen_prompts.test_rows_whose_keys_find_no_room_at_once_are_in_turns:
    "all rows of a step are expanded at once, whatever memory their prefixes take"
    size > room
    False
with chosen_prompts._split, test_chosen_prompts.test_rows_whose_keys_find_no_room_at_once_are_in_turns:
    "the first row of a turn takes no room"
    size = int(beside[row])
    size = 0
with chosen_prompts.plan_prompts, test_chosen_prompts.test_beginnings_of_prompts_are_expanded_while_there_is_room_for_the_keys_before_them:
    "rows that decode are expanded, though their lengths are bounds"
    counts[: inputs.num_decode] = 0
    pass
with chosen_prompts._group, test_chosen_prompts.test_beginnings_of_prompts_are_expanded_while_there_is_room_for_the_keys_before_them:
    "keys that pad a row lie behind it, where nobody may have written"
    np.minimum(position, np.repeat(last, sizes))
    position
with indexed.IndexedAttention.choose, test_chosen_prompts.test_tokens_see_the_keys_that_they_chose_expanded_and_absorbed["rows0-False"]:
    "bits are those of the first tokens of a step"
    seen(self._prompts.tokens, self._prompts.most)
    seen(None, self._prompts.most)
with chosen_kernel._attend, test_chosen_kernel.test_the_kernel_computes_what_its_twin_does:
    "kernel: of a block the choice of the one before is taken"
    tl.minimum(block + 1, num_blocks - 1)
    block
with index_topk._score, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: two tokens of different rows share the keys of the first"
    tl.where(tl.load(token_rows + last) == row, last, token)
    last
with index_topk._score, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: of two tokens' rows those are scored that the first one sees"
    tl.maximum(tl.load(positions + token), tl.load(positions + last))
    tl.load(positions + token)
with index_topk._choose, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: more rows than are chosen by one are all chosen"
    tl.sum(is_row.to(tl.int32), 0) > most
    tl.sum(is_row.to(tl.int32), 0) > most + 1
with index_topk._choose, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: bits name all rows that are better or equal"
    tl.reshape(is_chosen.to(tl.int64), [CHUNK // _WORD, _WORD])
    tl.reshape((is_better | is_equal).to(tl.int64), [CHUNK // _WORD, _WORD])
with index_rows.rotate_first, test_index_oracle.test_logits_are_those_of_transformers["deepseek"]:
    "keys of an index know no positions"
    torch.cat((rotated, plain), -1)
    x
with latent_attention._make_index, test_index_oracle.test_logits_are_those_of_transformers["glm"]:
    "keys of an index whose neighbours are rotated are normed by the weights of others"
    (into, norm[:, None], bias[:, None])
    (into,)
with indexed.IndexedAttention.plan, test_index_graphs.test_graphs_give_the_tokens_of_transformers["off"]:
    "a graph is made for rows no longer than its first"
    inputs.max_kv_len > self._most
    int(inputs.kv_lens.max()) > self._most
with index_config.IndexConfig.cache_plan, test_index_config.test_a_token_stores_a_latent_of_each_layer_and_a_key_of_those_that_choose:
    "layers that take the choice of another have keys too"
    {layer: place for place, layer in enumerate(self.layers)}
    {layer: layer for layer in range(rows.num_layers)}
with model_config.ModelConfig.slot_elements, test_index_config.test_a_token_stores_a_latent_of_each_layer_and_a_key_of_those_that_choose:
    "the memory of pages leaves the keys of an index out"
    0 if self.index is None else self.index.slot_elements
    0
with (
    index_config.read_index,
    test_index_config.test_an_index_that_makes_no_sense_is_named["changes4-the first layer takes the choice of a layer before it"],
):
    "the first layer may take the choice of none"
    types[:1] == [_SHARED]
    False
with chosen_reference.attend_chosen, test_latent_decode.test_chosen_rows_are_those_of_the_twin_and_no_others:
    "rows behind the chosen ones are seen"
    torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
    torch.arange(slots.shape[1], device=slots.device) < counts[:, None] + 1
with chosen_triton.attend_chosen, test_latent_decode.test_chosen_rows_are_those_of_the_twin_and_no_others:
    "tokens of a second launch see the rows of the first tokens"
    LatentRows(starts, counts[mine], slots[mine])
    LatentRows(starts, counts, slots)
with deepseek_v32.encode, test_deepseek_v32_prompts.test_results_stand_in_the_order_of_the_calls_and_the_thought_goes_on:
    "thoughts before the last turn of the user stay in prompts of DeepSeek-V3.2"
    thinks and first > asked
    thinks
with index_store._store_index_keys, test_index_store.test_keys_and_queries_of_an_index_are_those_of_the_twin:
    "kernel: elements that are not there count in the variance of a key"
    tl.where(is_rest, plain - mean, 0.0)
    plain - mean
with row_codec_triton.store_key, test_index_store.test_packed_keys_have_the_bytes_of_the_codec:
    "kernel: numbers that are not rotated do not count in the scale of a packed key"
    tl.maximum(largest, tl.max(tl.abs(three), 0))
    largest
with latent_rows.load_latents, test_latent_decode.test_rows_in_8_bits_are_read_as_the_reference_reads_them:
    "kernel: the second half of a packed latent has the scales of the first"
    tl.load(scale[:, None] + 2 + quarter, mask=mask, other=0.0)
    tl.load(scale[:, None] + quarter, mask=mask, other=0.0)
with packed_latents.attend_packed, test_latent_decode.test_rows_in_8_bits_are_read_as_the_reference_reads_them:
    "a draft sees the drafts after it in packed latents"
    is_key[None, :] & (key[None, :] <= last[:, None])
    is_key[None, :]
with latent_rows.store_turned, test_fused.test_fused_kernels_compute_what_their_twins_do:
    "kernel: new rotated keys are read wider than those that are stored in 8 bits"
    rounded(turned).to(tl.float32, bitcast=True).to(turned.dtype)
    turned
with reference.store_latents, test_packed_latents.test_logits_are_those_of_rounded_rows["deepseek_v32"]:
    "new latents are read as they were before they were packed"
    load_packed(kv.k[:, 0], slots, packed).to(rows.dtype)[:, None]
    rows
with latent_attention.RowIndex.__call__, test_packed_latents.test_logits_are_those_of_rounded_rows["deepseek_v32"]:
    "packed keys are read as keys that are not packed"
    attention.choose(self.ops.rotate_first(queries, *turns), wide, keys, inputs, packed)
    attention.choose(self.ops.rotate_first(queries, *turns), wide, keys, inputs)
