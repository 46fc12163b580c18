"""Attention of few tokens a row over paged keys and values: decode, chains and trees to verify.

All query heads of one KV head, times the tokens of the row, are the rows of one matrix product, so that keys and values are
read once. Long rows are split among several programs, whose parts a second kernel joins (the split-KV of FlashDecoding).
The grid depends on nothing but shapes: ``kernels.attention_schedule`` tells every program its share on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_schedule import MAX_QUERIES, Rows, Schedule, first_seen

MAX_TOKENS = 64
"""Most tokens a row can have here: a tree's mask has one bit for each."""

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_PARTS = tl.constexpr(16)


class _Rows(NamedTuple):
    """Lengths, pages and masks of rows, and their parts, on the device."""

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    tree_mask: Tensor | None
    parts: Tensor
    split: Tensor


class _Results(NamedTuple):
    """Where results are written, and the scores that only the softmax sees; float32 room for parts of rows."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    part_out: Tensor
    part_lse: Tensor


class _Shape(NamedTuple):
    """What compilation depends on, besides types."""

    num_heads: int
    group: int
    head_dim: int
    block_dim: int
    page_size: int
    num_queries: int
    num_keys: int
    hides_first: bool


def decode(
    q: Tensor,
    kv: LayerKV,
    rows: Rows,
    schedule: Schedule,
    *,
    page_size: int,
    scale: float,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attends over the pages of each row. Reads no slot and no table entry that a row does not own.

    Args:
        q: ``[T, num_heads, head_dim]``, heads adjacent, tokens at any distance.
        kv: The layer's pool, ``[num_slots, num_kv_heads, head_dim]``.
        rows: Whose tokens they are.
        schedule: Of these rows.
        page_size: Tokens per page.
        scale: Of the scores.
        sinks: float32 ``[num_heads]``, a score that takes part in the softmax and gives nothing.
        tree_mask: int64 ``[T]``. Bit j of a token: it sees the j-th of its row's own tokens. None is causal.
        out: Written and returned when given; else a new tensor like ``q``, contiguous. Zeros where a token sees nothing.
        lse: float32 ``[T, num_heads]``, written when given: the log of the sum of exponentials, sinks included.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.k.shape[1]
    assert 1 <= rows.max_q_len <= MAX_TOKENS, f"{rows.max_q_len} tokens a row"
    assert q.stride()[1:] == (head_dim, 1) and kv.k.stride() == kv.v.stride(), (q.stride(), kv.k.stride())
    assert kv.k.stride()[1:] == (head_dim, 1) and rows.page_table.stride(1) == 1, (
        kv.k.stride(),
        rows.page_table.stride(),
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous() and (lse is None or lse.is_contiguous())
    shape = _shape(q, kv, rows, schedule, page_size)
    room = (2 * schedule.num_extra, rows.max_q_len, num_heads)  # for parts of rows that are split, which come first
    part_out = torch.empty((*room, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(room, dtype=torch.float32, device=q.device)
    ours = _Rows(rows.qo_indptr, rows.kv_lens, rows.page_table, tree_mask, schedule.parts, schedule.split)
    results = _Results(out, lse, sinks, part_out, part_lse)
    num_blocks = triton.cdiv(rows.max_q_len * shape.group, shape.num_queries)
    _attend[(num_kv_heads * num_blocks, schedule.parts.shape[0])](
        q,
        kv.k,
        kv.v,
        ours,
        results,
        q.stride(0),
        kv.k.stride(0),
        rows.page_table.stride(0),
        rows.max_q_len,
        schedule.window,
        scale * math.log2(math.e),
        shape,
        num_warps=schedule.tile.num_warps,
        num_stages=schedule.tile.num_stages,
    )
    _join[(schedule.num_extra * rows.max_q_len, num_heads)](ours, results, rows.max_q_len, shape)
    return out


def _shape(q: Tensor, kv: LayerKV, rows: Rows, schedule: Schedule, page_size: int) -> _Shape:
    num_heads, head_dim = q.shape[1:]
    group = num_heads // kv.k.shape[1]
    return _Shape(
        num_heads=num_heads,
        group=group,
        head_dim=head_dim,
        block_dim=max(16, triton.next_power_of_2(head_dim)),
        page_size=page_size,
        num_queries=min(MAX_QUERIES, max(16, triton.next_power_of_2(rows.max_q_len * group))),
        num_keys=schedule.tile.num_keys,
        hides_first=schedule.hides_first,
    )


@triton.jit(do_not_specialize=["table_stride", "max_q_len", "window", "scale"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_pool,
    v_pool,
    rows,
    results,
    q_stride,
    slot_stride,
    table_stride,
    max_q_len,
    window,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
):
    """One program: some queries of one KV head of one row, over one part of its keys. Heads of a row run side by side."""
    num_kv_heads: tl.constexpr = SHAPE.num_heads // SHAPE.group
    part = tl.program_id(1)
    row = tl.load(rows.parts + part * 4)
    first, end = tl.load(rows.parts + part * 4 + 1), tl.load(rows.parts + part * 4 + 2)
    has_others = tl.load(rows.parts + part * 4 + 3)
    if end == 0:
        return
    start = tl.load(rows.qo_indptr + row)
    q_len = tl.load(rows.qo_indptr + row + 1) - start
    prefix = tl.load(rows.kv_lens + row).to(tl.int32) - q_len
    kv_head = tl.program_id(0) % num_kv_heads
    query = tl.program_id(0) // num_kv_heads * SHAPE.num_queries + tl.arange(0, SHAPE.num_queries)
    token, head = query // SHAPE.group, kv_head * SHAPE.group + query % SHAPE.group
    is_query = token < q_len
    dim = tl.arange(0, SHAPE.block_dim)
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    at = (start + token) * q_stride + head * SHAPE.head_dim
    queries = tl.load(q + at[:, None] + dim, is_element, other=0.0)
    seen, depth = None, token
    if rows.tree_mask is not None:
        seen = tl.load(rows.tree_mask + start + token, is_query, other=0)
        if window is not None:  # as deep in the tree as it has ancestors
            depth = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1).to(tl.int32) - 1
    mixed, top, total = _attend_part(
        queries, k_pool + kv_head * SHAPE.head_dim, v_pool + kv_head * SHAPE.head_dim, rows.page_table + row * table_stride,
        token, depth, seen, prefix, first, end, slot_stride, window, scale, SHAPE
    )  # fmt: skip
    if has_others != 0:
        mixed, log_total = _close(mixed, top, total, None)
        place = (part * max_q_len + token) * SHAPE.num_heads + head
        tl.store(results.part_out + place[:, None] * SHAPE.head_dim + dim, mixed, is_element)
        tl.store(results.part_lse + place, log_total, is_query)
    else:
        sink = None
        if results.sinks is not None:
            sink = tl.load(results.sinks + head, is_query, other=0.0)
        mixed, log_total = _close(mixed, top, total, sink)
        place = (start + token) * SHAPE.num_heads + head
        tl.store(results.out + place[:, None] * SHAPE.head_dim + dim, mixed, is_element)
        if results.lse is not None:
            tl.store(results.lse + place, log_total, is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    queries,
    k_pool,
    v_pool,
    pages,
    token,
    depth,
    seen,
    prefix,
    first,
    end,
    slot_stride,
    window,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
):
    """Keys ``first``, where a block starts, to ``end``: their weighted sum, the highest score, the sum of weights."""
    QUERIES: tl.constexpr = SHAPE.num_queries  # noqa: N806
    KEYS: tl.constexpr = SHAPE.num_keys  # noqa: N806
    DIM: tl.constexpr = SHAPE.block_dim  # noqa: N806
    begin = first_seen(prefix, window, SHAPE.hides_first)
    dim, key = tl.arange(0, DIM), first + tl.arange(0, KEYS)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    # Page numbers are loaded one step ahead of what they lead to: then keys and values are loaded num_stages ahead.
    page = tl.load(pages + key // SHAPE.page_size, (key >= begin) & (key < end), other=0)
    for _ in range(first, end, KEYS):
        is_key = (key >= begin) & (key < end)
        at = (page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size) * slot_stride
        page = tl.load(pages + (key + KEYS) // SHAPE.page_size, key + KEYS < end, other=0)
        is_element = is_key[:, None] & (dim < SHAPE.head_dim)[None, :]
        keys = tl.load(k_pool + at[:, None] + dim, is_element, other=0.0)
        values = tl.load(v_pool + at[:, None] + dim, is_element, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        sees = is_key[None, :] & _sees(token, depth, seen, key - prefix, window)
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        offset = tl.where(higher == float("-inf"), 0.0, higher)
        weights, rescale = tl.exp2(scores - offset[:, None]), tl.exp2(top - offset)
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * rescale[:, None], input_precision="ieee")
        top = higher
        key += KEYS
    return mixed, top, total


@triton.jit
def _sees(token, depth, seen, key, window):  # type: ignore[no-untyped-def]
    """Which token sees which key; both count from the row's first new token, so that cached keys are negative."""
    if seen is None:
        sees = key[None, :] <= token[:, None]
    else:
        bit = tl.minimum(tl.maximum(key, 0), 63)
        sees = (key < 0)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
    if window is not None:
        sees &= key[None, :] > depth[:, None] - window
    return sees


