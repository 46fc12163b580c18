"""Projections by weights in 8 and 4 bits, which are widened to the type of the inputs in the tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.quantization import TILE_ROWS
from hiserve.core.row_shapes import PACKED_CAPABILITY
from hiserve.kernels import quantized
from hiserve.kernels.few_bits import has_instructions, magic_of, widen_code, widen_e4m3, widen_quarters
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.parts import Parts, Summand
from hiserve.kernels.parts_triton import summed
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.scaled_products import multiply_rounded, multiply_slices
from hiserve.kernels.term_products import has_terms, term_parts
from hiserve.kernels.terms import Inputs
from hiserve.kernels.terms_triton import split_terms

_TILE_ROWS = (16, 32, 64, 128)
_MAX_EXACT_ROWS = 32  # of inputs that may be rounded: with more, products in 8 bits are faster
_DEPTH = 128  # of a tile in 8 bits
_MIN_BLOCKS = 4  # of depth, for each part


class Tile(NamedTuple):
    """Sizes of a program.

    Attributes:
        columns: Of the result, where these divide it; else ``TILE_ROWS``.
        num_stages: Tiles of depth in flight.
        programs: Of a multiprocessor, until which the depth is split.
    """

    columns: int
    num_warps: int
    num_stages: int
    programs: int


# By the bits of a code and the rows of a tile. Of 4 bits the columns are those of a tile of codes. Those of 16 and 32 rows were the
# fastest of 40 in the sum of a layer of Llama-8B on an H200, before codes were laid out as they are.
_TILES = {
    (8, 16): Tile(128, 8, 3, 3),
    (8, 32): Tile(64, 4, 4, 4),
    (8, 64): Tile(64, 4, 4, 2),
    (8, 128): Tile(64, 4, 3, 2),
    (4, 16): Tile(64, 4, 6, 4),
    (4, 32): Tile(64, 4, 3, 4),
    (4, 64): Tile(64, 4, 4, 4),
    (4, 128): Tile(64, 4, 3, 4),
}


def quantized_linear(
    x: Inputs, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool = False
) -> Tensor:
    """Like ``quantized.quantized_linear``, for weights that were on the device before the step.

    Weights of whole tiles are never spelled out: few rows of bfloat16 are split in two terms, which are multiplied in 8
    bits; other few rows of a 16-bit type use a kernel that widens the weight in its tiles. More rows are rounded to the
    weight's type, where its spec allows that, or multiplied by one slice of the weight after the other.
    """
    return summed(quantized_parts(x, weight, bias, is_after_attention=is_after_attention))


def quantized_parts(
    x: Inputs, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool = False
) -> Summand:
    """As ``quantized_linear``; parts of the depth that are products of their own are left to the reader, who adds them up."""
    if isinstance(x, Tensor) and has_terms(x, weight):
        # An early launch would slow the attention before it: see docs/design/execution.md.
        x = split_terms(x, weight.order, is_early=not is_after_attention)
    if not isinstance(x, Tensor):
        return term_parts(x, weight, bias)
    num_rows = x.shape[0]
    if x.dtype.itemsize != 2 or not num_rows or not _has_kernels(weight):
        return quantized.quantized_linear(x, weight, bias)
    is_rounded = weight.spec.activations == "token"
    if num_rows <= (_MAX_EXACT_ROWS if is_rounded else _TILE_ROWS[-1]):
        return _tiled_linear(x, weight, bias, is_early=not is_after_attention)
    return multiply_rounded(x, weight, bias) if is_rounded else multiply_slices(x, weight, bias)


def _has_kernels(weight: QuantizedWeight) -> bool:
    (num_columns, depth), device = weight.shape, weight.device
    if weight.spec.bits == 8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < PACKED_CAPABILITY:
        return False
    return num_columns % TILE_ROWS == 0 and depth % _tile_depth(weight) == 0


def _tile_depth(weight: QuantizedWeight) -> int:
    return _DEPTH if weight.spec.bits == 8 else 2 * weight.spec.half_tile


def _tiled_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, is_early: bool) -> Summand:
    """Splits few tiles along their depth until each multiprocessor has its programs."""
    assert x.is_contiguous(), x.stride()
    (num_rows, depth), num_columns, bits = x.shape, weight.shape[0], weight.spec.bits
    rows = next(rows for rows in _TILE_ROWS if num_rows <= rows)
    tile = _TILES[bits, rows]
    columns = TILE_ROWS if num_columns % tile.columns else tile.columns
    num_tiles, count = num_columns // columns, num_processors(x.device) * tile.programs
    num_parts = max(1, min(count // num_tiles, depth // _tile_depth(weight) // _MIN_BLOCKS))
    parts_dtype = x.dtype if num_parts == 1 else torch.float32
    parts = x.new_empty((num_parts, num_rows, num_columns), dtype=parts_dtype)
    sizes = (num_rows, num_columns, depth)
    settings: dict[str, Any] = {"ROWS": rows, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    settings |= early_launch(x.device, is_early)
    settings["HAS_INSTRUCTIONS"] = has_instructions(x.device, x.dtype)
    bias_here = bias if num_parts == 1 else None
    if bits == 8:
        _fp8_kernel[(num_tiles, num_parts)](
            x, weight.codes.view(torch.int16), weight.scales, bias_here, parts, *sizes,
            COLUMNS=columns, DEPTH=_DEPTH, HAS_BLOCKS=weight.scales.dim() == 2, **settings,
        )  # fmt: skip
    else:
        _int4_kernel[(num_tiles, num_parts)](
            x, weight.codes.view(torch.int16), weight.scales, weight.zeros, weight.order, bias_here, parts, *sizes,
            COLUMNS=TILE_ROWS, HALF=weight.spec.half_tile, GROUP=weight.spec.group[1], MAGIC=magic_of(x.dtype),
            **settings,
        )  # fmt: skip
    return parts[0] if num_parts == 1 else Parts(parts, bias, x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, bias, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    HAS_INSTRUCTIONS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Like ``skinny_linear._tile_kernel``. Scales multiply sums: of a block of ``DEPTH`` inputs, or of all.

    Codes are read two at a time, one of each half of ``DEPTH``, each of which has a product of its own: elements of 16 bits
    come from shared memory as the matrix instructions take them, and one wait serves all instructions of a half.
    """
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, DEPTH // 2)
    is_row = row < num_rows
    num_blocks = depth // DEPTH
    columns = codes + column.to(tl.int64)[:, None] * (depth // 2) + element[None, :]
    rows = x + row[None, :] * depth + element[:, None]
    if HAS_BLOCKS:
        scales += tl.program_id(0) * COLUMNS // DEPTH * num_blocks
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts):
        low, high = widen_e4m3(tl.load(columns + block * (DEPTH // 2)), x.dtype.element_ty, HAS_INSTRUCTIONS)
        first = tl.load(rows + block * DEPTH, mask=is_row[None, :], other=0.0)
        second = tl.load(rows + block * DEPTH + DEPTH // 2, mask=is_row[None, :], other=0.0)
        if HAS_BLOCKS:
            found = tl.dot(high, second, tl.dot(low, first, input_precision="ieee"), input_precision="ieee")
            total += found * tl.load(scales + block)
        else:
            total = tl.dot(low, first, total, input_precision="ieee")
            total = tl.dot(high, second, total, input_precision="ieee")
    start_next(IS_EARLY)
    if not HAS_BLOCKS:
        total *= tl.load(scales + column)[:, None]
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _int4_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, order, bias, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    MAGIC: tl.constexpr, HAS_INSTRUCTIONS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Like ``_fp8_kernel``, for tiles of 4-bit codes, each of whose halves is one group or half of one.

    Codes are read four at a time, one of each quarter of a tile, each of which has a product of its own. A code becomes a number by its bits alone, as the last ones of a number of 2**7 or 2**10; zero points are subtracted
    with as much more. Both are exact, and so is their difference.
    """
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    tile_row = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * COLUMNS + tile_row
    QUARTER: tl.constexpr = HALF // 2
    element = tl.arange(0, QUARTER)
    is_row = row < num_rows
    num_tiles = depth // (2 * HALF)
    tiles = codes + tl.program_id(0).to(tl.int64) * COLUMNS * (depth // 4)
    tiles += tile_row[:, None] * QUARTER + element[None, :]
    rows = x + row[None, :] * depth
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for tile in range(part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts):
        packed = tl.load(tiles + tile * (COLUMNS * QUARTER))
        quarters = widen_quarters(packed, x.dtype.element_ty, MAGIC, zeros is None, HAS_INSTRUCTIONS)
        for half in tl.static_range(2):
            first = (2 * tile + half) * HALF
            place = first // GROUP * num_columns + column
            if half == 0 or GROUP <= HALF:
                found = tl.zeros([COLUMNS, ROWS], tl.float32)
            for quarter in tl.static_range(2):
                inputs = first + quarter * QUARTER + element
                if order is not None:
                    inputs = tl.load(order + inputs)
                values = tl.load(rows + inputs[:, None], mask=is_row[None, :], other=0.0)
                weights = quarters[2 * half + quarter]
                if zeros is not None:
                    weights -= widen_code(tl.load(zeros + place), x.dtype.element_ty, MAGIC)[:, None]
                found = tl.dot(weights, values, found, input_precision="ieee")
            if half == 1 or GROUP <= HALF:
                total += found * tl.load(scales + place).to(tl.float32)[:, None]
    start_next(IS_EARLY)
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])
