"""What attention in one order of keys has in common: the softmax of a segment, and how segments are joined.

Keys are cut at multiples of a segment, counted from the row's first token. A query's result is the online softmax of each
segment, block of keys after block, and these are joined in order. A block without a key that a query sees changes none of its
sums. So neither chunks nor drafts, neighbours or splits change a bit.

Matrix instructions add alike whatever the tile, 16 elements after 16 elements. Sums of weights are products too, because sums
across the threads of a tile would depend on it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_schedule import MAX_QUERIES, ScheduledRows

_LOG2_E = tl.constexpr(math.log2(math.e))
_ONES = tl.constexpr(16)  # columns of the product that sums weights: the fewest of a tile
_MIN_QUERIES = 16


class ExactTile(NamedTuple):
    """Sizes of a program."""

    num_queries: int
    num_keys: int  # of a block, the same in all tiles of a model
    num_warps: int
    num_stages: int


class ExactShape(NamedTuple):
    """Compile-time constants besides types."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_dim: int
    page_size: int
    num_queries: int
    num_joined: int
    num_keys: int
    segment: int
    hides_first: bool
    is_fresh: bool


def split_tile(num_queries: int, head_dim: int, dtype: torch.dtype) -> ExactTile:
    """Returns the tile of rows that may be split, of so many query vectors for each KV head."""
    num_queries = min(MAX_QUERIES, max(_MIN_QUERIES, triton.next_power_of_2(num_queries)))
    return ExactTile(num_queries, _num_keys(head_dim, dtype), 4, 3)


def whole_tile(head_dim: int, dtype: torch.dtype) -> ExactTile:
    """Returns the tile of rows of many tokens."""
    return ExactTile(128, _num_keys(head_dim, dtype), 8, 3 if head_dim <= 128 else 2)


def _num_keys(head_dim: int, dtype: torch.dtype) -> int:
    return 64 if triton.next_power_of_2(head_dim) * dtype.itemsize <= 256 else 32


def shape_of(
    q: Tensor, kv: LayerKV, rows: ScheduledRows, page_size: int, segment: int, hides_first: bool, tile: ExactTile
) -> ExactShape:
    """Returns the constants of a kernel for these queries; ``segment`` is a multiple of the tile's keys."""
    (num_heads, head_dim), num_kv_heads = q.shape[1:], kv.k.shape[1]
    assert kv.scales is None, "packed keys and values"
    assert q.stride()[1:] == (head_dim, 1) and kv.k.stride() == kv.v.stride(), (q.stride(), kv.k.stride())
    assert kv.k.stride()[1:] == (head_dim, 1) and rows.page_table.stride(1) == 1, kv.k.stride()
    assert segment % tile.num_keys == 0, f"segments of {segment} keys"
    group = num_heads // num_kv_heads
    return ExactShape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_dim=max(16, triton.next_power_of_2(head_dim)),
        page_size=page_size,
        num_queries=tile.num_queries,
        num_joined=min(tile.num_queries, triton.next_power_of_2(rows.max_q_len * group)),
        num_keys=tile.num_keys,
        segment=segment,
        hides_first=hides_first,
        is_fresh=False,
    )


@triton.jit
def queries_of(block, kv_head, QUERIES: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token and head of the first queries of a block."""
    query = block * SHAPE.num_queries + tl.arange(0, QUERIES)
    return query // SHAPE.group, kv_head * SHAPE.group + query % SHAPE.group


@triton.jit
def load_queries(q, token, head, is_query, q_stride, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads query vectors, ``[num_queries, block_dim]``; zeros where there is no query."""
    dim = tl.arange(0, SHAPE.block_dim)
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    at = token.to(tl.int64) * q_stride + head * SHAPE.head_dim
    return tl.load(q + at[:, None] + dim[None, :], is_element, other=0)


@triton.jit
def sees_of(key, is_key, position, window):  # type: ignore[no-untyped-def]
    """Visibility mask of queries and keys."""
    sees = is_key[None, :] & (key[None, :] <= position[:, None])
    if window is not None:
        sees &= key[None, :] > position[:, None] - window
    return sees


@triton.jit
def no_key(SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state of ``fold`` before the first block of a segment."""
    QUERIES: tl.constexpr = SHAPE.num_queries
    DIM: tl.constexpr = SHAPE.block_dim
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    return top, tl.zeros([QUERIES, _ONES], tl.float32), tl.zeros([QUERIES, DIM], tl.float32)


@triton.jit
def no_segment(QUERIES: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state of ``add`` before the first segment."""
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    return top, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, DIM], tl.float32)


@triton.jit
def fold(queries, keys, values, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """Adds some keys to the softmax, in powers of 2: largest score, sums of weights (one in each column), weighted values."""
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if sees is not None:
        scores = tl.where(sees, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that has seen no key yet
    weights, decay = tl.exp2(scores * scale - base[:, None]).to(values.dtype), tl.exp2(top - base)[:, None]
    ones = tl.full([values.shape[0], _ONES], 1.0, values.dtype)
    total = tl.dot(weights, ones, total * decay, input_precision="ieee")
    mixed = tl.dot(weights, values, mixed * decay, input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def add(all_top, all_total, all_mixed, top, total, mixed):  # type: ignore[no-untyped-def]
    """Joins one more segment. Sums are spelled as multiply-add, so that no compiler chooses which product is rounded."""
    higher = tl.maximum(all_top, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight, decay = tl.exp2(top - base), tl.exp2(all_top - base)
    all_total = tl.fma(total, weight, all_total * decay)
    all_mixed = tl.fma(mixed, tl.broadcast_to(weight[:, None], mixed.shape), all_mixed * decay[:, None])
    return higher, all_total, all_mixed


@triton.jit
def finish(mixed, top, total, token, head, is_query, sinks, out, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the sink, divides by the sum of weights and stores; zeros for a query that saw no key."""
    dim = tl.arange(0, SHAPE.block_dim)
    if sinks is not None:
        sink = tl.load(sinks + head, is_query, other=0.0) * _LOG2_E
        top, total, mixed = add(top, total, mixed, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(mixed))
    divisor = tl.where(total > 0, total, 1.0)
    cell = token.to(tl.int64) * (SHAPE.num_kv_heads * SHAPE.group) + head
    is_element = is_query[:, None] & (dim < SHAPE.head_dim)[None, :]
    made = (mixed / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + cell[:, None] * SHAPE.head_dim + dim[None, :], made, is_element)
