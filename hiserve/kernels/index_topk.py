"""The choice of rows by an index, in Triton: scores, then exactly the best; ``union_reference.choose_rows`` is its twin.

One program chooses among ``_chunk`` rows of a token: it finds the least score that is chosen, bit by bit of its order, from
scores that it keeps in registers. Of longer contexts several programs choose the best of their parts first, and what they
found is chosen from again. The result is the same whatever the launch: nothing is sorted, and no count depends on a race.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.step_memory import index_tokens
from hiserve.kernels import union_reference
from hiserve.kernels.chosen_bits import MAX_SPAN, WORD_KEYS, num_words
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.row_codec_triton import load_keys, tile_of
from hiserve.kernels.union_rows import RangeRows

_NUM_KEYS = 64  # of a tile
_NUM_WARPS = 4
_NUM_STAGES = 3  # tiles that are loaded at once
_WAVES = 4  # programs that compute scores, for each multiprocessor
_MIN_CHUNK = 4096  # scores in the registers of a program, a power of 2
_ELEMENTS_PER_WARP = 512
_SIGN = tl.constexpr(-(1 << 31))
_WORD = tl.constexpr(WORD_KEYS)


class _Shape(NamedTuple):
    """Compile-time constants."""

    num_heads: int
    block_heads: int
    width: int
    num_keys: int
    page_rows: int
    ratio: int
    tile: int  # of packed keys, else 0
    num_tokens: int  # whose scores one program computes, 1 or 2


def choose_rows(q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
    """Like ``union_reference.choose_rows``; float64 uses the twin. Keys have a power of 2 of elements, 16 at least."""
    if weights.dtype == torch.float64:
        return union_reference.choose_rows(q, weights, keys, most, scale)
    slots = torch.empty((q.shape[0], most), dtype=torch.int64, device=q.device)
    _choose_all(q, weights, keys, most, scale, slots, is_bits=False)
    return slots


def choose_bits(q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
    """Like ``union_reference.choose_bits``, as ``choose_rows``."""
    if weights.dtype == torch.float64:
        return union_reference.choose_bits(q, weights, keys, most, scale)
    assert keys.width <= _chunk(most), f"{keys.width} rows, of which {most} are chosen"
    bits = torch.empty((q.shape[0], num_words(keys.width)), dtype=torch.int64, device=q.device)
    _choose_all(q, weights, keys, most, scale, bits, is_bits=True)
    return bits


def _choose_all(
    q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float, out: Tensor, *, is_bits: bool
) -> None:
    """Fills ``out`` with the slots of each token, ``[T, most]``, or with its bits."""
    num_tokens, num_heads, width = q.shape
    assert keys.window is None and width >= 16 and not width & (width - 1), (keys.window, width)
    tile = tile_of(keys.packed, keys.pool, width, keys.page_rows)
    assert tile or keys.pool.dtype == q.dtype, keys.pool.dtype
    assert keys.pool.stride(1) == keys.table.stride(1) == 1, (keys.pool.stride(), keys.table.stride())
    q, weights = q.contiguous(), weights.contiguous()
    step = index_tokens(num_tokens, keys.width)
    block_heads = max(16, triton.next_power_of_2(num_heads))
    shape = _Shape(
        num_heads, block_heads, width, _NUM_KEYS, keys.page_rows, keys.ratio, tile, num_tokens=2 if is_bits else 1
    )
    num_programs = triton.cdiv(step, shape.num_tokens)
    num_parts = max(1, min(_WAVES * num_processors(q.device) // num_programs, triton.cdiv(keys.width, _NUM_KEYS)))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        places = (keys.positions[part], keys.token_rows[part], keys.table)
        count = min(step, num_tokens - first)
        scores = q.new_empty((count, keys.width), dtype=torch.float32)
        _score[(triton.cdiv(count, shape.num_tokens), num_parts)](
            q[part], weights[part], *places, keys.pool, scores, keys.table.stride(0), keys.pool.stride(0), keys.width,
            scale, most, count, shape,
            num_warps=_NUM_WARPS, num_stages=_NUM_STAGES, **early_launch(q.device),
        )  # fmt: skip
        _choose_best(scores, places, most, out[part], shape, is_bits=is_bits)


def _chunk(most: int) -> int:
    """Returns the scores of which a program chooses: at least four times as many, so that each round leaves half of them at most."""
    return max(_MIN_CHUNK, MAX_SPAN * int(triton.next_power_of_2(most)))


def _choose_best(
    scores: Tensor, places: tuple[Tensor, Tensor, Tensor], most: int, out: Tensor, shape: _Shape, *, is_bits: bool
) -> None:
    """Fills the slots of the best rows of each token, or its bits.

    Args:
        scores: float32 ``[T, n]``. Of the rows that a token sees; others may hold anything.
        places: Positions, rows and table, as of ``RangeRows``.
        most: Rows to choose.
        out: As of ``_choose_all``.
        shape: As ``_score`` has it.
        is_bits: As of ``_choose_all``.
    """
    num_tokens, table = out.shape[0], places[2]
    chunk, rows = _chunk(most), None
    while True:
        num_parts = max(1, triton.cdiv(scores.shape[1], chunk))  # one where no token sees a row, too
        is_last = num_parts == 1
        size = (num_tokens, num_parts * most)
        best, best_rows = (None, None) if is_last else (scores.new_empty(size), out.new_empty(size, dtype=torch.int32))
        _choose[(num_tokens, num_parts)](
            scores, rows, *places, best, best_rows, out, table.stride(0), scores.shape[1], most, out.shape[1], shape,
            CHUNK=chunk, IS_BITS=is_bits, num_warps=max(4, min(32, chunk // _ELEMENTS_PER_WARP)),
            **early_launch(scores.device),
        )  # fmt: skip
        if best is None:
            return
        scores, rows = best, best_rows


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "scale", "most", "num_tokens"],
    do_not_specialize_on_alignment=["q", "weights", "positions", "token_rows"],
)
def _score(  # type: ignore[no-untyped-def]
    q, weights, positions, token_rows, table, pool, scores, table_stride, slot_stride, num_rows, scale, most, num_tokens,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes the scores of a token, or of two, in one part of what they see: whole tiles.

    Where they see no more than ``most``, all are chosen and need no score. Two tokens of one row share its keys.
    """
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(0).to(tl.int64) * SHAPE.num_tokens
    if SHAPE.num_tokens == 1:
        row, end = tl.load(token_rows + token), (tl.load(positions + token).to(tl.int32) + 1) // SHAPE.ratio
        _score_rows(
            q, weights, table, pool, scores, table_stride, slot_stride, num_rows, scale, most, token, row, end, 1, SHAPE
        )  # fmt: skip
    else:
        stop = tl.minimum(token + 2, num_tokens)
        while token < stop:
            last = tl.minimum(token + 1, stop - 1)
            row = tl.load(token_rows + token)
            last = tl.where(tl.load(token_rows + last) == row, last, token)
            position = tl.maximum(tl.load(positions + token), tl.load(positions + last))
            end, count = (position.to(tl.int32) + 1) // SHAPE.ratio, last - token + 1
            _score_rows(
                q, weights, table, pool, scores, table_stride, slot_stride, num_rows, scale, most, token, row, end, count, SHAPE
            )  # fmt: skip
            token += count


