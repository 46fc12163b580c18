"""The loop of ``kernels.latent_union`` over packed rows, and a step of its softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from hiserve.kernels.row_codec_triton import load_rows, places_of


@triton.jit
def add_tile(queries, rows, is_key, scale, is_more, best, total, summed):  # type: ignore[no-untyped-def]
    """Adds a tile of rows to a softmax. ``is_more`` is true, which the compiler does not know.

    If Triton sees that another product follows the first one, it gives all warps to heads, so that warps beyond 16 heads each
    repeat the work of others. It does not look behind a branch.
    """
    scores = tl.full((queries.shape[0], rows.shape[0]), 0.0, tl.float32)
    if is_more:
        scores = tl.dot(queries, tl.trans(rows), input_precision="ieee") * scale
    scores = tl.where(is_key[None, :], scores, -float("inf"))
    better = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(better == -float("inf"), 0.0, better)
    shares, kept = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
    total = total * kept + tl.sum(shares, 1)
    summed = tl.dot(shares.to(rows.dtype), rows, summed * kept[:, None], input_precision="ieee")
    return better, total, summed


@triton.jit
def _find_packed(pool, index, key, is_key, SHAPE: tl.constexpr, SOURCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where packed rows and their scales begin, and which there are."""
    if SOURCE.is_chosen:
        slot = tl.load(index + key, mask=is_key, other=-1)
        is_key = slot >= 0
    else:
        page = tl.load(index + key // SOURCE.page_rows, mask=is_key, other=0)
        slot = page.to(tl.int64) * SOURCE.page_rows + key % SOURCE.page_rows
    place, scales = places_of(pool, slot, SHAPE.width, SOURCE.tile, SOURCE.page_rows)
    return place, scales, is_key


@triton.jit
def attend_packed(  # type: ignore[no-untyped-def]
    queries, one, two, ends, tiles, scale, state,
    SHAPE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    """Adds tiles of packed rows to a softmax: those of the first source, then those of the second, in one loop.

    Of two loops the second would keep more in registers than there are. A source is its pool, the distance of rows, and its index.
    """
    first_pool, _, first_index = one
    second_pool, _, second_index = two
    first, first_end, second, second_end = ends
    low, before, high = tiles
    best, total, summed = state
    for tile in range(low, high):
        is_first = tile < before
        begin = tl.where(is_first, first + tile * SHAPE.num_keys, second + (tile - before) * SHAPE.num_keys)
        key = begin + tl.arange(0, SHAPE.num_keys)
        is_key = key < tl.where(is_first, first_end, 0)
        place, scales, is_there = _find_packed(first_pool, first_index, key, is_key, SHAPE, FIRST)
        if SECOND.is_there:
            is_key = key < tl.where(is_first, 0, second_end)
            other, others, is_key = _find_packed(second_pool, second_index, key, is_key, SHAPE, SECOND)
            place, scales = tl.where(is_first, place, other), tl.where(is_first, scales, others)
            is_there = is_there | is_key
        rows = load_rows(place, scales, is_there, queries.dtype, SHAPE.width, FIRST.tile)
        best, total, summed = add_tile(queries, rows, is_there, scale, tile < high, best, total, summed)
    return best, total, summed
