"""Layers with compressed rows and several streams (DeepSeek-V4)."""

from hiserve.kernels import compress_reference, pairs, union_rows
from hiserve.models import compressed_attention, compressed_cache, compressed_spelling, packed_rows, stream_decoder, stream_head, weights
from hiserve.runners import mixed
from tests.e2e import test_compressed_oracle, test_stream_graphs, test_stream_heads
from tests.unit.models import test_compressed_config, test_packed_rows
from tests.unit.runners import test_static_inputs

with compress_reference._Inputs.read, test_compressed_oracle.test_hb_19_rows_do_not_depend_on_chunks:
    "HB-19: a row that ends in a step is made of the tokens of that step alone"
    torch.where((position >= starts)[..., None], self.inputs[token], old)
    self.inputs[token]
with union_rows.slots_of, test_compressed_oracle.test_a_token_sees_the_rows_of_its_prefix_and_no_other:
    "INV H8: a token sees a row that has not ended"
    (positions + 1) // source.ratio
    (positions + source.ratio) // source.ratio
with compressed_attention.CompressedSelfAttention.__call__, test_compressed_oracle.test_logits_are_those_of_transformers["plain-float64"]:
    "outputs are not turned back"
    ops.attend(q, sources, self.sinks, width**-0.5, (turns.cos, turns.sin))
    ops.attend(q, sources, self.sinks, width**-0.5)
with pairs.pair_angles, test_compressed_oracle.test_logits_are_those_of_transformers["plain-float64"]:
    "compressed rows have the position of the token that ends them"
    positions // ratios * ratios
    positions.expand(ratios.shape[0], -1)
with stream_decoder.StreamDecoder.finish[2], test_compressed_oracle.test_tokens_of_other_shapes["ratios 2 and 8"]:
    "the last layer's experts take the tokens of other rows"
    streams.index_select(0, rows)
    streams[: rows.shape[0]]
with compressed_spelling._rotations, test_compressed_config.test_released_files_name_ratios_and_numbers_of_layers:
    "YaRN scales the cosines of compressed layers"
    compress.setdefault("attention_factor", 1.0)
    pass
with compressed_cache.compressed_plan, test_compressed_config.test_each_kind_of_layer_stores_what_it_reads:
    "rings have no room for drafts that were refused"
    2 * (1 + max_draft)
    1 + max_draft
with union_rows.slots_behind_first, test_stream_heads.test_its_logits_are_those_of_the_layer_in_transformers:
    "a draft sees the slot of the first token, which nobody wrote"
    positions < source.window
    positions < 0
with packed_rows.check_packed, test_packed_rows.test_what_is_missing_is_named:
    "packed experts may lack their scales"
    scale is None or scale.shape != wanted or scale.dtype != _SCALE_DTYPE
    False
with weights._refuse_strange_experts, test_compressed_config.test_a_table_of_experts_that_are_not_there_is_refused:
    "a table may name experts that are not there"
    low < 0 or high >= config.experts.num_experts
    False
with mixed.StaticInputs.fill, test_stream_graphs.test_graphs_give_the_tokens_of_transformers["off"]:
    "INV H13: tokens of a mixed graph keep the rows of the step before"
    static.token_rows[:bucket].copy_(new_rows)
    pass
with mixed.StaticInputs.fill, test_static_inputs.test_every_token_has_its_place_and_padding_reads_nothing_of_the_step_before:
    "padding tokens keep the positions of the step before"
    static.positions[num_tokens:bucket].zero_()
    pass
with weights._renamed, test_compressed_config.test_a_tensor_under_two_names_is_refused:
    "of a tensor under two names the last is taken"
    name in held
    (name := rename(source)) is None
with compressed_spelling._layer_types, test_compressed_config.test_what_is_not_supported_is_refused_by_name:
    "ratios that contradict the types of layers are ignored"
    ratio != known.get(kind, ratio)
    False
with compressed_cache.page_multiple, test_compressed_config.test_a_page_has_whole_rows_of_all_ratios:
    "a row stands for tokens of two pages"
    math.lcm(*config.ratios)
    max(config.ratios)
with stream_head.StreamHead.forward, test_stream_heads.test_its_logits_are_those_of_the_layer_in_transformers:
    "a chunk of a prompt without logits stores no rows for drafts"
    layer.attention.store(row[:, None, :][:, :0], row, inputs, turns, kv, attention)
    pass
