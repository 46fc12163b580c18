"""Attention of few tokens a row over paged keys and values: decode, chains and trees to verify.

All query heads of one KV head, times the tokens of the row, are the rows of one matrix product, so that keys and values are
read once. A long row is split among several programs, whose parts a second kernel joins (the split-KV of FlashDecoding).
The grid depends on nothing but shapes: every program finds its share of the row from the lengths on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV

MAX_TOKENS = 64
"""Most tokens a row can have here: a tree's mask has one bit for each."""

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_MAX_QUERIES = 64
_MAX_SPLITS = 64
_MIN_SHARE = 64
_PROGRAMS_PER_SM = 2


class Tile(NamedTuple):
    """How the keys of a row are taken.

    Attributes:
        num_keys: Keys a step, a power of two, at least 16.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are under way at once.
    """

    num_keys: int
    num_warps: int
    num_stages: int


class _Rows(NamedTuple):
    """Lengths and pages of rows, on the device."""

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    tree_mask: Tensor | None


class _Results(NamedTuple):
    """Where results are written, and the scores that only the softmax sees."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None


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
    is_part: bool


def tile_for(head_dim: int, dtype: torch.dtype) -> Tile:
    """Returns the tile that was fastest on one H200, among those that fit its shared memory."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return Tile(num_keys=64 if row_bytes <= 256 else 32, num_warps=4, num_stages=3)


