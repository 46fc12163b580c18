"""Products of few rows by weights in 8 and 4 bits, in 8 bits: inputs are in two terms (``terms.py``), and no weight is widened.

A product of 128 inputs is summed by matrix instructions, whose sums in 8 bits keep some 14 bits; sums of these are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.quantization import TILE_ROWS
from hiserve.kernels.few_bits import has_instructions
from hiserve.kernels.launch import await_previous, early_launch, num_processors, prefetch, start_next
from hiserve.kernels.parts import Parts, Summand
from hiserve.kernels.quantized import MIDDLE, QuantizedWeight
from hiserve.kernels.terms import FINE, GROUP, Terms

MAX_ROWS = 32
_ROWS = (8, 16, 32)
_CAPABILITY = (9, 0)
_MIN_BLOCKS = 4  # of 128 inputs, for each part
_SCALES_AHEAD = 8  # tiles for whose scales a program of 4 bits asks
_FINE = tl.constexpr(1 / FINE)


class Tile(NamedTuple):
    """Sizes of a program.

    Attributes:
        columns: Of the result; ``TILE_ROWS`` if these do not divide it.
        fewer: Columns of a result of fewer tiles than multiprocessors.
        num_stages: Blocks of 128 inputs in flight.
        programs: Of a multiprocessor, until which the depth is split.
    """

    columns: int
    fewer: int
    num_warps: int
    num_stages: int
    programs: int


# By bits, whatever the number of rows: a row's product is the same in any batch. The fastest of some ten for a layer of Llama-8B on
# an H200 (``benchmarks.kernels.few_bits``).
TILES = {8: Tile(128, 64, 4, 4, 3), 4: Tile(128, 128, 4, 3, 2)}
_PAIRED_ROWS = 8  # of a tile, up to which a turn in 4 bits multiplies two blocks


def has_terms(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether inputs ``[T, n]`` and a weight have such a product."""
    if x.dtype != torch.bfloat16 or not 0 < x.shape[0] <= MAX_ROWS or not takes_terms(weight):
        return False
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= _CAPABILITY


def reads_terms(reader: QuantizedWeight | None, x: Tensor) -> bool:
    """Whether a kernel that computes inputs of a weight from ``x`` may write them in two terms."""
    return reader is not None and reader.order is None and has_terms(x, reader)


def takes_terms(weight: QuantizedWeight) -> bool:
    """Whether a weight has whole tiles and scales of all inputs or of groups of 128."""
    (num_columns, depth), spec = weight.shape, weight.spec
    return num_columns % TILE_ROWS == 0 and depth % GROUP == 0 and (spec.bits == 8 or spec.group == (1, GROUP))