@triton.jit
def _score_rows(  # type: ignore[no-untyped-def]
    q, weights, table, pool, scores, table_stride, slot_stride, num_rows, scale, most, token, row, end, count,
    SHAPE: tl.constexpr
):  # fmt: skip
    """Computes a program's part of the scores of ``count`` tokens of a row, from ``token`` on, which see its rows up to ``end``."""
    num_parts = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(end, SHAPE.num_keys), num_parts) * SHAPE.num_keys
    low = tl.program_id(1) * share
    if (low < end) & (end > most):
        entry = table + row * table_stride
        vector, column = tl.arange(0, SHAPE.num_tokens * SHAPE.block_heads), tl.arange(0, SHAPE.width)
        head, number = vector % SHAPE.block_heads, vector // SHAPE.block_heads
        is_head = (head < SHAPE.num_heads) & (number < count)
        cell = (token + number) * SHAPE.num_heads + head
        queries = tl.load(q + cell[None, :] * SHAPE.width + column[:, None], mask=is_head[None, :], other=0.0)
        weight = tl.load(weights + cell, mask=is_head, other=0.0).to(tl.float32)
        mine = token + tl.arange(0, SHAPE.num_tokens)
        for first in range(low, tl.minimum(low + share, end), SHAPE.num_keys):
            key = first + tl.arange(0, SHAPE.num_keys)
            is_key = key < end
            page = tl.load(entry + key // SHAPE.page_rows, mask=is_key, other=0)
            slot = page.to(tl.int64) * SHAPE.page_rows + key % SHAPE.page_rows
            dtype: tl.constexpr = q.dtype.element_ty
            if SHAPE.tile:
                keys, factors = load_keys(pool, slot, is_key, dtype, SHAPE.width, SHAPE.page_rows)
            else:
                keys = tl.load(pool + slot[:, None] * slot_stride + column[None, :], mask=is_key[:, None], other=0.0)
            products = tl.maximum(tl.dot(keys, queries, input_precision="ieee") * scale, 0.0) * weight[None, :]
            if SHAPE.num_tokens == 1:
                found = tl.sum(products, 1)[:, None]
            else:
                found = tl.sum(tl.reshape(products, [SHAPE.num_keys, SHAPE.num_tokens, SHAPE.block_heads]), 2)
            if SHAPE.tile:
                found *= factors[:, None]
            is_score = is_key[:, None] & (mine < token + count)[None, :]
            tl.store(scores + mine[None, :] * num_rows + key[:, None], found, mask=is_score)


@triton.jit
def _order(scores, place, is_row):  # type: ignore[no-untyped-def]
    """Returns numbers in the order of scores, of which 0 and -0 are equal."""
    bits = (tl.load(scores + place, mask=is_row, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "most", "size"],
    do_not_specialize_on_alignment=["positions", "token_rows", "out"],
)
def _choose(  # type: ignore[no-untyped-def]
    scores, rows, positions, token_rows, table, best, best_rows, out, table_stride, num_rows, most, size,
    SHAPE: tl.constexpr, CHUNK: tl.constexpr, IS_BITS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program chooses among some rows of one token: all that it sees in order, or those of ``rows``, of which -1 is none.

    It fills its part of ``best`` and ``best_rows``, or without these what ``out`` has of the token, ``size`` numbers.
    """
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = (tl.load(positions + token).to(tl.int32) + 1) // SHAPE.ratio
    place, scores = part * CHUNK + tl.arange(0, CHUNK), scores + token * num_rows
    if rows is None:
        row = place
        is_row = place < tl.minimum(end, num_rows)
    else:
        row = tl.load(rows + token * num_rows + place, mask=place < num_rows, other=-1)
        is_row = row >= 0
    # Where a token sees no more rows than it may choose there are no scores.
    is_scored = is_row & (place < tl.where(end > most, num_rows, 0))
    order = tl.where(is_row, _order(scores, place, is_scored), 0)
    # No more rows than are chosen need no least score: parts behind the end of a context, and later rounds of a short one.
    is_search = tl.sum(is_row.to(tl.int32), 0) > most
    least, bit = tl.full((), 0, tl.uint32), tl.where(is_search, 1 << 31, 0).to(tl.uint32)
    num_found = tl.full((), -1, tl.int32)
    while (bit > 0) & (num_found != most):
        count = tl.sum((order >= (least | bit)).to(tl.int32), 0)
        least, num_found = tl.where(count >= most, least | bit, least), tl.where(count >= most, count, num_found)
        bit = bit >> 1
    is_better, is_equal = is_row & (order > least), is_row & (order == least)
    left = most - tl.sum(is_better.to(tl.int32), 0)
    is_chosen = is_better | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= left))
    target = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
    is_empty = (place - part * CHUNK >= num_chosen) & (place - part * CHUNK < most)
    if IS_BITS:
        place = tl.arange(0, CHUNK // _WORD)
        words = tl.reshape(is_chosen.to(tl.int64), [CHUNK // _WORD, _WORD]) << tl.arange(0, _WORD)[None, :]
        tl.store(out + token * size + place, tl.sum(words, 1), mask=place < size)
    elif best is None:
        out += token * size
        page = tl.load(
            table + tl.load(token_rows + token) * table_stride + row // SHAPE.page_rows, mask=is_chosen, other=0
        )
        tl.store(out + target, page.to(tl.int64) * SHAPE.page_rows + row % SHAPE.page_rows, mask=is_chosen)
        tl.store(out + place, tl.full((CHUNK,), -1, tl.int64), mask=is_empty)
    else:
        mine = (token * num_parts + part) * most
        tl.store(best + mine + target, tl.load(scores + place, mask=is_chosen & is_scored, other=0.0), mask=is_chosen)
        tl.store(best_rows + mine + target, row, mask=is_chosen)
        tl.store(best_rows + mine + place - part * CHUNK, tl.full((CHUNK,), -1, tl.int32), mask=is_empty)