@triton.jit
def _close(mixed, top, total, sink):  # type: ignore[no-untyped-def]
    """Divides sums by the sum of weights, ``exp2(score - top)``, and takes its log: zeros and -inf where nothing was seen."""
    if sink is not None:
        sink = sink * _LOG2_E
        higher = tl.maximum(top, sink)
        rescale = tl.exp2(top - higher)
        mixed = mixed * rescale[:, None]
        total = total * rescale + tl.exp2(sink - higher)
        top = higher
    divisor = tl.where(total > 0, total, 1.0)
    return mixed / divisor[:, None], (top + tl.log2(divisor)) * _LN_2


@triton.jit(do_not_specialize=["max_q_len"])  # type: ignore[untyped-decorator]
def _join(rows, results, max_q_len, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One program joins the parts of one head of one token, if its row is split."""
    at = rows.split + tl.program_id(0) // max_q_len * 4
    row, first_part, num_parts = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    start, token = tl.load(rows.qo_indptr + row), tl.program_id(0) % max_q_len
    q_len = tl.load(rows.qo_indptr + row + 1) - start
    if (num_parts == 0) | (token >= q_len):
        return
    DIM: tl.constexpr = SHAPE.block_dim  # noqa: N806
    head, dim = tl.program_id(1) + tl.zeros([1], tl.int32), tl.arange(0, DIM)[None, :]
    is_dim = dim < SHAPE.head_dim
    mixed = tl.zeros([1, DIM], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, num_parts, _PARTS):
        part = first + tl.arange(0, _PARTS)[:, None]
        is_part = part < num_parts
        place = ((first_part + part) * max_q_len + token) * SHAPE.num_heads + head[None, :]
        logs = tl.load(results.part_lse + place, is_part, other=float("-inf")) * _LOG2_E
        found = tl.load(results.part_out + place * SHAPE.head_dim + dim, is_part & is_dim, other=0.0)
        higher = tl.maximum(top, tl.max(logs, 0))
        offset = tl.where(higher == float("-inf"), 0.0, higher)
        weights, rescale = tl.exp2(logs - offset[None, :]), tl.exp2(top - offset)
        total = total * rescale + tl.sum(weights, 0)
        mixed = mixed * rescale[:, None] + tl.sum(found * weights, 0)[None, :]
        top = higher
    sink = None
    if results.sinks is not None:
        sink = tl.load(results.sinks + head)
    mixed, log_total = _close(mixed, top, total, sink)
    place = (start + token) * SHAPE.num_heads + head
    tl.store(results.out + place[:, None] * SHAPE.head_dim + dim, mixed, is_dim)
    if results.lse is not None:
        tl.store(results.lse + place, log_total)
