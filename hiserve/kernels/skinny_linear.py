"""Dense projections of few tokens, limited by the memory bandwidth of one read of the weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.parts import Parts, Summand
from hiserve.kernels.parts_triton import summed

_MAX_DEPTH = 2048
_MAX_COLUMNS = 4
_ELEMENTS = 4096  # of the weight, held by a program at once
_ELEMENTS_PER_WARP = 256

_MAX_ROW_ELEMENTS = 1 << 24  # largest weight of whole tiles for which a single row uses the row kernel
# Of a float32 weight, times the 16-bit rows that each read all of it: most of it is in the device's cache.
_MAX_WIDE_ELEMENTS = 1 << 22

_FEW_ROWS = 32  # up to which no library is faster
_TILE_COLUMNS = 64
_TILE_DEPTH = 128
_MIN_BLOCKS = 4  # of depth, for each part


class _Tile(NamedTuple):
    """Sizes of a program: columns of the product, and blocks of the depth, some of which are in flight."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


# By the most rows. Two programs, or one with more blocks in flight, use all of a multiprocessor's bandwidth.
_TILES = {rows: _Tile(_TILE_COLUMNS, _TILE_DEPTH, 4, 4) for rows in (16, 32, 64, 128)}
_STAGES_ALONE = 6
# Of weights of so many columns that every multiprocessor has such a tile: the inputs are read half as often.
_WIDE_TILES = {64: _Tile(128, 64, 4, 4), 128: _Tile(128, 64, 8, 3)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Tensor:
    """Like ``reference.linear``, for weights that were on the device before the step.

    Up to 32 rows of a 16-bit type use the tiled kernel if the weight is of whole tiles, and so do up to 128 rows if the
    weight has many columns or its depth is split; a single row uses the row kernel unless the weight is large and of
    whole tiles. On an H200 the four products of a layer of Llama-8B take 114,
    116 and 120 us for 1, 8 and 32 rows, and 102 us at the rate of a copy (``benchmarks/results/layers.json``).
    """
    return summed(linear_parts(x, weight, bias, is_after_attention=is_after_attention))


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Summand:
    """As ``linear``; parts of the depth that are products of their own are left to the reader, who adds them up."""
    num_rows = x.shape[0]
    if x.dtype != weight.dtype:
        is_narrow = x.dtype.itemsize == 2 and weight.dtype == torch.float32
        if is_narrow and 1 <= num_rows <= _MAX_WIDE_ELEMENTS // weight.numel():
            return row_linear(x, weight, bias)
        return F.linear(x.to(weight.dtype), weight, bias)
    if x.dtype.itemsize == 2 and num_rows == 1 and _suits_rows(weight):
        return row_linear(x, weight, bias)
    if x.dtype.itemsize == 2 and _suits_tiles(num_rows, weight):
        return _tiled_linear(x, weight, bias, is_early=not is_after_attention)
    return F.linear(x, weight, bias)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
    """Like ``reference.act_linear``, in one launch; None for rows and weights that have no kernel of their own.

    The two halves of the product are rounded before the activation, as those of ``linear`` are.
    """
    num_rows = x.shape[0]
    if x.dtype != weight.dtype or x.dtype.itemsize != 2:
        return None
    if num_rows == 1 and _suits_rows(weight):
        return row_linear(x, weight, bias, activation)
    if 1 <= num_rows <= max(_TILES) and _has_whole_tiles(weight) and _num_parts(weight) == 1:
        return summed(_tiled_linear(x, weight, bias, is_early=True, activation=activation))
    return None


def _has_whole_tiles(weight: Tensor) -> bool:
    num_columns, depth = weight.shape
    return num_columns % _TILE_COLUMNS == 0 and depth % _TILE_DEPTH == 0


def _suits_rows(weight: Tensor) -> bool:
    """Whether a single row is multiplied by programs of one row."""
    return not (_has_whole_tiles(weight) and weight.numel() > _MAX_ROW_ELEMENTS)


def _suits_tiles(num_rows: int, weight: Tensor) -> bool:
    """Whether rows are multiplied by the tiled kernel."""
    if not (1 <= num_rows <= max(_TILES) and _has_whole_tiles(weight)):
        return False
    return num_rows <= _FEW_ROWS or _is_wide(weight) or _num_parts(weight) > 1


def _is_wide(weight: Tensor) -> bool:
    columns = _WIDE_TILES[64].columns
    return weight.shape[0] % columns == 0 and weight.shape[0] >= columns * num_processors(weight.device)


def _num_parts(weight: Tensor) -> int:
    """Parts of the depth, until every multiprocessor has a tile."""
    num_columns, depth = weight.shape
    return max(
        1, min(num_processors(weight.device) // (num_columns // _TILE_COLUMNS), depth // _TILE_DEPTH // _MIN_BLOCKS)
    )


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """Like ``linear``, by programs of one row each, whose sums do not depend on the number of rows."""
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    num_columns, depth = weight.shape
    out = weight.new_empty((x.shape[0], num_columns if activation is None else num_columns // 2))
    block = min(_MAX_DEPTH, triton.next_power_of_2(depth))
    columns = min(_MAX_COLUMNS, _ELEMENTS // block)
    _row_kernel[(triton.cdiv(num_columns, columns), x.shape[0])](
        x, weight, bias, out, out.shape[1], depth,
        ACTIVATION=activation, COLUMNS=columns, DEPTH=block, num_warps=max(1, block // _ELEMENTS_PER_WARP),
        **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_columns, depth,
    ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program reads whole rows of the weight, which are columns of the result, for one row of ``x``.

    It loads the weight one block ahead, so that the first block is in flight before the kernel that computes ``x``
    ends. With an activation these are gates and their ups.
    """
    start_next(IS_EARLY)
    column, place = columns_of(num_columns, COLUMNS, ACTIVATION)
    element = tl.arange(0, DEPTH)
    is_column = column < num_columns
    rows = weight + place.to(tl.int64)[:, None] * depth + element[None, :]
    weights = tl.load(rows, mask=is_column[:, None] & (element < depth)[None, :], other=0.0)
    await_previous(IS_EARLY)
    x += tl.program_id(1) * depth
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, depth, DEPTH):
        values = tl.load(x + first + element, mask=element < depth - first, other=0.0).to(tl.float32)
        is_ahead = element < depth - first - DEPTH
        ahead = tl.load(rows + first + DEPTH, mask=is_column[:, None] & is_ahead[None, :], other=0.0)
        totals += weights.to(tl.float32) * values[None, :]
        weights = ahead
    total = tl.sum(totals, 1)[:, None]
    if bias is not None:
        total += tl.load(bias + place, mask=is_column, other=0.0).to(tl.float32)[:, None]
    column, total = results_of(column, total, out.dtype.element_ty, COLUMNS, ACTIVATION)
    target = out + tl.program_id(1) * num_columns + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(column < num_columns)[:, None])


@triton.jit
def columns_of(num_columns, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of the result of a program, and the rows of the weight that they are: with an activation, half of them ups."""
    lane = tl.arange(0, COLUMNS)
    if ACTIVATION is None:
        column = tl.program_id(0) * COLUMNS + lane
        place = column
    else:
        half: tl.constexpr = COLUMNS // 2
        column = tl.program_id(0) * half + lane % half
        place = column + lane // half * num_columns
    return column, place


@triton.jit
def results_of(column, total, dtype: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns columns and float32 results ``[columns, rows]`` of a program, whose gates and ups are rounded before they meet."""
    if ACTIVATION is not None:
        half: tl.constexpr = COLUMNS // 2
        gate, up = tl.split(total.to(dtype).to(tl.float32).reshape(2, half, total.shape[1]).permute(1, 2, 0))
        column, total = tl.program_id(0) * half + tl.arange(0, half), activate(gate, up, dtype, ACTIVATION)
    return column, total


def _tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_early: bool, activation: Activation | None = None
) -> Summand:
    """Splits few tiles along their depth until every multiprocessor has one.

    An early launch would slow the attention before it: see docs/design/execution.md.
    """
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    (num_rows, depth), num_parts = x.shape, _num_parts(weight)
    rows = next(rows for rows in _TILES if num_rows <= rows)
    tile = _WIDE_TILES[rows] if rows in _WIDE_TILES and _is_wide(weight) else _TILES[rows]
    num_tiles = weight.shape[0] // tile.columns
    if rows <= _FEW_ROWS and num_tiles * num_parts <= num_processors(x.device):
        tile = tile._replace(num_stages=_STAGES_ALONE)
    num_columns = weight.shape[0] if activation is None else weight.shape[0] // 2
    shape, dtype = (num_parts, num_rows, num_columns), x.dtype if num_parts == 1 else torch.float32
    parts = x.new_empty(shape, dtype=dtype)
    _tile_kernel[(num_tiles, num_parts)](
        x, weight, bias if num_parts == 1 else None, parts, num_rows, num_columns, depth,
        ACTIVATION=activation, ROWS=rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **early_launch(x.device, is_early),
    )  # fmt: skip
    return parts[0] if num_parts == 1 else Parts(parts, bias, x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, num_columns, depth,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program multiplies some rows of the weight, or a part of their depth, with all rows of ``x``.

    The weight is the left operand: matrix instructions take 64 rows there, and few rows on the right waste nothing. The
    next kernel may begin when all programs are past their loops: if it began earlier, its programs would gather on the
    multiprocessors that finish first.
    """
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    column, place = columns_of(num_columns, COLUMNS, ACTIVATION)
    element = tl.arange(0, DEPTH)
    is_row = row < num_rows
    num_blocks = depth // DEPTH
    columns = weight + place.to(tl.int64)[:, None] * depth + element[None, :]
    rows = x + row[None, :] * depth + element[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts):
        weights = tl.load(columns + block * DEPTH)
        values = tl.load(rows + block * DEPTH, mask=is_row[None, :], other=0.0)
        total = tl.dot(weights, values, total, input_precision="ieee")
    start_next(IS_EARLY)
    if bias is not None:
        total += tl.load(bias + place).to(tl.float32)[:, None]
    column, total = results_of(column, total, out.dtype.element_ty, COLUMNS, ACTIVATION)
    target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])
