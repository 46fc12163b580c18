"""Rows that each stand for several tokens, in two launches of Triton; ``kernels.compress_reference`` is their twin.

The first reads: it makes the rows that end in the step, and stores snapshots. The second writes the last inputs of each row
into its ring, where the first may have read older ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import compress_reference
from hiserve.kernels.compress_reference import CarriedInputs, Compression, StepTokens
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.row_codec_triton import store_row, tile_of
from hiserve.kernels.union_rows import RangeRows

_MAX_PLACES = 16  # tokens of a row at once
_ELEMENTS_PER_WARP = 1024
_VARYING = ["num_tokens", "value_stride", "score_stride", "table_stride"]


class _Shape(NamedTuple):
    """Compile-time constants."""

    width: int  # elements of a row, a power of 2
    ratio: int
    num_series: int
    ring: int
    num_kept: int  # inputs of a snapshot
    page_rows: int
    pairs: int  # that are turned
    places: int  # tokens at once
    tile: int  # of packed rows, else 0


def compress(
    values: Tensor,
    scores: Tensor,
    how: Compression,
    carried: CarriedInputs,
    tokens: StepTokens,
    target: RangeRows,
    turns: tuple[Tensor, Tensor],
) -> None:
    """Like ``compress_reference.compress``; float64, and rows whose elements are no power of 2, use the twin."""
    width = how.norm.shape[0]
    if how.bias.dtype == torch.float64 or width & (width - 1):
        compress_reference.compress(values, scores, how, carried, tokens, target, turns)
        return
    state, num_tokens = tokens.state, values.shape[0]
    ends = (values, scores, target.table, target.pool)
    assert all(each.stride(1) == 1 for each in ends), [each.stride() for each in ends]
    assert all(each.is_contiguous() for each in (*carried, how.bias, *turns)), (
        "rings, snapshots, biases or turns lie apart"
    )
    places = min(_MAX_PLACES, triton.next_power_of_2(how.ratio))
    sizes = (carried.rows.shape[1], carried.snapshots.shape[1], target.page_rows, turns[0].shape[1], places)
    tile = tile_of(target.packed, target.pool, width, target.page_rows)
    shape = _Shape(width, how.ratio, how.num_series, *sizes, tile)
    early = early_launch(values.device)
    given = (values, scores, how.bias, carried.rows, tokens.starts, state.rows, target.positions, target.token_rows)
    strides = (num_tokens, values.stride(0), scores.stride(0))
    _make[(num_tokens + (state.rows.shape[0] if shape.num_kept else 0),)](
        *given, carried.snapshots, *(state.starts, state.state_lens, state.state_ends, state.snap_at, state.snap_slots),
        how.norm, *turns, target.table, target.pool, how.eps, *strides, target.table.stride(0), target.pool.stride(0),
        shape,
        num_warps=max(1, min(8, places * width // _ELEMENTS_PER_WARP)), **early,
    )  # fmt: skip
    _keep[(num_tokens,)](*given, *strides, shape, num_warps=max(1, min(8, width // 128)), **early)


@triton.jit(do_not_specialize=["eps", *_VARYING], do_not_specialize_on_alignment=["values", "scores"])
def _make(  # type: ignore[no-untyped-def]
    values, scores, bias, ring, token_starts, rows, positions, token_rows, snapshots, starts, state_lens, state_ends,
    snap_at, snap_slots, norm, cos, sin, table, pool, eps, num_tokens, value_stride, score_stride, table_stride,
    slot_stride,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program makes the row that ends with a token, if one does; those behind store the snapshots of rows."""
    wide: tl.constexpr = SHAPE.num_series * SHAPE.width
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    program = tl.program_id(0).to(tl.int64)
    if program < num_tokens:
        last, row = tl.load(positions + program), tl.load(token_rows + program)
        is_end = (last + 1) % SHAPE.ratio == 0
        if is_end & (program < tl.load(token_starts + row + 1)):
            shift = tl.load(token_starts + row) - tl.load(starts + row)  # from a position to its token
            mine = ring + tl.load(rows + row) * (SHAPE.ring * 2 * wide)
            given = (values, scores, bias, mine)
            made = _weigh(given, last, shift, tl.load(starts + row), value_stride, score_stride, SHAPE)
            number = last // SHAPE.ratio
            page = tl.load(table + row * table_stride + number // SHAPE.page_rows).to(tl.int64)
            slot = page * SHAPE.page_rows + number % SHAPE.page_rows
            turn = program * SHAPE.pairs
            made = _turned(made, norm, cos + turn, sin + turn, eps, values.dtype.element_ty, SHAPE)
            store_row(made, pool, slot, slot_stride, SHAPE.width, SHAPE.tile, SHAPE.page_rows)
    else:
        row = program - num_tokens
        boundary, slot = tl.load(snap_at + row), tl.load(snap_slots + row)
        if (tl.load(state_lens + row) < boundary) & (boundary <= tl.load(state_ends + row)) & (slot > 0):
            shift = tl.load(token_starts + row) - tl.load(starts + row)  # from a position to its token
            mine = ring + tl.load(rows + row) * (SHAPE.ring * 2 * wide)
            kept = snapshots + slot * (SHAPE.num_kept * 2 * wide)
            given = (values, scores, bias, mine)
            _snapshot(given, kept, boundary, shift, tl.load(starts + row), value_stride, score_stride, SHAPE)


@triton.jit
def _weigh(given, last, shift, start, value_stride, score_stride, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum of the inputs up to ``last``, weighed by their softmax: of the step's tokens, and of the ring."""
    values, scores, bias, ring = given
    num_series: tl.constexpr = SHAPE.num_series
    wide: tl.constexpr = num_series * SHAPE.width
    column = tl.arange(0, SHAPE.width)
    best = tl.full((SHAPE.width,), -float("inf"), tl.float32)
    total = tl.full((SHAPE.width,), 0.0, tl.float32)
    summed = tl.full((SHAPE.width,), 0.0, tl.float32)
    for series in tl.static_range(num_series):
        before = last + 1 - (SHAPE.num_series - series) * SHAPE.ratio
        for begin in range(0, SHAPE.ratio, SHAPE.places):
            place = begin + tl.arange(0, SHAPE.places)
            position = before + place
            is_there = (place < SHAPE.ratio) & (position >= 0)
            is_new, is_old = is_there & (position >= start), is_there & (position < start)
            token = (position + shift)[:, None]
            at = series * SHAPE.width + column[None, :]
            old = ring + ((position + SHAPE.ring) % SHAPE.ring)[:, None] * (2 * wide) + at
            value = tl.load(values + token * value_stride + at, mask=is_new[:, None], other=0.0).to(tl.float32)
            value += tl.load(old, mask=is_old[:, None], other=0.0)
            score = tl.load(scores + token * score_stride + at, mask=is_new[:, None], other=0.0).to(tl.float32)
            score += tl.load(bias + place[:, None] * wide + at, mask=is_new[:, None], other=0.0)
            score += tl.load(old + wide, mask=is_old[:, None], other=0.0)
            score = tl.where(is_there[:, None], score, -float("inf"))
            better = tl.maximum(best, tl.max(score, 0))
            base = tl.where(better == -float("inf"), 0.0, better)
            shares, kept = tl.exp(score - base[None, :]), tl.exp(best - base)
            total = total * kept + tl.sum(shares, 0)
            summed = summed * kept + tl.sum(shares * value, 0)
            best = better
    return summed / total


@triton.jit
def _turned(made, norm, cos, sin, eps, DTYPE: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norms a row and turns its last pairs; rounded where the twin is."""
    column, pair = tl.arange(0, SHAPE.width), tl.arange(0, SHAPE.width // 2) - (SHAPE.width // 2 - SHAPE.pairs)
    made *= tl.rsqrt(tl.sum(made * made, 0) / SHAPE.width + eps)
    made = (made.to(norm.dtype.element_ty) * tl.load(norm + column)).to(DTYPE).to(tl.float32)
    even, odd = tl.split(tl.reshape(made, [SHAPE.width // 2, 2]))
    cosine = tl.load(cos + pair, mask=pair >= 0, other=1.0)
    sine = tl.load(sin + pair, mask=pair >= 0, other=0.0)
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    return tl.reshape(turned, [SHAPE.width]).to(DTYPE).to(tl.float32)


@triton.jit
def _snapshot(given, kept, boundary, shift, start, value_stride, score_stride, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the inputs before a boundary: of the step's tokens, of the ring, zeros below position 0."""
    values, scores, bias, ring = given
    num_series: tl.constexpr = SHAPE.num_series
    wide: tl.constexpr = num_series * SHAPE.width
    column = tl.arange(0, SHAPE.width)
    for number in range(SHAPE.num_kept):
        position = boundary - SHAPE.num_kept + number
        target, token = kept + number * (2 * wide), position + shift
        source = ring + (position + SHAPE.ring) % SHAPE.ring * (2 * wide)
        is_new = column < tl.where(position >= start, SHAPE.width, 0)
        is_old = column < tl.where((position < start) & (position >= 0), SHAPE.width, 0)
        for series in tl.static_range(num_series):
            at = series * SHAPE.width + column
            value = tl.load(values + token * value_stride + at, mask=is_new, other=0.0).to(tl.float32)
            score = tl.load(scores + token * score_stride + at, mask=is_new, other=0.0).to(tl.float32)
            score += tl.load(bias + (position + SHAPE.ratio) % SHAPE.ratio * wide + at, mask=is_new, other=0.0)
            value += tl.load(source + at, mask=is_old, other=0.0)
            score += tl.load(source + wide + at, mask=is_old, other=0.0)
            tl.store(target + at, value)
            tl.store(target + wide + at, score)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["values", "scores"])
def _keep(  # type: ignore[no-untyped-def]
    values, scores, bias, ring, token_starts, rows, positions, token_rows, num_tokens, value_stride, score_stride,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program writes the inputs of a token into its row's ring, if they are among the last; those of no row are not written."""
    num_series: tl.constexpr = SHAPE.num_series
    wide: tl.constexpr = num_series * SHAPE.width
    column = tl.arange(0, SHAPE.width)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    position, row = tl.load(positions + token), tl.load(token_rows + token)
    end = tl.load(token_starts + row + 1).to(tl.int64)
    if (token < end) & (token >= end - SHAPE.ring):
        target = ring + (tl.load(rows + row) * SHAPE.ring + position % SHAPE.ring) * (2 * wide)
        for series in tl.static_range(num_series):
            at = series * SHAPE.width + column
            score = tl.load(scores + token * score_stride + at).to(tl.float32)
            tl.store(target + at, tl.load(values + token * value_stride + at).to(tl.float32))
            tl.store(target + wide + at, score + tl.load(bias + position % SHAPE.ratio * wide + at))
