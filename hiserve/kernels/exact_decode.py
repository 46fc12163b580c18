"""Attention of few tokens a row, in one order of keys (``kernels.exact_blocks``): decode, and chains to verify.

Programs of long rows take some segments each, and the last to finish joins them all (the split-KV of FlashDecoding).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_blocks import gather
from hiserve.kernels.attention_schedule import FIELDS, Schedule, ScheduledRows, first_seen
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
from hiserve.kernels.launch import await_previous, early_launch, start_next

_NUM_JOINED = tl.constexpr(8192)
"""Elements of segments that are loaded at once to be joined: 64 for each thread of four warps."""


class _Parts(NamedTuple):
    """Parts of rows (``Schedule``), and float32 memory for segments: weighted sums, and top scores with sums of weights."""

    parts: Tensor
    counts: Tensor
    sums: Tensor
    tops: Tensor


def decode(
    q: Tensor,
    kv: LayerKV,
    rows: ScheduledRows,
    schedule: Schedule,
    tile: ExactTile,
    *,
    page_size: int,
    scale: float,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attends over the pages of rows of few tokens, some segments to a program."""
    segment = schedule.tile.num_keys
    max_segments, num_heads = triton.cdiv(rows.max_kv_len, segment), q.shape[1]
    room = (schedule.num_extra, max_segments, rows.max_q_len, num_heads)
    sums = torch.empty((*room, q.shape[2]), dtype=torch.float32, device=q.device)
    tops = torch.empty((*room, 2), dtype=torch.float32, device=q.device)
    shape = shape_of(q, kv, rows, page_size, segment, schedule.hides_first, tile)
    num_programs = shape.num_kv_heads * triton.cdiv(rows.max_q_len * shape.group, tile.num_queries)
    assert num_programs == schedule.counts.shape[1], f"{num_programs} programs, {schedule.counts.shape[1]} counts"
    _attend[(num_programs, schedule.parts.shape[0])](
        q, kv.k, kv.v, rows.page_table, _Parts(schedule.parts, schedule.counts, sums, tops), sinks, out, q.stride(0),
        kv.k.stride(0), rows.page_table.stride(0), rows.max_q_len, max_segments, schedule.window,
        scale * math.log2(math.e), shape,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **early_launch(q.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "max_q_len", "max_segments", "window", "scale"])
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, page_table, parts, sinks, out, q_stride, slot_stride, table_stride, max_q_len, max_segments, window, scale,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """One program: some queries of one KV head of one row, over some segments of its keys."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    KEYS: tl.constexpr = SHAPE.num_keys
    block, kv_head = tl.program_id(0) // SHAPE.num_kv_heads, tl.program_id(0) % SHAPE.num_kv_heads
    at = parts.parts + tl.program_id(1) * FIELDS
    row, first, end, start = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    q_len, prefix, first_part, num_parts = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    if (num_parts == 0) | (block * SHAPE.num_queries >= q_len * SHAPE.group):
        return
    token, head = queries_of(block, kv_head, SHAPE.num_queries, SHAPE)
    is_query = token < q_len
    queries = load_queries(q, start + token, head, is_query, q_stride, SHAPE)
    begin = first_seen(prefix, window, SHAPE.hides_first)
    pages = page_table + row.to(tl.int64) * table_stride
    k, v = k + kv_head * SHAPE.head_dim, v + kv_head * SHAPE.head_dim
    top, total, mixed = no_key(SHAPE)
    all_top, all_total, all_mixed = no_segment(SHAPE.num_queries, SHAPE.block_dim)
    key = first + tl.arange(0, KEYS)
    # Page numbers are loaded one step before their keys and values, so that these are pipelined num_stages ahead.
    page = tl.load(pages + key // SHAPE.page_size, (key >= begin) & (key < end), other=0)
    for place in range(first, end, KEYS):
        is_key = (key >= begin) & (key < end)
        slot = page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size
        page = tl.load(pages + (key + KEYS) // SHAPE.page_size, (key + KEYS >= begin) & (key + KEYS < end), other=0)
        keys, values = gather(k, slot, is_key, slot_stride, SHAPE), gather(v, slot, is_key, slot_stride, SHAPE)
        sees = sees_of(key, is_key, prefix + token, window)
        top, total, mixed = fold(queries, keys, values, sees, scale, top, total, mixed)
        key += KEYS
        if ((place + KEYS) % SHAPE.segment == 0) | (place + KEYS >= end):
            weight = tl.max(total, 1)
            if num_parts == 1:
                all_top, all_total, all_mixed = add(all_top, all_total, all_mixed, top, weight, mixed)
            else:
                cell = _cell(first_part, place // SHAPE.segment, max_segments, max_q_len, token, head, SHAPE)
                dim = tl.arange(0, SHAPE.block_dim)
                is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
                tl.store(parts.sums + cell[:, None] * SHAPE.head_dim + dim[None, :], mixed, is_element)
                tl.store(parts.tops + 2 * cell, top, is_query)
                tl.store(parts.tops + 2 * cell + 1, weight, is_query)
            top, total, mixed = no_key(SHAPE)
    if num_parts == 1:
        finish(all_mixed, all_top, all_total, start + token, head, is_query, sinks, out, SHAPE)
    else:
        tl.debug_barrier()  # all threads have stored before one of them raises the count, which publishes the stores
        count = parts.counts + first_part * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(count, 1, sem="acq_rel") == num_parts - 1:
            tl.store(count, 0)  # for the next layer
            first_segment, last_segment = begin // SHAPE.segment, tl.cdiv(prefix + q_len, SHAPE.segment)
            _join(
                parts, first_part, first_segment, last_segment, max_segments, max_q_len, block, kv_head, start, q_len, sinks, out, SHAPE
            )  # fmt: skip


@triton.jit
def _cell(first_part, segment, max_segments, max_q_len, token, head, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a segment is kept: rows that are split have two parts at least, so that halves of their first ones differ."""
    cell = (first_part // 2 * max_segments + segment).to(tl.int64) * max_q_len + token
    return cell * (SHAPE.num_kv_heads * SHAPE.group) + head


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts, first_part, first, last, max_segments, max_q_len, block, kv_head, start, q_len, sinks, out, SHAPE: tl.constexpr
):  # fmt: skip
    """Joins the segments of a row, in order. Loads bypass the L1 cache, which lacks the stores of other programs."""
    QUERIES: tl.constexpr = SHAPE.num_joined
    AT_ONCE: tl.constexpr = max(1, min(16, _NUM_JOINED // (SHAPE.num_joined * SHAPE.block_dim)))
    token, head = queries_of(block, kv_head, QUERIES, SHAPE)
    is_query, dim = token < q_len, tl.arange(0, SHAPE.block_dim)
    end = tl.where(is_query, last, first)
    top, total, mixed = no_segment(QUERIES, SHAPE.block_dim)
    for some in range(first, last, AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            is_there = end > some + turn
            cell = _cell(first_part, some + turn, max_segments, max_q_len, token, head, SHAPE)
            is_element = is_there[:, None] & (dim < SHAPE.head_dim)[None, :]
            found = parts.sums + cell[:, None] * SHAPE.head_dim + dim[None, :]
            one_mixed = tl.load(found, is_element, other=0.0, cache_modifier=".cg")
            one_top = tl.load(parts.tops + 2 * cell, is_there, other=float("-inf"), cache_modifier=".cg")
            one_total = tl.load(parts.tops + 2 * cell + 1, is_there, other=0.0, cache_modifier=".cg")
            top, total, mixed = add(top, total, mixed, one_top, one_total, one_mixed)
    finish(mixed, top, total, start + token, head, is_query, sinks, out, SHAPE)
