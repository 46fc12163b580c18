"""Products of many rows by weights in 8 and 4 bits: with rounded inputs, or by slices of the weight in 16 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.quantization import TILE_ROWS
from hiserve.kernels.few_bits import column_at, place_of
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.quantized import LARGEST, MIDDLE, QuantizedWeight
from hiserve.kernels.row_codec_triton import to_e4m3

_SLICE_BYTES = 64 << 20  # of a weight in 16 bits, at once
_UPCAST_DEPTH = 128  # columns of a tile in 8 bits
_LEAST = 1e-12  # the least magnitude of a token that its scale follows
_MAX_WARPS = 8
_ELEMENTS_PER_WARP = 512
_BLOCK = 128  # rows and columns of a weight with one scale
_PRODUCT_ROWS = 128


def multiply_rounded(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Projects 16-bit ``[T, n]`` by a weight in 8 bits, in products of 8 bits.

    Inputs are rounded with a scale for each token, or for each token and 128 inputs if the weight's scales are of blocks.
    """
    if weight.scales.dim() == 2:
        return _multiply_blocks(*round_tokens(x, _BLOCK), weight, bias, x.dtype)
    if x.dtype != torch.bfloat16:  # the only type that torch's product of scaled rows has
        return multiply_slices(x, weight, bias)
    codes, scales = round_tokens(x, x.shape[1])
    out: Tensor = torch._scaled_mm(
        codes,
        weight.codes.T,
        scale_a=scales,
        scale_b=weight.scales[None, :],
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return out if bias is None else out.add_(bias)


def round_tokens(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rounds contiguous ``[T, n]`` to E4M3 with a float32 scale for each token and ``group`` inputs, a divisor of ``n``.

    Both are multiples of 128.

    Returns:
        Codes ``[T, n]``, in the order of a weight's, and scales ``[T, n / group]``.
    """
    (num_rows, depth), block = x.shape, triton.next_power_of_2(group)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, depth // group), dtype=torch.float32, device=x.device)
    _round_kernel[(num_rows, depth // group)](
        x, codes.view(torch.uint8), scales, group,
        LARGEST=LARGEST, LEAST=_LEAST, BLOCK=block, num_warps=max(1, min(_MAX_WARPS, block // _ELEMENTS_PER_WARP)),
        **early_launch(x.device),
    )  # fmt: skip
    return codes, scales


def multiply_slices(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Projects ``[T, n]`` of a 16-bit type by a weight that is spelled out in this type, some rows of it at a time."""
    num_columns, depth = weight.shape
    out = x.new_empty((x.shape[0], num_columns))
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    count = max(TILE_ROWS, _SLICE_BYTES // (x.dtype.itemsize * depth) // TILE_ROWS * TILE_ROWS)
    for first in range(0, num_columns, count):
        last = min(first + count, num_columns)
        values = _upcast(weight, first, last, x.dtype).T
        if bias is None:
            torch.mm(x, values, out=out[:, first:last])
        else:  # rounded once
            torch.addmm(bias[first:last], x, values, out=out[:, first:last])
    return out


def _upcast(weight: QuantizedWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Returns rows of a weight from ``first`` to ``last``, multiples of a tile's rows, with columns as they are stored."""
    depth, (_, group), is_wide = weight.shape[1], weight.spec.group, weight.spec.bits == 8
    width = _UPCAST_DEPTH if is_wide else weight.spec.half_tile
    out = torch.empty((last - first, depth), dtype=dtype, device=weight.device)
    _upcast_kernel[((last - first) // TILE_ROWS, depth // width)](
        weight.codes, weight.scales, weight.zeros, out, first, weight.shape[0], depth,
        ROWS=TILE_ROWS, WIDTH=width, GROUP=group, MIDDLE_ZERO=MIDDLE, IS_WIDE=is_wide, num_warps=4,
        **early_launch(weight.device),
    )  # fmt: skip
    return out


def _multiply_blocks(
    codes: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiplies rounded inputs by a weight with scales of blocks; ``codes`` and ``scales`` as ``round_tokens`` returns."""
    (num_rows, depth), num_columns = codes.shape, weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=codes.device)
    grid = (triton.cdiv(num_rows, _PRODUCT_ROWS), triton.cdiv(num_columns, _BLOCK))
    _block_kernel[grid](
        codes, scales, weight.codes, weight.scales, bias, out, num_rows, num_columns, depth,
        ROWS=_PRODUCT_ROWS, BLOCK=_BLOCK, num_warps=8, num_stages=4, **early_launch(codes.device),
    )  # fmt: skip
    return out


@triton.jit
def _round_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, group,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program rounds one group of a token."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    element = tl.arange(0, BLOCK)
    is_element = element < group
    first = place.to(tl.int64) * group
    values = tl.load(x + first + column_at(element), mask=is_element, other=0.0).to(tl.float32)
    # Of what is not finite no number is read: its scale is infinite.
    sizes = tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))
    scale = tl.maximum(tl.max(sizes, 0), LEAST) / LARGEST
    tl.store(codes + first + element, to_e4m3(values / scale), mask=is_element)
    tl.store(scales + place, scale)


@triton.jit
def _upcast_kernel(  # type: ignore[no-untyped-def]
    codes, scales, zeros, out, first, num_rows, depth,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MIDDLE_ZERO: tl.constexpr,
    IS_WIDE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program spells out ``WIDTH`` columns of ``ROWS`` rows, the first of which is ``first``."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first + here
    begin = tl.program_id(1) * WIDTH
    element = tl.arange(0, WIDTH)
    if IS_WIDE:
        values = tl.load(codes + row.to(tl.int64)[:, None] * depth + begin + place_of(element)[None, :]).to(tl.float32)
        if GROUP > 0:
            values *= tl.load(scales + row // GROUP * (depth // GROUP) + begin // GROUP)[:, None]
        else:
            values *= tl.load(scales + row)[:, None]
    else:
        tile = (row // ROWS).to(tl.int64) * (depth // (2 * WIDTH)) + begin // (2 * WIDTH)
        column = begin % (2 * WIDTH) + element
        quarter = column // (WIDTH // 2)
        byte = column % (WIDTH // 2) * 2 + quarter // 2
        packed = tl.load(codes + (tile * ROWS + row % ROWS)[:, None] * WIDTH + byte[None, :]).to(tl.int32)
        code = (packed >> (quarter % 2 * 4)[None, :] & 15).to(tl.float32)
        place = begin // GROUP * num_rows + row
        zero = MIDDLE_ZERO if zeros is None else tl.load(zeros + place).to(tl.float32)[:, None]
        values = (code - zero) * tl.load(scales + place).to(tl.float32)[:, None]
    target = out + here.to(tl.int64)[:, None] * depth + begin + element[None, :]
    tl.store(target, values.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _block_kernel(  # type: ignore[no-untyped-def]
    x, x_scales, codes, scales, bias, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program multiplies ``ROWS`` rows by ``BLOCK`` rows of the weight; sums of ``BLOCK`` inputs are scaled."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element = tl.arange(0, BLOCK)
    is_row, is_column = row < num_rows, column < num_columns
    num_blocks = depth // BLOCK
    rows = x + row.to(tl.int64)[:, None] * depth + element[None, :]
    columns = codes + column.to(tl.int64)[None, :] * depth + element[:, None]
    scales += tl.program_id(1) * num_blocks
    x_scales += row * num_blocks
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(num_blocks):
        values = tl.load(rows + block * BLOCK, mask=is_row[:, None], other=0.0)
        weights = tl.load(columns + block * BLOCK, mask=is_column[None, :], other=0.0)
        scale = tl.load(x_scales + block, mask=is_row, other=0.0) * tl.load(scales + block)
        total += tl.dot(values, weights) * scale[:, None]
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
