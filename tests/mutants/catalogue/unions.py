"""Kernels of compressed attention and of streams, and their torch twins (DeepSeek-V4); rows, keys and values in 8 bits."""

from hiserve.cache.storage import cache_identity
from hiserve.core import memory_plan, resolve
from hiserve.kernels import (
    compress,
    compress_reference,
    index_topk,
    latent_union,
    packed_union,
    pairs_triton,
    reference,
    row_codec_triton,
    row_codecs,
    stream_sums,
    streams,
    union_reference,
    union_rows,
    window_slots,
)
from hiserve.models import compressed_attention
from tests.contract import test_attention
from tests.e2e import test_packed_heads, test_packed_oracle
from tests.unit.core import test_packed_rows_plan
from tests.unit.kernels import (
    test_compress,
    test_compress_reference,
    test_index_topk,
    test_latent_union,
    test_row_codecs,
    test_streams,
    test_union_reference,
    test_window_slots,
)

with union_reference.merge, test_union_reference.test_any_partition_and_order_of_the_sources_gives_the_same:
    "parts that are joined forget the sink"
    torch.logaddexp(lse, sink.to(lse.dtype))
    lse
with union_rows.rows_at, test_union_reference.test_all_sources_and_the_sink_share_one_softmax:
    "rows of nobody are read: NaN times 0"
    source.pool[slots.clamp(min=0)].to(dtype).masked_fill_((slots < 0)[..., None], 0)
    source.pool[slots.clamp(min=0)].to(dtype)
with union_reference._best, test_union_reference.test_the_best_rows_are_chosen_and_of_equal_ones_the_first:
    "of equal rows the last are chosen"
    scores.argsort(dim=-1, descending=True, stable=True)
    scores.argsort(dim=-1, stable=True).flip(-1)
with compress_reference._store_snapshots, test_compress_reference.test_drafts_are_in_no_snapshot:
    "a snapshot has inputs of drafts that may be refused"
    (state.state_lens < state.snap_at) & (state.snap_at <= state.state_ends)
    state.state_lens < state.snap_at
with latent_union._store, test_latent_union.test_one_or_two_sources_of_any_kind_in_any_parts:
    "kernel: the sink has no share"
    1.0 + tl.exp2(beside - tl.where(sees, logs, beside))
    1.0
with latent_union._attend, test_latent_union.test_one_or_two_sources_of_any_kind_in_any_parts:
    "kernel: a part reads rows of the part behind it"
    tl.minimum((part + 1) * share, num_tiles)
    num_tiles
with latent_union._join, test_latent_union.test_one_or_two_sources_of_any_kind_in_any_parts:
    "kernel: what is joined from parts is not turned back"
    turned(summed, (cos + place, sin + place), 1, SHAPE.width, SHAPE.num_pairs, True)
    summed
with index_topk._choose, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: one of the equal rows is lost"
    tl.cumsum(is_equal.to(tl.int32), 0) <= left
    tl.cumsum(is_equal.to(tl.int32), 0) < left
with index_topk._order, test_index_topk.test_exactly_the_best_rows_and_of_equal_ones_the_first:
    "kernel: scores below 0 are in the order of their bits"
    (bits >> 31) | _SIGN
    _SIGN
with compress._weigh, test_compress.test_rows_and_rings_are_those_of_the_twin_whatever_the_chunks:
    "kernel: places before the first token count"
    (place < SHAPE.ratio) & (position >= 0)
    place < SHAPE.ratio
with compress._make, test_compress.test_snapshots_are_those_of_the_twin:
    "kernel: a snapshot is stored in each step behind its boundary"
    tl.load(state_lens + row) < boundary
    boundary > 0
with streams._merge, test_streams.test_streams_are_those_of_the_twin:
    "kernel: all streams are mixed by the weights of the first"
    (token * COUNT + other) * COUNT
    token * COUNT * COUNT
with stream_sums._weigh, test_streams.test_streams_are_those_of_the_twin:
    "kernel: a program of a prompt sums the streams of its first token for all"
    first + (number - 1) // num_blocks
    first
with window_slots._list_slots, test_window_slots.test_the_first_row_is_hidden_and_no_other:
    "kernel: a draft sees the slot of the first token, which nobody wrote"
    (place < width) & (number > 0) & (number <= position)
    (place < width) & (number <= position)
with pairs_triton._turn_kernel, test_streams.test_pairs_are_turned_as_by_the_twin:
    "kernel: a row of the window is stored without the weights of its norm"
    made.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    made.to(weight.dtype).to(tl.float32)
with row_codec_triton.places_of, test_row_codecs.test_kernels_write_the_bytes_of_the_twin:
    "kernel: the scales of a page lie behind its first row"
    first + PAGE_ROWS * value_bytes + row * scale_bytes
    first + value_bytes + row * scale_bytes
with packed_union.attend_packed, test_row_codecs.test_kernels_read_packed_rows_as_the_twin_does:
    "kernel: packed rows of the second source have the scales of the first"
    tl.where(is_first, scales, others)
    scales
with row_codec_triton.load_rows, test_row_codecs.test_kernels_read_packed_rows_as_the_twin_does:
    "kernel: rotated numbers of packed rows are those of the first tile"
    place + num_tiles * TILE
    place
with index_topk._score_rows, test_row_codecs.test_kernels_read_packed_rows_as_the_twin_does:
    "kernel: scores of packed keys lack their scales"
    found *= factors[:, None]
    pass
with row_codecs.load_packed, test_row_codecs.test_slots_of_any_shape_are_read_exactly["shape0"]:
    "packed rows are read with the scale of their first tile"
    scales[:, : shape.num_tiles, None].to(torch.int32)
    scales[:, :1, None].to(torch.int32)
with compressed_attention.CompressedSelfAttention.store, test_packed_oracle.test_logits_are_those_of_rounded_rows:
    "packed rows of the window lie one by one, in no pages"
    attention.packed(kv.k, self.config.packed_row)
    attention.packed(kv.k, self.config.packed_row, attention._page_size)
with cache_identity.identify, test_packed_rows_plan.test_packed_and_plain_rows_share_no_pages:
    "a cache of plain rows is read as one of packed rows"
    group.codec in ("packed", "heads")
    False
with memory_plan._Worker._plan_windows, test_packed_rows_plan.test_the_memory_plan_counts_packed_rows:
    "the pool of windows is planned for plain rows"
    self._packs_rows
    False
with row_codecs.load_heads, test_attention.test_keys_and_values_in_8_bits_are_what_they_stand_for:
    "keys have the scales of values"
    scales[..., which : 2 * num_heads : 2]
    scales[..., 1 : 2 * num_heads : 2]
with reference.rotate_and_store, test_packed_heads.test_logits_do_not_depend_on_chunks_and_differ_a_little_from_those_of_wide_rows:
    "a prompt reads the keys and values of its own step before they are rounded"
    (q, *store_kv(kv, slots, k, v))
    (store_kv(kv, slots, k, v) and q, k, v)
with resolve._kv_dtype, test_packed_rows_plan.test_auto_is_what_the_checkpoint_was_made_for:
    "keys and values are wide although the checkpoint was made for 8 bits"
    model.asks_for_packed
    False
with row_codecs.scale_exponents, test_row_codecs.test_scales_are_the_least_powers_of_two_that_fit:
    "a scale is too small for the largest number of its tile"
    (bits & 0x7FFFFF) != 0
    (bits & 0) != 0
