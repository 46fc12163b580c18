"""Dense projections whose sums do not depend on the number of rows.

Each element is the sum of some parts of the depth, in order, and each part the sum that matrix instructions make of it, 16
elements after 16 elements. The parts depend on the weight alone, and instructions add alike whatever the tile, so that
tiles are chosen by the number of rows (``tests/gpu/test_exact.py`` compares bits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.parts import Parts, Summand

_PROGRAMS = 132  # that fill a device; of no device in particular, as no result may depend on one
_PART_DEPTH = 512  # least depth of a part
_UNIT = 128  # of which the depth of each part but the last is a multiple
_SPREAD_ROWS = 128  # most rows whose parts are programs of their own
_GROUP = 8  # tiles of rows whose programs are neighbours, and so share reads of weights


class Tile(NamedTuple):
    """Sizes of a program; ``rows`` of ``x``, ``columns`` of the result."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# Ascending rows: for weights of few columns, and for those of so many that wide tiles fill the device. The fastest, or nearly so,
# of two to five on an H200, with the weights of Llama-8B.
_TILES = (
    (Tile(16, 64, 128, 4, 6), Tile(16, 64, 128, 4, 6)),
    (Tile(32, 64, 128, 4, 6), Tile(32, 64, 128, 4, 6)),
    (Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 8, 4)),
    (Tile(128, 64, 128, 4, 4), Tile(128, 128, 64, 8, 5)),
)
_TALL, _TALLEST = Tile(128, 128, 64, 8, 4), Tile(256, 128, 64, 8, 4)
_MANY_ROWS = 1024  # from which on the tallest tiles are faster


def tile_for(num_rows: int, num_columns: int) -> Tile:
    """Returns the tile for so many rows of ``x`` and columns of the result."""
    for few_columns, many_columns in _TILES:
        if num_rows <= few_columns.rows:
            return many_columns if num_columns >= _PROGRAMS * many_columns.columns else few_columns
    return _TALL if num_rows < _MANY_ROWS else _TALLEST


def count_parts(num_columns: int, depth: int) -> int:
    """Returns into how many parts the depth of a weight is split."""
    return max(1, min(_PROGRAMS // -(-num_columns // 64), depth // _PART_DEPTH))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, *, is_early: bool) -> Summand:
    """Projects with one tile, like ``exact.linear_parts``. Parts of few rows are programs of their own; others are added up by the program that makes them.

    An early launch would slow an attention before it, as in ``skinny_linear``.
    """
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    if not num_rows:
        return x.new_empty((num_rows, num_columns))
    num_parts = count_parts(num_columns, depth)
    is_spread = num_parts > 1 and num_rows <= _SPREAD_ROWS
    dtype = torch.float32 if is_spread else x.dtype
    parts = x.new_empty((num_parts if is_spread else 1, num_rows, num_columns), dtype=dtype)
    num_tiles = triton.cdiv(num_columns, tile.columns) * triton.cdiv(num_rows, tile.rows)
    _product_kernel[(num_tiles, num_parts if is_spread else 1)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]), None if is_spread else bias, parts, num_rows,
        num_columns, depth, num_parts,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, UNIT=_UNIT, GROUP=_GROUP,
        IS_JOINED=num_parts > 1 and not is_spread, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **early_launch(x.device, is_early),
    )  # fmt: skip
    return Parts(parts, bias, x.dtype) if is_spread else parts[0]


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, num_columns, depth, num_parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, IS_JOINED: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program multiplies some rows of the weight, or one part of their depth, with some rows of ``x``.

    The copy engine loads both, and zeros for what lies outside.
    """
    await_previous(IS_EARLY)
    num_column_tiles, num_row_tiles = tl.cdiv(num_columns, COLUMNS), tl.cdiv(num_rows, ROWS)
    place = tl.program_id(0)
    first_tile = place // (GROUP * num_column_tiles) * GROUP
    in_group = tl.minimum(num_row_tiles - first_tile, GROUP)
    first_row = (first_tile + place % (GROUP * num_column_tiles) % in_group) * ROWS
    first_column = place % (GROUP * num_column_tiles) // in_group * COLUMNS
    num_units = tl.cdiv(depth, UNIT)
    if IS_JOINED:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in range(num_parts):
            begin, end = part * num_units // num_parts * UNIT, (part + 1) * num_units // num_parts * UNIT
            total += _sum(x, weight, first_row, first_column, begin, tl.minimum(end, depth), ROWS, COLUMNS, DEPTH)
    else:
        part, num_spread = tl.program_id(1), tl.num_programs(1)
        begin, end = part * num_units // num_spread * UNIT, (part + 1) * num_units // num_spread * UNIT
        total = _sum(x, weight, first_row, first_column, begin, tl.minimum(end, depth), ROWS, COLUMNS, DEPTH)
    start_next(IS_EARLY)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_columns
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out += tl.program_id(1) * num_rows.to(tl.int64) * num_columns
    target = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    x, weight, first_row, first_column, begin, end,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Returns the sums of the depth from ``begin`` to ``end``, float32 ``[ROWS, COLUMNS]``.

    Few rows are the right operand: matrix instructions take 64 rows on the left.
    """
    LEFT: tl.constexpr = COLUMNS if ROWS < 64 else ROWS
    total = tl.zeros([LEFT, ROWS + COLUMNS - LEFT], tl.float32)
    for first in range(begin, end, DEPTH):
        weights, values = weight.load([first_column, first]), x.load([first_row, first])
        if LEFT == ROWS:
            total = tl.dot(values, weights.T, total, input_precision="ieee")
        else:
            total = tl.dot(weights, values.T, total, input_precision="ieee")
    return total if LEFT == ROWS else total.T
