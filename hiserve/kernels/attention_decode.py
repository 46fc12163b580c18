"""Attention of a few tokens per row over paged keys and values: decode, and chains and trees to verify.

All query heads of one KV head, times the tokens of the row, are the rows of one matrix product, so that keys and
values are read once. Long rows are split among several programs; the last to finish joins the parts (the split-KV of
FlashDecoding). The grid depends only on shapes: ``kernels.attention_schedule`` assigns the parts on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_blocks import ALL_ONE, fit_half, weigh_packed
from hiserve.kernels.attention_join import close, finish, join_parts, queries_of, store_part
from hiserve.kernels.attention_schedule import FIELDS, MAX_QUERIES, Schedule, ScheduledRows, first_seen
from hiserve.kernels.few_bits import widen_e4m3
from hiserve.kernels.launch import await_previous, early_launch, start_next

MAX_TOKENS = 64
"""Most tokens a row can have here: a tree's mask has one bit for each."""

_LOG2_E = tl.constexpr(math.log2(math.e))


class _Pool(NamedTuple):
    """Keys, values, and the scales of packed ones, whose values are read as int16."""

    k: Tensor
    v: Tensor
    scales: Tensor | None


class _Rows(NamedTuple):
    """Pages, masks and parts of rows, on the device."""

    page_table: Tensor
    tree_mask: Tensor | None
    parts: Tensor
    counts: Tensor