def term_parts(
    terms: Terms, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> Summand:
    """Projects inputs in two terms, ``[T, n]`` in the order of the weight's columns, to ``[T, rows]`` of a type.

    Few tiles are split along their depth; their parts are left to the reader.
    """
    num_rows, _, depth = terms.codes.shape
    num_columns, device, tile = weight.shape[0], weight.device, TILES[weight.spec.bits]
    count = num_processors(device)
    columns = tile.columns if num_columns >= tile.columns * count else tile.fewer
    columns = TILE_ROWS if num_columns % columns else columns
    num_tiles = num_columns // columns
    num_parts = max(1, min(count * tile.programs // num_tiles, depth // GROUP // _MIN_BLOCKS))
    shape = (num_parts, num_rows, num_columns)
    parts = torch.empty(shape, dtype=dtype if num_parts == 1 else torch.float32, device=device)
    settings: dict[str, Any] = {"ROWS": next(rows for rows in _ROWS if num_rows <= rows), "COLUMNS": columns}
    settings |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **early_launch(device)}
    behind = bias if num_parts == 1 else None, parts, num_rows, num_columns, depth
    if weight.spec.bits == 8:
        settings["HAS_BLOCKS"] = weight.scales.dim() == 2
        _fp8_kernel[(num_tiles, num_parts)](terms.codes, terms.scales, weight.codes, weight.scales, *behind, **settings)
    else:
        settings["BLOCKS"] = 2 if settings["ROWS"] <= _PAIRED_ROWS else 1
        settings |= {"TILE_ROWS": TILE_ROWS, "MIDDLE_ZERO": MIDDLE, "SCALES_AHEAD": _SCALES_AHEAD}
        settings["HAS_INSTRUCTIONS"] = has_instructions(device, torch.bfloat16)
        _int4_kernel[(num_tiles, num_parts)](*terms, weight.codes, weight.scales, weight.zeros, *behind, **settings)
    return parts[0] if num_parts == 1 else Parts(parts, bias, dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(  # type: ignore[no-untyped-def]
    x, x_scales, codes, scales, bias, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Like ``skinny_linear._tile_kernel``, of both terms of each row."""
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row, term = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, 128)
    is_row, is_term = row < num_rows, term < 2 * num_rows
    num_blocks = depth // 128
    begin, end = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
    columns = codes + column.to(tl.int64)[:, None] * depth + element[None, :]
    terms = x + term[None, :] * depth + element[:, None]
    x_scales += row * num_blocks
    if HAS_BLOCKS:
        scales += tl.program_id(0) * COLUMNS // 128 * num_blocks
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    next_scale = tl.load(x_scales + begin, mask=is_row, other=0.0)
    for block in range(begin, end):
        weights = tl.load(columns + block * 128)
        values = tl.load(terms + block * 128, mask=is_term[None, :], other=0.0)
        scale = next_scale
        next_scale = tl.load(x_scales + tl.minimum(block + 1, num_blocks - 1), mask=is_row, other=0.0)
        if HAS_BLOCKS:
            scale *= tl.load(scales + block)
        coarse, fine = tl.split(tl.dot(weights, values).reshape(COLUMNS, ROWS, 2))
        total += (coarse + fine * _FINE) * scale[None, :]
    start_next(IS_EARLY)
    if not HAS_BLOCKS:
        total *= tl.load(scales + column)[:, None]
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(target, total.T.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _int4_kernel(  # type: ignore[no-untyped-def]
    x, x_scales, x_sums, codes, scales, zeros, bias, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIDDLE_ZERO: tl.constexpr,
    SCALES_AHEAD: tl.constexpr,
    HAS_INSTRUCTIONS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Like ``_fp8_kernel``, of codes of 4 bits, which are numbers of E4M3, and zero points, which multiply sums of inputs.

    A turn multiplies one or two blocks of 128 inputs by one product, as each product is waited for: of two blocks, each has
    columns of its own, in which the inputs of the other are 0.
    """
    await_previous(IS_EARLY)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    num_tiles = depth // 128
    begin, end = part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    codes += (column // TILE_ROWS).to(tl.int64) * num_tiles * (TILE_ROWS * 64)
    lines = scales + first + tl.arange(0, COLUMNS // TILE_ROWS) * TILE_ROWS
    if HAS_INSTRUCTIONS:
        ahead = tl.minimum(begin + tl.arange(0, SCALES_AHEAD), num_tiles - 1)
        prefetch(lines[:, None] + ahead[None, :] * num_columns)
    row, term = tl.arange(0, ROWS), tl.arange(0, BLOCKS * 2 * ROWS)
    byte, element = tl.arange(0, BLOCKS * 64), tl.arange(0, BLOCKS * 128)
    block = element // 128
    tiles = codes[:, None] + (column % TILE_ROWS * 64)[:, None] + (byte // 64 * (TILE_ROWS * 64) + byte % 64)[None, :]
    terms = x + (term % (2 * ROWS))[None, :] * depth + element[:, None]
    is_term = (term % (2 * ROWS) < 2 * num_rows)[None, :] & (block[:, None] == (term // (2 * ROWS))[None, :])
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    x_scales += row * num_tiles
    x_sums += row * num_tiles
    given = _given(x_scales, x_sums, scales, zeros, begin, end, row, num_rows, first, num_columns, COLUMNS, BLOCKS)
    for tile in range(begin, end, BLOCKS):
        packed = tl.load(tiles + tile * (TILE_ROWS * 64), mask=(byte // 64)[None, :] < end - tile, other=0)
        values = tl.load(terms + tile * 128, mask=is_term & (block[:, None] < end - tile), other=0.0)
        here, following = given, tile + BLOCKS
        given = _given(
            x_scales, x_sums, scales, zeros, following, end, row, num_rows, first, num_columns, COLUMNS, BLOCKS
        )
        if HAS_INSTRUCTIONS:
            for each in tl.static_range(BLOCKS):
                prefetch(lines + tl.minimum(tile + each + SCALES_AHEAD, num_tiles - 1) * num_columns)
        low, high = _split_bytes(packed, HAS_INSTRUCTIONS)
        numbers = tl.join(low, high).reshape(COLUMNS, BLOCKS, 64, 2).permute(0, 1, 3, 2)
        found = tl.dot(numbers.reshape(COLUMNS, BLOCKS * 128), values)
        if BLOCKS == 1:
            total += _scaled(found, here[0], here[1], here[2], here[3], COLUMNS, ROWS, MIDDLE_ZERO)
        else:
            one, other = tl.split(found.reshape(COLUMNS, 2, 2 * ROWS).permute(0, 2, 1))
            total += _scaled(one, here[0], here[1], here[2], here[3], COLUMNS, ROWS, MIDDLE_ZERO)
            total += _scaled(other, here[4], here[5], here[6], here[7], COLUMNS, ROWS, MIDDLE_ZERO)
    start_next(IS_EARLY)
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)[:, None]
    target = out + (part * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(target, total.T.to(out.dtype.element_ty), mask=(row < num_rows)[:, None])


@triton.jit
def _given(  # type: ignore[no-untyped-def]
    x_scales, x_sums, scales, zeros, tile, end, row, num_rows, first, num_columns,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Returns what multiplies sums of one or two tiles.

    These are, of each tile, scales and sums of inputs, 0 behind the end, then scales and zero points of columns.
    """
    is_row, here = row < num_rows * (tile < end), tl.minimum(tile, end - 1)
    place = here * num_columns + first
    scale = tl.load(x_scales + here, mask=is_row, other=0.0)
    sums = tl.load(x_sums + here, mask=is_row, other=0.0)
    factor = _load_columns(scales + place, COLUMNS)
    zero = factor if zeros is None else _load_columns(zeros + place, COLUMNS)
    found = scale, sums, factor, zero
    if BLOCKS == 2:
        found += _given(x_scales, x_sums, scales, zeros, tile + 1, end, row, num_rows, first, num_columns, COLUMNS, 1)
    return found


@triton.jit
def _load_columns(pointer, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads numbers side by side, 64 at a time.

    If a program has more threads than a load has numbers, Triton loads these in the layout of the products, and nothing
    passes through shared memory.
    """
    half = tl.arange(0, 64)
    if COLUMNS == 64:
        return tl.load(pointer + half)
    else:  # noqa: RET505 - Triton compiles what follows a return too
        return tl.join(tl.load(pointer + half), tl.load(pointer + 64 + half)).permute(1, 0).reshape(128)


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    found, scale, sums, factor, zero, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MIDDLE_ZERO: tl.constexpr
):  # fmt: skip
    """Returns the products ``[COLUMNS, ROWS]`` of a tile from those of terms."""
    coarse, fine = tl.split(found.reshape(COLUMNS, ROWS, 2))
    middle = MIDDLE_ZERO if zero.dtype.is_floating() else zero.to(tl.float32)[:, None]
    products = (coarse + fine * _FINE) * (scale * 512.0)[None, :] - middle * sums[None, :]
    return products * factor.to(tl.float32)[:, None]


@triton.jit
def _split_bytes(packed, HAS_INSTRUCTIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lower and the upper four bits of bytes: in E4M3 such a byte is its number times 2**-9."""
    if HAS_INSTRUCTIONS:
        low, high = tl.inline_asm_elementwise(
            "{ and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f; }",
            "=r,=r,r",
            [packed],
            (tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = packed & 15, packed >> 4
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
