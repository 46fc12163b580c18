"""Online softmax over blocks of adjacent positions, loaded from the pool or from the step's own keys and values.

The softmax is the online one of Milakov and Gimelshein (2018), tiled as in FlashAttention-2 (Dao, 2023).
Page numbers are loaded one step before the keys and values that they locate, so that the compiler can pipeline these
``num_stages`` steps ahead.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))
RUN = tl.constexpr(16)
"""Blocks whose slots are checked at once to be adjacent."""


@triton.jit  # type: ignore[untyped-decorator]
def fold_all_seen(  # type: ignore[no-untyped-def]
    queries, k, v, k_blocks, v_blocks, kv_head, pages, start, block, end, kv_stride, scale, top, total, mixed, shape: tl.constexpr
):  # fmt: skip
    """Adds the blocks ``[block, end)``, which all the queries see, so that no mask is needed.

    ``k_blocks`` and ``v_blocks`` describe ``k`` and ``v`` for the copy engine, which loads blocks of adjacent slots.
    """
    while block < end:
        is_adjacent, stop = _run(pages, block, end, shape)
        between = tl.where(is_adjacent, stop, block)
        top, total, mixed = _fold_adjacent(
            queries, k_blocks, v_blocks, kv_head, pages, start, block, between, scale, top, total, mixed, shape
        )
        if not shape.is_fresh:
            top, total, mixed = _fold_scattered(
                queries, k, v, pages, between, stop, kv_stride, scale, top, total, mixed, shape
            )
        block = stop
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _run(pages, block, end, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each of the next blocks has adjacent slots, and the block where this changes."""
    if shape.is_fresh:
        return True, end
    is_adjacent, stop = _are_adjacent(pages, block, end, shape), tl.minimum(block + RUN, end)
    while stop < end and _are_adjacent(pages, stop, end, shape) == is_adjacent:
        stop += RUN
    return is_adjacent, tl.minimum(stop, end)


@triton.jit  # type: ignore[untyped-decorator]
def _are_adjacent(pages, block, end, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.minimum(block + tl.arange(0, RUN), end - 1)
    number = (block[:, None] * shape.num_keys + tl.arange(0, shape.num_keys)[None, :]) // shape.page_size
    shift = tl.load(pages + number) - number
    return tl.max(tl.max(shift, 1) - tl.min(shift, 1), 0) == 0


@triton.jit  # type: ignore[untyped-decorator]
def _fold_adjacent(  # type: ignore[no-untyped-def]
    queries, k_blocks, v_blocks, kv_head, pages, start, block, end, scale, top, total, mixed, shape: tl.constexpr
):  # fmt: skip
    num_keys: tl.constexpr = shape.num_keys
    block_dim: tl.constexpr = shape.block_dim
    page = 0
    if not shape.is_fresh:
        page = tl.load(pages + block * num_keys // shape.page_size)
    for number in range(block, end):
        if shape.is_fresh:
            place = start + number * num_keys
        else:
            place = page * shape.page_size + number * num_keys % shape.page_size
            page = tl.load(pages + tl.minimum(number + 1, end - 1) * num_keys // shape.page_size)
        keys = k_blocks.load([place, kv_head, 0]).reshape(num_keys, block_dim)
        values = v_blocks.load([place, kv_head, 0]).reshape(num_keys, block_dim)
        top, total, mixed = fold(queries, keys, values, None, scale, top, total, mixed)
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _fold_scattered(  # type: ignore[no-untyped-def]
    queries, k, v, pages, block, end, kv_stride, scale, top, total, mixed, shape: tl.constexpr
):  # fmt: skip
    key = tl.arange(0, shape.num_keys)
    page = tl.load(pages + (tl.minimum(block, end - 1) * shape.num_keys + key) // shape.page_size)
    for number in range(block, end):
        slot = page * shape.page_size + (number * shape.num_keys + key) % shape.page_size
        page = tl.load(pages + (tl.minimum(number + 1, end - 1) * shape.num_keys + key) // shape.page_size)
        keys, values = gather(k, slot, None, kv_stride, shape), gather(v, slot, None, kv_stride, shape)
        top, total, mixed = fold(queries, keys, values, None, scale, top, total, mixed)
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def gather(x, place, is_key, stride, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads vectors ``[num_keys, block_dim]``; where ``is_key`` is false, zeros without a read."""
    dim = tl.arange(0, shape.block_dim)
    at = x + (place.to(tl.int64) * stride)[:, None] + dim[None, :]
    if is_key is not None:
        tile = tl.load(at, is_key[:, None] & (dim < shape.head_dim)[None, :], other=0)
    elif shape.head_dim < shape.block_dim:
        tile = tl.load(at, (dim < shape.head_dim)[None, :], other=0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def fold(queries, keys, values, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """Adds some keys to the softmax, in powers of 2: largest score, sum of weights and weighted sum of values."""
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if sees is not None:
        scores = tl.where(sees, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that has seen no key yet
    weights, decay = tl.exp2(scores * scale - base[:, None]), tl.exp2(top - base)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total * decay + tl.sum(weights, 1), mixed


@triton.jit  # type: ignore[untyped-decorator]
def close(mixed, top, total, cell, head, is_query, results, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divides by the sum of weights and stores; zeros and -inf for a query that saw no key."""
    if results.sinks is not None:
        sink = tl.load(results.sinks + head) / LN_2
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        mixed, total, top = mixed * decay[:, None], total * decay + tl.exp2(sink - new_top), new_top
    total = tl.where(total == 0.0, 1.0, total)
    cell = cell.to(tl.int64)
    if results.lse is not None:
        tl.store(results.lse + cell, (top + tl.log2(total)) * LN_2, is_query)
    dim = tl.arange(0, shape.block_dim)
    is_element = is_query[:, None] & (dim < shape.head_dim)[None, :]
    tl.store(
        results.out + cell[:, None] * shape.head_dim + dim[None, :],
        (mixed * (1.0 / total)[:, None]).to(results.out.dtype.element_ty),
        is_element,
    )
