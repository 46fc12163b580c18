"""Online softmax over blocks of adjacent positions, loaded from the pool or from the step's own keys and values.

The softmax is the online one of Milakov and Gimelshein (2018), tiled as in FlashAttention-2 (Dao, 2023).
Page numbers are loaded one step before the keys and values that they locate, so that the compiler can pipeline these
``num_stages`` steps ahead.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from hiserve.kernels.row_codec_triton import power_of_2

LN_2 = tl.constexpr(math.log(2))
RUN = tl.constexpr(16)
"""Blocks whose slots are checked at once to be adjacent."""
ALL_ONE = tl.constexpr(0x7F7F7F7F)
"""A word whose scales are all 1, of keys that are not there: weights of what pads a block stay finite."""
_ROOM = tl.constexpr(14.0)
"""Exponent of the largest weight of values in 8 bits: float16 ends at 2 to the power of 16."""


@triton.jit
def fold_all_seen(  # type: ignore[no-untyped-def]
    queries, k, v, k_blocks, v_blocks, scales, kv_head, pages, start, block, end, kv_stride, scale, top, total, mixed, shape: tl.constexpr
):  # fmt: skip
    """Adds the blocks ``[block, end)``, which all the queries see, so that no mask is needed.

    ``k_blocks`` and ``v_blocks`` describe ``k`` and ``v`` for the copy engine, which loads blocks of adjacent slots.
    """
    while block < end:
        is_adjacent, stop = _run(pages, block, end, shape)
        between = tl.where(is_adjacent, stop, block)
        top, total, mixed = _fold_adjacent(
            queries, k_blocks, v_blocks, scales, kv_head, pages, start, block, between, scale, top, total, mixed, shape
        )
        if not shape.is_fresh:
            top, total, mixed = _fold_scattered(
                queries, k, v, scales, kv_head, pages, between, stop, kv_stride, scale, top, total, mixed, shape
            )
        block = stop
    return top, total, mixed


@triton.jit
def _run(pages, block, end, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each of the next blocks has adjacent slots, and the block where this changes."""
    if shape.is_fresh:
        return True, end
    is_adjacent, stop = _are_adjacent(pages, block, end, shape), tl.minimum(block + RUN, end)
    while stop < end and _are_adjacent(pages, stop, end, shape) == is_adjacent:
        stop += RUN
    return is_adjacent, tl.minimum(stop, end)


