"""Attention over the union of a window, compressed and chosen rows, in Triton; ``kernels.union_reference`` is its twin.

All heads of a token share its rows, each of which is key and value: they are the rows of one matrix product. What a token
sees follows from its position, on the device, so that tokens of prompts, of drafts and of decoding rows are the same case.
The rows of a token are split into parts of whole tiles (the split-KV of FlashDecoding); a second launch joins them, and the
sink with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.step_memory import MAX_PROGRAMS, PROGRAM_QUERIES
from hiserve.kernels import union_reference
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.packed_union import add_tile, attend_packed
from hiserve.kernels.pairs_triton import turned
from hiserve.kernels.row_codec_triton import tile_of
from hiserve.kernels.union_rows import ChosenRows, RowSource

MAX_PARTS = 32
"""Most parts of a token's rows."""

_NUM_JOINED = 8  # parts that are in registers at once
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))


class _Tile(NamedTuple):
    """What a program holds at once."""

    num_heads: int  # a power of 2, 16 at least
    num_keys: int  # likewise
    num_warps: int
    num_stages: int  # twice the loads of rows in flight, as their slots are loaded before them, and one


class _Source(NamedTuple):
    """Compile-time constants of a source."""

    is_there: bool
    is_chosen: bool = False
    page_rows: int = 1
    ratio: int = 1
    window: int = 0  # 0 is none
    tile: int = 0  # of packed rows, else 0


class _Shape(NamedTuple):
    """Compile-time constants of a launch."""

    num_heads: int
    width: int
    block_heads: int
    num_keys: int
    num_pairs: int  # that are turned, 0 is none


_WIDE_TILE = _Tile(16, 16, 4, 2)  # of float32, whose products take no tensor cores
_TILES = (_Tile(64, 32, 8, 2), _Tile(32, 64, 8, 2), _Tile(16, 32, 4, 3))
_PACKED_TILES = (_Tile(64, 32, 8, 2), _Tile(16, 32, 4, 3))  # of 32 heads and 64 rows registers spill
_VARYING = ["first_stride", "first_count", "second_stride", "second_count", "num_tokens"]


