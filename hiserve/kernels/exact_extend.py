"""Attention of rows with many new tokens, in one order of keys (``kernels.exact_blocks``): prompts and chunks behind a prefix."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_blocks import gather
from hiserve.kernels.attention_extend import head_blocks
from hiserve.kernels.attention_schedule import ScheduledRows, first_seen
from hiserve.kernels.exact_blocks import (
    ExactTile,
    add,
    finish,
    fold,
    load_queries,
    no_key,
    no_segment,
    queries_of,
    sees_of,
    shape_of,
)


class _Rows(NamedTuple):
    """Lengths and pages of rows."""

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    rows: ScheduledRows,
    tile: ExactTile,
    *,
    page_size: int,
    segment: int,
    scale: float,
    out: Tensor,
    window: int | None = None,
    hides_first: bool = False,
    sinks: Tensor | None = None,
    has_fresh: bool = False,
    has_prefixed: bool = True,
) -> None:
    """Attends for rows of many tokens, some of these to a program; rows without a prefix may read ``k`` and ``v``."""
    shape = shape_of(q, kv, rows, page_size, segment, hides_first, tile)
    num_blocks = triton.cdiv(rows.max_q_len * shape.group, tile.num_queries)
    for is_fresh in [fresh for fresh, is_wanted in ((True, has_fresh), (False, has_prefixed)) if is_wanted]:
        keys, values = (k, v) if is_fresh else (kv.k, kv.v)
        blocks = [head_blocks(x, tile.num_keys, shape.block_dim) if is_fresh else None for x in (keys, values)]
        _extend[(shape.num_kv_heads * num_blocks, rows.kv_lens.shape[0])](
            q, keys, values, *blocks, _Rows(rows.qo_indptr, rows.kv_lens, rows.page_table), sinks, out, q.stride(0),
            keys.stride(0), rows.page_table.stride(0), window, scale * math.log2(math.e),
            int(has_fresh and not is_fresh), shape._replace(is_fresh=is_fresh),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window", "scale", "leaves_fresh"])
def _extend(  # type: ignore[no-untyped-def]
    q, k, v, k_blocks, v_blocks, rows, sinks, out, q_stride, slot_stride, table_stride, window, scale, leaves_fresh,
    SHAPE: tl.constexpr
):  # fmt: skip
    """One program: some queries of one KV head of one row, over all keys that these see. Those with the most come first."""
    kv_head, row = tl.program_id(0) % SHAPE.num_kv_heads, tl.program_id(1)
    start = tl.load(rows.qo_indptr + row)
    q_len = tl.load(rows.qo_indptr + row + 1) - start
    prefix = tl.load(rows.kv_lens + row).to(tl.int32) - q_len
    block = tl.cdiv(q_len * SHAPE.group, SHAPE.num_queries) - 1 - tl.program_id(0) // SHAPE.num_kv_heads
    if (block < 0) | (SHAPE.is_fresh & (prefix > 0)) | ((leaves_fresh != 0) & (prefix == 0)):
        return
    token, head = queries_of(block, kv_head, SHAPE.num_queries, SHAPE)
    is_query = token < q_len
    queries = load_queries(q, start + token, head, is_query, q_stride, SHAPE)
    first_token = block * SHAPE.num_queries // SHAPE.group
    last_token = tl.minimum((block * SHAPE.num_queries + SHAPE.num_queries - 1) // SHAPE.group, q_len - 1)
    begin, end = first_seen(prefix + first_token, window, SHAPE.hides_first), prefix + last_token + 1
    # Blocks from ``low`` to ``high``; all queries see all keys of those from ``low_all`` to ``high_all``.
    low, high = begin // SHAPE.num_keys, tl.cdiv(end, SHAPE.num_keys)
    low_all = tl.cdiv(first_seen(prefix + last_token, window, SHAPE.hides_first), SHAPE.num_keys)
    high_all = tl.maximum((prefix + first_token + 1) // SHAPE.num_keys, low_all)
    if SHAPE.is_fresh and k_blocks is None:
        low_all, high_all = low, low
    pages = rows.page_table + row.to(tl.int64) * table_stride
    k, v = k + kv_head * SHAPE.head_dim, v + kv_head * SHAPE.head_dim
    state = no_key(SHAPE) + no_segment(SHAPE.num_queries, SHAPE.block_dim)
    if window is not None or SHAPE.hides_first:
        state = _fold_some(
            queries, k, v, pages, start, low, low_all, high, begin, end, prefix + token, slot_stride, window, scale, state, SHAPE
        )  # fmt: skip
    if k_blocks is not None or not SHAPE.is_fresh:
        state = _fold_all(
            queries, k, v, k_blocks, v_blocks, kv_head, pages, start, low_all, high_all, high, slot_stride, scale, state, SHAPE
        )  # fmt: skip
    state = _fold_some(
        queries, k, v, pages, start, high_all, high, high, begin, end, prefix + token, slot_stride, window, scale, state, SHAPE
    )  # fmt: skip
    finish(state[5], state[3], state[4], start + token, head, is_query, sinks, out, SHAPE)


@triton.jit
def _fold_some(  # type: ignore[no-untyped-def]
    queries, k, v, pages, start, low, high, last, begin, end, position, slot_stride, window, scale, state, SHAPE: tl.constexpr
):  # fmt: skip
    """Adds blocks that some queries see, or of which some keys; ``last`` is the end of all blocks."""
    top, total, mixed, all_top, all_total, all_mixed = state
    for block in range(low, high):
        key = block * SHAPE.num_keys + tl.arange(0, SHAPE.num_keys)
        is_key = (key >= begin) & (key < end)
        if SHAPE.is_fresh:
            place = start + key
        else:
            place = tl.load(pages + key // SHAPE.page_size, is_key, other=0) * SHAPE.page_size + key % SHAPE.page_size
        keys, values = gather(k, place, is_key, slot_stride, SHAPE), gather(v, place, is_key, slot_stride, SHAPE)
        sees = sees_of(key, is_key, position, window)
        top, total, mixed = fold(queries, keys, values, sees, scale, top, total, mixed)
        if ((block + 1) % (SHAPE.segment // SHAPE.num_keys) == 0) | (block + 1 == last):
            all_top, all_total, all_mixed = add(all_top, all_total, all_mixed, top, tl.max(total, 1), mixed)
            top, total, mixed = no_key(SHAPE)
    return top, total, mixed, all_top, all_total, all_mixed


@triton.jit
def _fold_all(  # type: ignore[no-untyped-def]
    queries, k, v, k_blocks, v_blocks, kv_head, pages, start, low, high, last, slot_stride, scale, state, SHAPE: tl.constexpr
):  # fmt: skip
    """Adds blocks that all queries see, without a mask; those of the step's own keys by the copy engine."""
    KEYS: tl.constexpr = SHAPE.num_keys
    DIM: tl.constexpr = SHAPE.block_dim
    top, total, mixed, all_top, all_total, all_mixed = state
    key = tl.arange(0, KEYS)
    page = tl.full([KEYS], 0, tl.int32)
    if not SHAPE.is_fresh:
        page = tl.load(pages + (tl.minimum(low, tl.maximum(high - 1, 0)) * KEYS + key) // SHAPE.page_size)
    for block in range(low, high):
        if SHAPE.is_fresh:
            keys = k_blocks.load([start + block * KEYS, kv_head, 0]).reshape(KEYS, DIM)
            values = v_blocks.load([start + block * KEYS, kv_head, 0]).reshape(KEYS, DIM)
        else:
            place = page * SHAPE.page_size + (block * KEYS + key) % SHAPE.page_size
            page = tl.load(pages + (tl.minimum(block + 1, high - 1) * KEYS + key) // SHAPE.page_size)
            keys, values = gather(k, place, None, slot_stride, SHAPE), gather(v, place, None, slot_stride, SHAPE)
        top, total, mixed = fold(queries, keys, values, None, scale, top, total, mixed)
        if ((block + 1) % (SHAPE.segment // KEYS) == 0) | (block + 1 == last):
            all_top, all_total, all_mixed = add(all_top, all_total, all_mixed, top, tl.max(total, 1), mixed)
            top, total, mixed = no_key(SHAPE)
    return top, total, mixed, all_top, all_total, all_mixed