@triton.jit
def _are_adjacent(pages, block, end, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.minimum(block + tl.arange(0, RUN), end - 1)
    number = (block[:, None] * shape.num_keys + tl.arange(0, shape.num_keys)[None, :]) // shape.page_size
    shift = tl.load(pages + number) - number
    return tl.max(tl.max(shift, 1) - tl.min(shift, 1), 0) == 0


@triton.jit
def _fold_adjacent(  # type: ignore[no-untyped-def]
    queries, k_blocks, v_blocks, scales, kv_head, pages, start, block, end, scale, top, total, mixed, shape: tl.constexpr
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
        words = load_scales(scales, place + tl.arange(0, num_keys), kv_head, None, shape)
        top, total, mixed = fold(queries, keys, values, words, kv_head, None, scale, top, total, mixed)
    return top, total, mixed


@triton.jit
def _fold_scattered(  # type: ignore[no-untyped-def]
    queries, k, v, scales, kv_head, pages, block, end, kv_stride, scale, top, total, mixed, shape: tl.constexpr
):  # fmt: skip
    key = tl.arange(0, shape.num_keys)
    page = tl.load(pages + (tl.minimum(block, end - 1) * shape.num_keys + key) // shape.page_size)
    for number in range(block, end):
        slot = page * shape.page_size + (number * shape.num_keys + key) % shape.page_size
        page = tl.load(pages + (tl.minimum(number + 1, end - 1) * shape.num_keys + key) // shape.page_size)
        keys, values = gather(k, slot, None, kv_stride, shape), gather(v, slot, None, kv_stride, shape)
        words = load_scales(scales, slot, kv_head, None, shape)
        top, total, mixed = fold(queries, keys, values, words, kv_head, None, scale, top, total, mixed)
    return top, total, mixed


@triton.jit
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
def load_scales(scales, place, kv_head, is_key, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the words with the scales of a head, int32 ``[num_keys]``; None of keys and values that are not packed."""
    if scales is None:
        words = None
    else:
        at = scales + place.to(tl.int64) * ((shape.num_kv_heads + 1) // 2) + kv_head // 2
        words = tl.load(at) if is_key is None else tl.load(at, is_key, other=ALL_ONE)
    return words


@triton.jit
def fold(queries, keys, values, words, kv_head, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """Adds some keys to the softmax, in powers of 2: largest score, sum of weights and weighted sum of values."""
    if words is None:
        top, total, mixed = fold_plain(queries, keys, values, sees, scale, top, total, mixed)
    else:
        top, total, mixed = fold_packed(queries, keys, values, words, kv_head, sees, scale, top, total, mixed)
    return top, total, mixed


@triton.jit
def fold_plain(queries, keys, values, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """As ``fold``, with keys and values of the type of the queries."""
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if sees is not None:
        scores = tl.where(sees, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that has seen no key yet
    weights, decay = tl.exp2(scores * scale - base[:, None]), tl.exp2(top - base)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total * decay + tl.sum(weights, 1), mixed


@triton.jit
def fit_half(queries):  # type: ignore[no-untyped-def]
    """Returns queries for products with 8-bit numbers, and each one's unit, a power of 2.

    These products are float16's, to which the device widens E4M3 by one instruction, unless queries are wider. Elements are
    at most 2 times a unit, and so in float16's range, whatever the model's are.
    """
    largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    fitted = queries.to(tl.float32) * power_of_2(-exponent)[:, None]
    if queries.dtype.primitive_bitwidth == 16:
        fitted = fitted.to(tl.float16)
    return fitted, power_of_2(exponent)


@triton.jit
def fold_packed(queries, keys, values, words, kv_head, sees, scale, top, total, mixed):  # type: ignore[no-untyped-def]
    """Like ``fold``, with keys and values in 8 bits.

    Scales of keys are factors of the scores, scales of values are factors of the weights. The largest score is taken with
    the exponent of the value, so that no weight exceeds float16; ``_ROOM`` more keep small ones from being rounded to 0.

    Args:
        queries: From ``fit_half``, ``[Q, D]``.
        keys: Bits of E4M3, ``[K, D]``.
        values: Likewise.
        words: int32 ``[K]``, those with the scales of this head (``core.row_shapes.scale_words``).
        kv_head: The head.
        sees: Visibility mask; None is all.
        scale: ``[Q]``, factors of the scores, in powers of 2, units of the queries included.
        top: ``[Q]``; with ``total`` and ``mixed`` of the blocks before.
        total: Sums of weights.
        mixed: Weighted sums of values.
    """
    shares, decay, top, total = weigh_packed(queries, keys, words, kv_head, sees, scale, top, total)
    values = values.to(tl.float8e4nv, bitcast=True).to(queries.dtype)
    return top, total, tl.dot(shares, values, mixed * decay[:, None], input_precision="ieee")


@triton.jit
def weigh_packed(queries, keys, words, kv_head, sees, scale, top, total):  # type: ignore[no-untyped-def]
    """The part of ``fold_packed`` before values: their weights, the factor of the sum so far, top score and sum of weights."""
    keys = keys.to(tl.float8e4nv, bitcast=True).to(queries.dtype)
    shift = kv_head % 2 * 16
    of_key, of_value = (words >> shift) & 255, (words >> (shift + 8)) & 255
    scores = tl.dot(queries, keys.T, input_precision="ieee") * scale[:, None] * power_of_2(of_key - 127)[None, :]
    if sees is not None:
        scores = tl.where(sees, scores, -float("inf"))
    raised = scores + (of_value - 127).to(tl.float32)[None, :]
    new_top = tl.maximum(top, tl.max(raised, 1) - _ROOM)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that has seen no key yet
    weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    shares = (weights * power_of_2(of_value - 127)[None, :]).to(queries.dtype)
    return shares, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
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