def attend(
    q: Tensor,
    sources: Sequence[RowSource],
    sink: Tensor | None,
    scale: float,
    turns: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Like ``union_reference.attend``, of one or two sources; float64 uses the twin. Widths are powers of 2, 16 at least."""
    if q.dtype == torch.float64:
        return union_reference.attend(q, sources, sink, scale, turns)
    num_tokens, num_heads, width = q.shape
    assert 1 <= len(sources) <= 2, f"{len(sources)} sources"
    assert width >= 16 and not width & (width - 1), f"rows of {width} elements"
    assert all(each.pool.stride(1) == 1 for each in sources), [each.pool.stride() for each in sources]
    is_packed = sources[0].packed is not None
    assert all((each.packed is not None) == is_packed for each in sources), "packed rows beside others"
    assert is_packed or all(each.pool.dtype == q.dtype for each in sources), "rows unlike queries"
    q = q.contiguous()
    out, lse = torch.empty_like(q), q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    num_rows = sum(_most(each) for each in sources)
    tile, num_parts = choose_parts(num_tokens, num_heads, num_rows, q.dtype, num_processors(q.device), is_packed)
    cos, sin = turns or (None, None)
    assert all(each.is_contiguous() for each in turns or ()), "turns lie apart"
    shape = _Shape(num_heads, width, tile.num_heads, tile.num_keys, 0 if cos is None else cos.shape[1])
    part_out, part_lse = out, lse
    if num_parts > 1:
        size = (num_parts, num_tokens, num_heads)
        part_out, part_lse = (q.new_empty(each, dtype=torch.float32) for each in ((*size, width), size))
    (first, *first_ends), first_kind = _describe(sources[0], width)
    (second, *second_ends), second_kind = _describe(sources[-1], width)
    if len(sources) == 1:
        second_kind = _Source(is_there=False)
    ranges = next((each for each in sources if not isinstance(each, ChosenRows)), None)
    positions, token_rows = (None, None) if ranges is None else (ranges.positions, ranges.token_rows)
    early = early_launch(q.device)
    _attend[(num_tokens * triton.cdiv(num_heads, tile.num_heads), num_parts)](
        q, positions, token_rows, first, *first_ends, second, *second_ends, part_out, part_lse,
        *((sink, cos, sin) if num_parts == 1 else (None,) * 3), num_tokens, scale * math.log2(math.e), shape,
        first_kind, second_kind,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **early,
    )  # fmt: skip
    if num_parts > 1:
        given = (part_out, part_lse, sink, cos, sin, out, lse, num_tokens, num_parts)
        _join[(num_tokens, num_heads)](*given, shape, PARTS=_NUM_JOINED, **early)
    return out, lse


def choose_parts(
    num_tokens: int, num_heads: int, num_rows: int, dtype: torch.dtype, num_sms: int, is_packed: bool = False
) -> tuple[_Tile, int]:
    """Returns the tile of a launch and the parts of each token: one wave of programs, if there are that many rows.

    Results of all parts together have no more elements than the memory plan counts. ``num_rows`` bounds those of a token.
    """
    room = MAX_PROGRAMS * PROGRAM_QUERIES // (num_tokens * num_heads)
    if dtype == torch.float32:
        tiles: tuple[_Tile, ...] = (_WIDE_TILE,)
    else:
        some = _PACKED_TILES if is_packed else _TILES
        tiles = tuple(each for each in some if each.num_heads <= max(16, triton.next_power_of_2(num_heads)))
    for tile in tiles:
        num_programs = num_tokens * triton.cdiv(num_heads, tile.num_heads)
        most = max(1, min(MAX_PARTS, room, triton.cdiv(num_rows, tile.num_keys)))
        if num_programs * most >= num_sms:
            break
    return tile, min(most, max(1, num_sms // num_programs))


def _most(source: RowSource) -> int:
    return source.slots.shape[1] if isinstance(source, ChosenRows) else source.width


def _describe(source: RowSource, width: int) -> tuple[tuple[Tensor, int, Tensor, int, int], _Source]:
    """Returns the pool and the distance of its rows, table or slots and theirs, the chosen rows of a token; and constants."""
    pool = source.pool, source.pool.stride(0)
    if isinstance(source, ChosenRows):
        assert source.slots.stride(1) == 1, source.slots.stride()
        page_rows = 1 if source.packed is None else source.packed.page_rows
        kind = _Source(True, True, page_rows, tile=tile_of(source.packed, source.pool, width, page_rows))
        return (*pool, source.slots, source.slots.stride(0), source.slots.shape[1]), kind
    assert source.table.stride(1) == 1, source.table.stride()
    tile = tile_of(source.packed, source.pool, width, source.page_rows)
    kind = _Source(True, False, source.page_rows, source.ratio, source.window or 0, tile)
    return (*pool, source.table, source.table.stride(0), 0), kind


@triton.jit
def _place(positions, token_rows, token):  # type: ignore[no-untyped-def]
    """Returns the position and the row of a token, 0 where no source needs them."""
    position = tl.full((), 0, tl.int32)
    row = tl.full((), 0, tl.int64)
    if positions is not None:
        position = tl.load(positions + token).to(tl.int32)
        row = tl.load(token_rows + token)
    return position, row


@triton.jit
def _bounds(position, count, SOURCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first row that a token sees, and the end of those that it sees."""
    first = tl.full((), 0, tl.int32)
    end = tl.full((), 0, tl.int32)
    if SOURCE.is_there:
        if SOURCE.is_chosen:
            end += count
        else:
            end = (position + 1) // SOURCE.ratio
            if SOURCE.window > 0:
                first = tl.maximum(position + 1 - SOURCE.window, 0)
    return first, end


@triton.jit
def _attend_rows(queries, source, low, high, scale, state, SHAPE: tl.constexpr, SOURCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the rows ``low`` to ``high`` of a source to a softmax; their slots are a token's, or in a row's table."""
    pool, slot_stride, index = source
    best, total, summed = state
    column = tl.arange(0, SHAPE.width)
    for start in range(low, high, SHAPE.num_keys):
        key = start + tl.arange(0, SHAPE.num_keys)
        is_key = key < high
        if SOURCE.is_chosen:
            slot = tl.load(index + key, mask=is_key, other=-1)
            is_key = slot >= 0
        else:
            page = tl.load(index + key // SOURCE.page_rows, mask=is_key, other=0)
            slot = page.to(tl.int64) * SOURCE.page_rows + key % SOURCE.page_rows
        rows = tl.load(pool + slot[:, None] * slot_stride + column[None, :], mask=is_key[:, None], other=0.0)
        best, total, summed = add_tile(queries, rows, is_key, scale, start < high, best, total, summed)
    return best, total, summed


@triton.jit
def _attend_plain(  # type: ignore[no-untyped-def]
    queries, one, two, ends, tiles, scale, state,
    SHAPE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    """Adds tiles of the first source to a softmax, then those of the second; each is its pool, the distance of rows, and its index."""
    first, first_end, second, second_end = ends
    low, before, high = tiles
    begin, end = first + low * SHAPE.num_keys, tl.minimum(first + high * SHAPE.num_keys, first_end)
    state = _attend_rows(queries, one, begin, end, scale, state, SHAPE, FIRST)
    if SECOND.is_there:
        begin = second + tl.maximum(low - before, 0) * SHAPE.num_keys
        end = tl.minimum(second + (high - before) * SHAPE.num_keys, second_end)
        state = _attend_rows(queries, two, begin, end, scale, state, SHAPE, SECOND)
    return state


@triton.jit(do_not_specialize=_VARYING)
def _attend(  # type: ignore[no-untyped-def]
    q, positions, token_rows, first_pool, first_slot_stride, first_index, first_stride, first_count, second_pool,
    second_slot_stride, second_index, second_stride, second_count, out, lse, sink, cos, sin, num_tokens, scale,
    SHAPE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes some heads of a token over one part of its rows. A part without rows, but the first, has no values."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    num_blocks: tl.constexpr = (SHAPE.num_heads + SHAPE.block_heads - 1) // SHAPE.block_heads
    token, part, num_parts = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(0) % num_blocks * SHAPE.block_heads + tl.arange(0, SHAPE.block_heads)
    position, row = _place(positions, token_rows, token)
    first, first_end = _bounds(position, first_count, FIRST)
    second, second_end = _bounds(position, second_count, SECOND)
    before = tl.cdiv(first_end - first, SHAPE.num_keys)
    num_tiles = before + tl.cdiv(second_end - second, SHAPE.num_keys)
    share = tl.maximum(tl.cdiv(num_tiles, num_parts), 1)
    low, high = part * share, tl.minimum((part + 1) * share, num_tiles)
    is_head, cell = head < SHAPE.num_heads, token * SHAPE.num_heads + head
    if (part > 0) & (low >= num_tiles):
        cell += part.to(tl.int64) * num_tokens * SHAPE.num_heads
        tl.store(lse + cell, tl.full((SHAPE.block_heads,), -float("inf"), tl.float32), mask=is_head)
    else:
        column = tl.arange(0, SHAPE.width)
        queries = tl.load(q + cell[:, None] * SHAPE.width + column[None, :], mask=is_head[:, None], other=0.0)
        best = tl.full((SHAPE.block_heads,), -float("inf"), tl.float32)
        summed = tl.full((SHAPE.block_heads, SHAPE.width), 0.0, tl.float32)
        state = (best, tl.full((SHAPE.block_heads,), 0.0, tl.float32), summed)
        one = (first_pool, first_slot_stride, first_index + (token if FIRST.is_chosen else row) * first_stride)
        two = (second_pool, second_slot_stride, second_index + (token if SECOND.is_chosen else row) * second_stride)
        ends, tiles = (first, first_end, second, second_end), (low, before, high)
        if FIRST.tile:
            state = attend_packed(queries, one, two, ends, tiles, scale, state, SHAPE, FIRST, SECOND)
        else:
            state = _attend_plain(queries, one, two, ends, tiles, scale, state, SHAPE, FIRST, SECOND)
        _store(out, lse, sink, cos, sin, token, part, head, num_tokens, state, SHAPE)


@triton.jit
def _store(out, lse, sink, cos, sin, token, part, head, num_tokens, state, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores values, divided by their sum and that of a sink and turned back, and logarithms without the sink."""
    best, total, summed = state
    is_head, target = head < SHAPE.num_heads, (part.to(tl.int64) * num_tokens + token) * SHAPE.num_heads + head
    sees = total > 0.0
    logs = tl.where(sees, best + tl.log2(tl.where(sees, total, 1.0)), -float("inf"))
    shares = 1.0 / tl.where(sees, total, 1.0)
    if sink is not None:
        beside = tl.load(sink + head, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        shares /= 1.0 + tl.exp2(beside - tl.where(sees, logs, beside))
    summed *= shares[:, None]
    if cos is not None:
        place = token * SHAPE.num_pairs
        summed = turned(summed, (cos + place, sin + place), SHAPE.block_heads, SHAPE.width, SHAPE.num_pairs, True)
    values = out + target[:, None] * SHAPE.width + tl.arange(0, SHAPE.width)[None, :]
    tl.store(values, summed.to(out.dtype.element_ty), mask=is_head[:, None])
    tl.store(lse + target, logs * _LN_2, mask=is_head)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _join(  # type: ignore[no-untyped-def]
    part_out, part_lse, sink, cos, sin, out, lse, num_tokens, num_parts,
    SHAPE: tl.constexpr, PARTS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program joins the parts of one head of a token, ``PARTS`` at a time, and the sink, and turns the sum back."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell, column = token * SHAPE.num_heads + head, tl.arange(0, SHAPE.width)
    best = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    summed = tl.full((SHAPE.width,), 0.0, tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        source = part.to(tl.int64) * num_tokens * SHAPE.num_heads + cell
        logs = tl.load(part_lse + source, mask=part < num_parts, other=-float("inf")) * _LOG2_E
        is_part = logs > -float("inf")
        better = tl.maximum(best, tl.max(logs, 0))
        base = tl.where(better == -float("inf"), 0.0, better)
        shares, kept = tl.exp2(logs - base), tl.exp2(best - base)
        values = tl.load(part_out + source[:, None] * SHAPE.width + column[None, :], mask=is_part[:, None], other=0.0)
        total = total * kept + tl.sum(shares, 0)
        summed = summed * kept + tl.sum(values * shares[:, None], 0)
        best = better
    sees = total > 0.0
    logs = tl.where(sees, best + tl.log2(tl.where(sees, total, 1.0)), -float("inf"))
    share = 1.0 / tl.where(sees, total, 1.0)
    if sink is not None:
        beside = tl.load(sink + head).to(tl.float32) * _LOG2_E
        share /= 1.0 + tl.exp2(beside - tl.where(sees, logs, beside))
    summed *= share
    if cos is not None:
        place, summed = token * SHAPE.num_pairs, tl.reshape(summed, [1, SHAPE.width])
        summed = turned(summed, (cos + place, sin + place), 1, SHAPE.width, SHAPE.num_pairs, True)
        summed = tl.reshape(summed, [SHAPE.width])
    tl.store(out + cell * SHAPE.width + column, summed.to(out.dtype.element_ty))
    tl.store(lse + cell, logs * _LN_2)