class _Results(NamedTuple):
    """Output tensors, the sinks, and float32 memory for parts of rows."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    part_out: Tensor
    part_lse: Tensor


class _Shape(NamedTuple):
    """Compile-time constants besides types."""

    num_heads: int
    group: int
    head_dim: int
    block_dim: int
    page_size: int
    num_queries: int
    num_joined: int
    num_keys: int
    hides_first: bool
    has_instructions: bool


def decode(
    q: Tensor,
    kv: LayerKV,
    rows: ScheduledRows,
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
        kv: The layer's pool, ``[num_slots, num_kv_heads, head_dim]``; may be packed.
        rows: The rows of these tokens. A row without tokens must be of length 1; it is not read.
        schedule: For these rows.
        page_size: Tokens per page.
        scale: Factor of the scores.
        sinks: float32 ``[num_heads]``, scores that take part in the softmax without a value.
        tree_mask: int64 ``[T]``. Bit j of a token: it sees the j-th of its row's own tokens, ``rows.num_nodes_before`` earlier ones
            among them. 0 is causal, and None all tokens.
        out: Written and returned when given; else a new contiguous tensor like ``q``. Zeros where a token sees no key.
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
    room = (2 * schedule.num_extra, rows.max_q_len, num_heads)  # of rows that are split, whose parts come first
    part_out = torch.empty((*room, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(room, dtype=torch.float32, device=q.device)
    num_programs = schedule.counts.shape[1]
    assert num_programs == num_kv_heads * triton.cdiv(rows.max_q_len * shape.group, shape.num_queries), num_programs
    _attend[(num_programs, schedule.parts.shape[0])](
        q, _Pool(kv.k, kv.v if kv.scales is None else kv.v.view(torch.int16), kv.scales),
        _Rows(rows.page_table, tree_mask, schedule.parts, schedule.counts),
        _Results(out, lse, sinks, part_out, part_lse), q.stride(0), kv.k.stride(0), rows.page_table.stride(0),
        rows.max_q_len, schedule.window, scale * math.log2(math.e), shape,
        num_warps=schedule.tile.num_warps, num_stages=schedule.tile.num_stages, maxnreg=schedule.tile.max_registers,
        **early_launch(q.device),
    )  # fmt: skip
    return out


def _shape(q: Tensor, kv: LayerKV, rows: ScheduledRows, schedule: Schedule, page_size: int) -> _Shape:
    num_heads, head_dim = q.shape[1:]
    group = num_heads // kv.k.shape[1]
    num_queries = min(MAX_QUERIES, triton.next_power_of_2(rows.max_q_len * group))
    return _Shape(
        num_heads=num_heads,
        group=group,
        head_dim=head_dim,
        block_dim=max(_least_dim(num_queries, packs=kv.scales is not None), triton.next_power_of_2(head_dim)),
        page_size=page_size,
        num_queries=max(16, num_queries),
        num_joined=num_queries,
        num_keys=schedule.tile.num_keys,
        hides_first=schedule.hides_first,
        has_instructions=_has_instructions(q),
    )


def _least_dim(num_queries: int, *, packs: bool) -> int:
    """Returns the least elements of a head for the compiler.

    What Triton 3.6 makes for Hopper of products of 64 queries and 32 columns of values, half of a head of 64, addresses shared
    memory out of range.
    """
    return 128 if packs and num_queries == MAX_QUERIES else 16


def _has_instructions(q: Tensor) -> bool:
    """Whether a GPU widens packed values, to float16."""
    return q.device.type == "cuda" and q.dtype.itemsize == 2


@triton.jit(do_not_specialize=["table_stride", "max_q_len", "window", "scale"])
def _attend(  # type: ignore[no-untyped-def]
    q, pool, rows, results, q_stride, slot_stride, table_stride, max_q_len, window, scale,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """One program: some queries of one KV head of one row, over one part of its keys. Heads of a row are adjacent."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    part = tl.program_id(1)
    at = rows.parts + part * FIELDS
    row, first, end, start = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    q_len, prefix, first_part, num_parts = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    if (num_parts == 0) | (q_len == 0):
        return
    token, head = queries_of(tl.arange(0, SHAPE.num_queries), SHAPE)
    is_query = token < q_len
    dim = tl.arange(0, SHAPE.block_dim)
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    queries = tl.load(q + ((start + token) * q_stride + head * SHAPE.head_dim)[:, None] + dim, is_element, other=0.0)
    seen, depth = None, token
    if rows.tree_mask is not None:
        seen = tl.load(rows.tree_mask + start + token, is_query, other=0)
        seen = tl.where(seen == 0, (tl.full([], 2, tl.int64) << token.to(tl.int64)) - 1, seen)  # causal
        if window is not None:  # a token's depth in the tree is its number of ancestors
            depth = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1).to(tl.int32) - 1
    kv_head = tl.program_id(0) % (SHAPE.num_heads // SHAPE.group)
    attend: tl.constexpr = _attend_part if pool.scales is None else _attend_packed
    mixed, top, total = attend(
        queries, pool, kv_head, rows.page_table + row * table_stride,
        token, depth, seen, prefix, first, end, slot_stride, window, scale, SHAPE
    )  # fmt: skip
    if num_parts == 1:
        finish(mixed, top, total, token, head, start, q_len, results, SHAPE)
    else:
        mixed, log_total = close(mixed, top, total, None)
        store_part(part, mixed, log_total, token, head, max_q_len, q_len, results, SHAPE)
        join_parts(part, first_part, num_parts, max_q_len, start, q_len, rows, results, SHAPE)


@triton.jit
def _attend_part(  # type: ignore[no-untyped-def]
    queries, pool, kv_head, pages, token, depth, seen, prefix, first, end, slot_stride, window, scale,
    SHAPE: tl.constexpr
):  # fmt: skip
    """Attends over keys ``first`` (a block's start) to ``end``: weighted sum of values, top score, sum of weights."""
    QUERIES: tl.constexpr = SHAPE.num_queries
    KEYS: tl.constexpr = SHAPE.num_keys
    DIM: tl.constexpr = SHAPE.block_dim
    begin = first_seen(prefix, window, SHAPE.hides_first)
    dim, key = tl.arange(0, DIM), first + tl.arange(0, KEYS)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    k_pool, v_pool = pool.k + kv_head * SHAPE.head_dim, pool.v + kv_head * SHAPE.head_dim
    # Page numbers are loaded one step before their keys and values, so that these are pipelined num_stages ahead.
    page = tl.load(pages + key // SHAPE.page_size, (key >= begin) & (key < end), other=0)
    for _ in range(first, end, KEYS):
        is_key = (key >= begin) & (key < end)
        at = (page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size) * slot_stride
        page = tl.load(pages + (key + KEYS) // SHAPE.page_size, key + KEYS < end, other=0)
        is_element = is_key[:, None] & (dim < SHAPE.head_dim)[None, :]
        keys = tl.load(k_pool + at[:, None] + dim, is_element, other=0)
        values = tl.load(v_pool + at[:, None] + dim, is_element, other=0)
        sees = is_key[None, :] & _sees(token, depth, seen, key - prefix, window)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
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
def _attend_packed(  # type: ignore[no-untyped-def]
    queries, pool, kv_head, pages, token, depth, seen, prefix, first, end, slot_stride, window, scale,
    SHAPE: tl.constexpr
):  # fmt: skip
    """Like ``_attend_part``, of keys and values in 8 bits.

    Values are read two at a time, an even and an odd one, which have products of their own: elements of 16 bits come from
    shared memory as the matrix instructions take them, bytes would be gathered one by one.
    """
    QUERIES: tl.constexpr = SHAPE.num_queries
    KEYS: tl.constexpr = SHAPE.num_keys
    DIM: tl.constexpr = SHAPE.block_dim
    scale_words: tl.constexpr = (SHAPE.num_heads // SHAPE.group + 1) // 2
    begin = first_seen(prefix, window, SHAPE.hides_first)
    dim, pair, key = tl.arange(0, DIM), tl.arange(0, DIM // 2), first + tl.arange(0, KEYS)
    even = tl.zeros([QUERIES, DIM // 2], tl.float32)
    odd = even
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    k_pool, v_pool = pool.k + kv_head * SHAPE.head_dim, pool.v + kv_head * (SHAPE.head_dim // 2)
    queries, units = fit_half(queries)
    units *= scale
    page = tl.load(pages + key // SHAPE.page_size, (key >= begin) & (key < end), other=0)
    for _ in range(first, end, KEYS):
        is_key = (key >= begin) & (key < end)
        slot = page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size
        page = tl.load(pages + (key + KEYS) // SHAPE.page_size, key + KEYS < end, other=0)
        is_element = is_key[:, None] & (dim < SHAPE.head_dim)[None, :]
        keys = tl.load(k_pool + (slot * slot_stride)[:, None] + dim, is_element, other=0)
        is_pair = is_key[:, None] & (pair < SHAPE.head_dim // 2)[None, :]
        pairs = tl.load(v_pool + (slot * (slot_stride // 2))[:, None] + pair, is_pair, other=0)
        words = tl.load(pool.scales + slot * scale_words + kv_head // 2, is_key, other=ALL_ONE)
        sees = is_key[None, :] & _sees(token, depth, seen, key - prefix, window)
        shares, decay, top, total = weigh_packed(queries, keys, words, kv_head, sees, units, top, total)
        low, high = widen_e4m3(pairs, shares.dtype, SHAPE.has_instructions)
        even = tl.dot(shares, low, even * decay[:, None], input_precision="ieee")
        odd = tl.dot(shares, high, odd * decay[:, None], input_precision="ieee")
        key += KEYS
    return tl.join(even, odd).reshape(QUERIES, DIM), top, total


@triton.jit
def _sees(token, depth, seen, key, window):  # type: ignore[no-untyped-def]
    """Visibility mask. Keys and tokens are counted from the row's first new token, so that cached keys are negative."""
    if seen is None:
        sees = key[None, :] <= token[:, None]
    else:
        bit = tl.minimum(tl.maximum(key, 0), 63)
        sees = (key < 0)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
    if window is not None:
        sees &= key[None, :] > depth[:, None] - window
    return sees
