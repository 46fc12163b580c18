"""Attention of rows with many new tokens over paged keys and values: prefill, chunks behind a prefix, trees.

A program computes some new tokens of a row for all query heads that share one KV head. Key blocks that all its queries
see are not masked at all; the others, at most a few, come first. The softmax is the online one of Milakov and
Gimelshein (2018), cut into tiles as in FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hiserve.core.forward import LayerKV

_LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2))
_MIN_QUERIES = 16
_MAX_QUERIES = 128


class Tile(NamedTuple):
    """How the work is cut.

    Attributes:
        num_queries: Query vectors per program, tokens times heads; a power of two from 16.
        num_keys: Keys per step; a power of two from 16.
        num_warps: Warps per program.
        num_stages: Steps whose loads are under way at once.
    """

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


class _Results(NamedTuple):
    """Where results are written, and the scores that only the softmax sees."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None


class _Shape(NamedTuple):
    """What compilation depends on, besides types."""

    group: int
    head_dim: int
    block_dim: int
    page_size: int
    num_queries: int
    num_keys: int
    hides_first: bool
    is_fresh: bool
    leaves_fresh: bool


def tile_for(num_queries: int, head_dim: int, dtype: torch.dtype, is_fresh: bool) -> Tile:
    """Chooses a tile.

    Args:
        num_queries: Upper bound of a row's query vectors for one KV head.
        head_dim: Elements per head.
        dtype: Of queries, keys and values.
        is_fresh: Keys are adjacent.
    """
    num_queries = min(max(_MIN_QUERIES, triton.next_power_of_2(num_queries)), _MAX_QUERIES)
    if dtype.itemsize > 2:  # products without tensor cores
        return Tile(min(num_queries, 32), 32, 4, 1)
    if num_queries < _MAX_QUERIES:
        return Tile(num_queries, 64, 4, 3)
    return Tile(_MAX_QUERIES, 128 if is_fresh and head_dim <= 128 else 64, 8, 2)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    *,
    max_q_len: int,
    page_size: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    hides_first: bool = False,
    tree_mask: Tensor | None = None,
    has_fresh: bool = False,
    has_prefixed: bool = True,
    tile: Tile | None = None,
) -> None:
    """Attends for the tokens of some rows, and writes nothing of others. Waits for nothing.

    Args:
        q: ``[T, num_heads, head_dim]``, heads adjacent. Like ``k`` and ``v`` 16-byte aligned.
        k: ``[T, num_kv_heads, head_dim]``. This step's keys, which already stand in their slots.
        v: Like ``k``.
        kv: The layer's pool.
        qo_indptr: int32 ``[B + 1]``, of these rows; may start above 0.
        kv_lens: int32 or int64 ``[B]``. Tokens each row attends over, its new ones included.
        page_table: int32 ``[B, W]``. Entries of keys that no token sees are not read.
        max_q_len: Upper bound of the new tokens of a row.
        page_size: Tokens per page.
        scale: Of scores.
        out: ``[T, num_heads, head_dim]``, contiguous. Written; zeros where a token sees nothing.
        lse: float32 ``[T, num_heads]``, contiguous. Written: natural logarithm of the sum of exponentials, sinks included.
        window: A token at position p sees positions above p - window.
        sinks: float32 ``[num_heads]``. Scores that take part in the softmax and give nothing.
        hides_first: Nobody sees position 0.
        tree_mask: int64 ``[T]``. Bit j of a token: it sees the j-th of its row's new tokens, besides all before these.
        has_fresh: There may be rows without a prefix, and these are to read ``k`` and ``v``.
        has_prefixed: There may be rows with a prefix; or without, if ``has_fresh`` is false.
        tile: Instead of the one chosen.
    """
    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    group, block_dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    for x in (q, k, v, kv.k, kv.v):
        assert x.stride()[1:] == (head_dim, 1), f"elements {x.stride()} apart"
    assert kv.k.stride(0) == kv.v.stride(0) and page_table.stride(1) == 1 and out.is_contiguous()
    for is_fresh in [is_fresh for is_fresh, is_wanted in ((True, has_fresh), (False, has_prefixed)) if is_wanted]:
        cut = tile or tile_for(max_q_len * group, head_dim, q.dtype, is_fresh)
        _extend[(triton.cdiv(max_q_len, cut.num_queries // group), num_kv_heads, kv_lens.shape[0])](
            q,
            _blocks(k, cut.num_keys, block_dim) if is_fresh else kv.k,
            _blocks(v, cut.num_keys, block_dim) if is_fresh else kv.v,
            qo_indptr,
            kv_lens,
            page_table,
            tree_mask,
            _Results(out, lse, sinks),
            q.stride(0),
            kv.k.stride(0),
            page_table.stride(0),
            window,
            scale * _LOG2_E,
            _Shape(
                group=group,
                head_dim=head_dim,
                block_dim=block_dim,
                page_size=page_size,
                num_queries=cut.num_queries,
                num_keys=cut.num_keys,
                hides_first=hides_first,
                is_fresh=is_fresh,
                leaves_fresh=has_fresh and not is_fresh,
            ),
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
        )


def _blocks(x: Tensor, num_tokens: int, block_dim: int) -> TensorDescriptor:
    """Describes ``[T, num_kv_heads, head_dim]`` as blocks of one head, for the copy engine. Outside it reads 0."""
    return TensorDescriptor.from_tensor(x, [num_tokens, 1, block_dim])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride", "window", "scale"],
    do_not_specialize_on_alignment=["qo_indptr", "kv_lens", "page_table", "tree_mask"],
)
def _extend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    qo_indptr,
    kv_lens,
    page_table,
    tree_mask,
    results,
    q_stride,
    kv_stride,
    table_stride,
    window,
    scale,
    shape: tl.constexpr,
):
    """Some new tokens of a row, one KV head; those with the most keys first."""
    num_queries: tl.constexpr = shape.num_queries
    num_keys: tl.constexpr = shape.num_keys
    block_dim: tl.constexpr = shape.block_dim
    num_tokens: tl.constexpr = num_queries // shape.group
    row, kv_head = tl.program_id(2), tl.program_id(1)
    start = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - start
    prefix = tl.load(kv_lens + row).to(tl.int32) - q_len
    first = (tl.cdiv(q_len, num_tokens) - 1 - tl.program_id(0)) * num_tokens
    if first < 0 or (shape.is_fresh and prefix > 0) or (shape.leaves_fresh and prefix == 0):
        return

    lane = tl.arange(0, num_queries)
    token, head = first + lane // shape.group, kv_head * shape.group + lane % shape.group
    is_query = (lane < num_tokens * shape.group) & (token < q_len)
    queries = _load_queries(q, start + token, head, is_query, q_stride, shape)
    seen = None
    if tree_mask is not None:
        seen = tl.load(tree_mask + start + token, is_query, other=0)
    begin, end, low, low_all, high_all, high = _span(prefix, q_len, first, num_tokens, window, seen, shape)

    top = tl.full([num_queries], -float("inf"), tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    mixed = tl.zeros([num_queries, block_dim], tl.float32)
    pages = page_table + row.to(tl.int64) * table_stride
    for number in range(low_all - low + high - high_all):
        block = low + number + tl.where(low + number < low_all, 0, high_all - low_all)
        key = block * num_keys + tl.arange(0, num_keys)
        is_key = (key >= begin) & (key < end)
        sees = _sees(key, prefix, prefix + token, window, seen) & is_key[None, :] & is_query[:, None]
        place = _place(block, key, is_key, start, pages, shape)
        keys, values = (
            _load(k, kv_head, place, None, kv_stride, shape),
            _load(v, kv_head, place, is_key, kv_stride, shape),
        )
        top, total, mixed = _fold(queries, keys, values, sees, scale, top, total, mixed)
    for block in range(low_all, high_all):
        place = _place(block, block * num_keys + tl.arange(0, num_keys), None, start, pages, shape)
        keys, values = (
            _load(k, kv_head, place, None, kv_stride, shape),
            _load(v, kv_head, place, None, kv_stride, shape),
        )
        top, total, mixed = _fold(queries, keys, values, None, scale, top, total, mixed)
    _write(mixed, top, total, start + token, head, is_query, results, shape)


@triton.jit  # type: ignore[untyped-decorator]
def _span(prefix, q_len, first, tokens, window, seen, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys that some of the tokens see, ``[begin, end)``, and their blocks: ``[low_all, high_all)`` are seen by each token."""
    first_position, last = prefix + first, tl.minimum(first + tokens, q_len) - 1 + prefix
    end_all, end = first_position + 1, last + 1
    if seen is not None:
        first_position, end_all, end = prefix, prefix, prefix + q_len
    begin, begin_all = 0, 0
    if window is not None:
        begin, begin_all = tl.maximum(first_position - window + 1, 0), tl.maximum(last - window + 1, 0)
    if shape.hides_first:
        begin, begin_all = tl.maximum(begin, 1), tl.maximum(begin_all, 1)
    low, low_all = begin // shape.num_keys, tl.cdiv(begin_all, shape.num_keys)
    high_all, high = tl.maximum(end_all // shape.num_keys, low_all), tl.cdiv(end, shape.num_keys)
    return begin, end, low, low_all, high_all, high


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(q, token, head, is_query, q_stride, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Query vectors, ``[num_queries, block_dim]``; zeros where there is none."""
    dim = tl.arange(0, shape.block_dim)
    is_element = is_query[:, None] & (dim < shape.head_dim)[None, :]
    at = token.to(tl.int64) * q_stride + head * shape.head_dim
    return tl.load(q + at[:, None] + dim[None, :], is_element, other=0)


@triton.jit
def _sees(key, prefix, position, window, seen):  # type: ignore[no-untyped-def]
    """Which query sees which key."""
    if seen is None:
        sees = key[None, :] <= position[:, None]
    else:
        bit = tl.minimum(tl.maximum(key - prefix, 0), 63)
        sees = (key < prefix)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
        ones = (seen[:, None] >> tl.arange(0, 64)[None, :]) & 1
        position = prefix - 1 + tl.sum(ones, 1).to(tl.int32)  # as deep in the tree as it has ancestors
    if window is not None:
        sees &= key[None, :] > position[:, None] - window
    return sees


@triton.jit  # type: ignore[untyped-decorator]
def _place(block, key, is_key, start, pages, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a block of keys lies: its first token among the new ones, or the slot of each key."""
    if shape.is_fresh:
        place = start + block * shape.num_keys
    else:
        at = pages + key // shape.page_size
        page = tl.load(at) if is_key is None else tl.load(at, is_key, other=0)
        place = page.to(tl.int64) * shape.page_size + key % shape.page_size
    return place


@triton.jit  # type: ignore[untyped-decorator]
def _load(x, kv_head, place, is_key, kv_stride, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values of one head, ``[num_keys, block_dim]``; zeros where ``is_key`` is false."""
    num_keys: tl.constexpr = shape.num_keys
    block_dim: tl.constexpr = shape.block_dim
    if shape.is_fresh:
        tile = x.load([place, kv_head, 0]).reshape(num_keys, block_dim)
        if is_key is not None:
            tile = tl.where(is_key[:, None], tile, 0.0)
    else:
        dim = tl.arange(0, block_dim)
        at = x + place[:, None] * kv_stride + (kv_head * shape.head_dim + dim)[None, :]
        if is_key is not None:
            tile = tl.load(at, is_key[:, None] & (dim < shape.head_dim)[None, :], other=0)
        elif shape.head_dim < block_dim:
            tile = tl.load(at, (dim < shape.head_dim)[None, :], other=0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def _fold(queries, keys, values, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """Takes some keys into the softmax, in powers of 2: its largest score, its sum of weights and the mix of values so far."""
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if sees is not None:
        scores = tl.where(sees, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # of a query that has seen nothing yet
    weights, decay = tl.exp2(scores * scale - base[:, None]), tl.exp2(top - base)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total * decay + tl.sum(weights, 1), mixed


@triton.jit  # type: ignore[untyped-decorator]
def _write(mixed, top, total, token, head, is_query, results, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divides by the sum of weights, and stores."""
    if results.sinks is not None:
        sink = tl.load(results.sinks + head) / _LN_2
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        mixed, total, top = mixed * decay[:, None], total * decay + tl.exp2(sink - new_top), new_top
    total = tl.where(total == 0.0, 1.0, total)  # of a query that sees nothing
    cell = token.to(tl.int64) * (shape.group * tl.num_programs(1)) + head
    if results.lse is not None:
        tl.store(results.lse + cell, (top + tl.log2(total)) * _LN_2, is_query)
    dim = tl.arange(0, shape.block_dim)
    is_element = is_query[:, None] & (dim < shape.head_dim)[None, :]
    tl.store(
        results.out + cell[:, None] * shape.head_dim + dim[None, :],
        (mixed / total[:, None]).to(results.out.dtype.element_ty),
        is_element,
    )