def choose_num_splits(num_rows: int, max_q_len: int, max_kv_len: int, heads: tuple[int, int], num_sms: int) -> int:
    """Returns into how many parts to split each row, so that the programs fill the multiprocessors.

    Args:
        num_rows: Rows of the batch.
        max_q_len: Upper bound of the tokens of one row.
        max_kv_len: Upper bound of the tokens a row attends over.
        heads: Query heads; key and value heads.
        num_sms: Multiprocessors of the device.
    """
    num_heads, num_kv_heads = heads
    num_blocks = -(-max_q_len * (num_heads // num_kv_heads) // _MAX_QUERIES)
    fill = num_sms * _PROGRAMS_PER_SM // (num_rows * num_kv_heads * num_blocks)
    return max(1, min(fill, _MAX_SPLITS, -(-max_kv_len // _MIN_SHARE)))


def decode(
    q: Tensor,
    kv: LayerKV,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    *,
    max_q_len: int,
    page_size: int,
    scale: float,
    num_splits: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    hides_first: bool = False,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attends over the pages of each row. Reads no slot and no table entry that a row does not own.

    Args:
        q: ``[T, num_heads, head_dim]``, heads adjacent, tokens at any distance.
        kv: The layer's pool, ``[num_slots, num_kv_heads, head_dim]``.
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, ``max_q_len`` at most.
        kv_lens: int64 ``[B]``. Tokens a row attends over, its own included.
        page_table: int32 ``[B, W]``.
        max_q_len: Upper bound of the tokens of one row, 1 to 64.
        page_size: Tokens per page.
        scale: Of the scores.
        num_splits: Parts each row is split into, at least 1.
        window: A token at position p sees positions above ``p - window``; None is all.
        sinks: float32 ``[num_heads]``, a score that takes part in the softmax and gives nothing.
        hides_first: Nobody sees position 0. A token that sees nothing gets zeros.
        tree_mask: int64 ``[T]``. Bit j of a token: it sees the j-th of its row's own tokens. None is causal.
        out: Written and returned when given; else a new tensor like ``q``, contiguous.
        lse: float32 ``[T, num_heads]``, written when given: the log of the sum of exponentials, sinks included.
        tile: How keys are taken; None is what suits the shape.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert 1 <= max_q_len <= MAX_TOKENS, f"{max_q_len} tokens a row"
    assert q.stride()[1:] == (head_dim, 1) and kv.k.stride() == kv.v.stride(), (q.stride(), kv.k.stride())
    assert kv.k.stride()[1:] == (head_dim, 1) and page_table.stride(1) == 1, (kv.k.stride(), page_table.stride())
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous() and (lse is None or lse.is_contiguous())
    tile = tile or tile_for(head_dim, q.dtype)
    shape = _shape(q, kv, max_q_len, page_size, hides_first, num_splits > 1, tile)
    num_blocks = triton.cdiv(max_q_len * shape.group, shape.num_queries)
    parts = results = _Results(out, lse, sinks)
    if num_splits > 1:
        part_out = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
        parts = _Results(part_out, part_lse, None)
    _attend[(num_kv_heads * num_blocks, num_splits, kv_lens.shape[0])](
        q,
        kv.k,
        kv.v,
        _Rows(qo_indptr, kv_lens, page_table, tree_mask),
        parts,
        q.stride(0),
        kv.k.stride(0),
        page_table.stride(0),
        num_tokens,
        window,
        scale * math.log2(math.e),
        shape,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _join[(num_tokens, num_heads)](parts, results, num_splits, triton.next_power_of_2(num_splits), shape)
    return out


def _shape(
    q: Tensor, kv: LayerKV, max_q_len: int, page_size: int, hides_first: bool, is_part: bool, tile: Tile
) -> _Shape:
    num_heads, head_dim = q.shape[1:]
    group = num_heads // kv.k.shape[1]
    return _Shape(
        num_heads=num_heads,
        group=group,
        head_dim=head_dim,
        block_dim=max(16, triton.next_power_of_2(head_dim)),
        page_size=page_size,
        num_queries=min(_MAX_QUERIES, max(16, triton.next_power_of_2(max_q_len * group))),
        num_keys=tile.num_keys,
        hides_first=hides_first,
        is_part=is_part,
    )


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "window", "scale"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_pool,
    v_pool,
    rows,
    results,
    q_stride,
    slot_stride,
    table_stride,
    num_tokens,
    window,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
):
    """One program: some queries of one KV head of one row, over one share of its keys. Heads of a row run side by side."""
    num_kv_heads: tl.constexpr = SHAPE.num_heads // SHAPE.group
    row = tl.program_id(2)
    start = tl.load(rows.qo_indptr + row)
    q_len = tl.load(rows.qo_indptr + row + 1) - start
    kv_len = tl.load(rows.kv_lens + row).to(tl.int32)
    kv_head = tl.program_id(0) % num_kv_heads
    query = tl.program_id(0) // num_kv_heads * SHAPE.num_queries + tl.arange(0, SHAPE.num_queries)
    token, head = query // SHAPE.group, kv_head * SHAPE.group + query % SHAPE.group
    is_query = token < q_len
    dim = tl.arange(0, SHAPE.block_dim)
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    at = (start + token) * q_stride + head * SHAPE.head_dim
    queries = tl.load(q + at[:, None] + dim, is_element, other=0.0)
    prefix, seen, depth = kv_len - q_len, None, token
    if rows.tree_mask is not None:
        seen = tl.load(rows.tree_mask + start + token, is_query, other=0)
        if window is not None:  # as deep in the tree as it has ancestors
            depth = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1).to(tl.int32) - 1
    begin = 1 if SHAPE.hides_first else 0
    if window is not None:
        begin = tl.maximum(begin, prefix + 1 - window)
    mixed, top, total = _attend_share(
        queries, k_pool + kv_head * SHAPE.head_dim, v_pool + kv_head * SHAPE.head_dim, rows.page_table + row * table_stride,
        token, depth, seen, prefix, begin, kv_len, slot_stride, window, scale, SHAPE
    )  # fmt: skip
    sink = None
    if results.sinks is not None:
        sink = tl.load(results.sinks + head, is_query, other=0.0)
    mixed, log_total = _close(mixed, top, total, sink)
    place = (start + token) * SHAPE.num_heads + head
    if SHAPE.is_part:
        place += tl.program_id(1) * num_tokens * SHAPE.num_heads
    tl.store(results.out + place[:, None] * SHAPE.head_dim + dim, mixed, is_element)
    if results.lse is not None:
        tl.store(results.lse + place, log_total, is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_share(  # type: ignore[no-untyped-def]
    queries,
    k_pool,
    v_pool,
    pages,
    token,
    depth,
    seen,
    prefix,
    begin,
    kv_len,
    slot_stride,
    window,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
):
    """The program's share of keys ``begin`` to ``kv_len``, in whole blocks: weighted sum, highest score, sum of weights."""
    QUERIES: tl.constexpr = SHAPE.num_queries  # noqa: N806
    KEYS: tl.constexpr = SHAPE.num_keys  # noqa: N806
    DIM: tl.constexpr = SHAPE.block_dim  # noqa: N806
    first_block = begin // KEYS
    share = tl.cdiv(tl.cdiv(kv_len, KEYS) - first_block, tl.num_programs(1))
    first = (first_block + tl.program_id(1) * share) * KEYS
    end = tl.minimum(first + share * KEYS, kv_len)
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


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _join(parts, results, num_splits, NUM_SPLITS: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One program joins the parts of one head of one token."""
    head = tl.program_id(1) + tl.zeros([1], tl.int32)
    place = tl.program_id(0) * SHAPE.num_heads + head
    split, dim = tl.arange(0, NUM_SPLITS)[:, None], tl.arange(0, SHAPE.block_dim)[None, :]
    at = split * (tl.num_programs(0) * SHAPE.num_heads) + place[None, :]
    is_split, is_dim = split < num_splits, dim < SHAPE.head_dim
    logs = tl.load(parts.lse + at, is_split, other=float("-inf")) * _LOG2_E
    found = tl.load(parts.out + at * SHAPE.head_dim + dim, is_split & is_dim, other=0.0)
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[None, :])
    sink = None
    if results.sinks is not None:
        sink = tl.load(results.sinks + head)
    mixed, log_total = _close(tl.sum(found * weights, 0)[None, :], top, tl.sum(weights, 0), sink)
    tl.store(results.out + place[:, None] * SHAPE.head_dim + dim, mixed, is_dim)
    if results.lse is not None:
        tl.store(results.lse + place, log_total)
