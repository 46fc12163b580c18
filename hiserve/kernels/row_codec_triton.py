"""Rows in 8 bits in Triton; ``kernels.row_codecs`` is the twin, byte by byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import row_codecs
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.row_codecs import PACKED_V4, PackedShape

_LARGEST, _LEAST = tl.constexpr(row_codecs.LARGEST), tl.constexpr(row_codecs.LEAST)


def store_packed(pages: Tensor, slots: Tensor, rows: Tensor, page_rows: int, shape: PackedShape = PACKED_V4) -> None:
    """Like ``row_codecs.store_packed``."""
    assert pages.is_contiguous() and pages.shape[1] >= page_rows * shape.row_bytes, pages.shape
    assert rows.stride(1) == 1 and rows.shape[1] == shape.width, rows.shape
    _store_packed[(slots.shape[0],)](
        pages,
        slots,
        rows,
        pages.shape[1],
        rows.stride(0),
        PAGE_ROWS=page_rows,
        SHAPE=shape,
        TILES=triton.next_power_of_2(shape.num_tiles),
        PLAIN=triton.next_power_of_2(shape.plain),
        num_warps=1,
        **early_launch(rows.device),
    )


def load_packed(pages: Tensor, slots: Tensor, page_rows: int, shape: PackedShape = PACKED_V4) -> Tensor:
    """Like ``row_codecs.load_packed``."""
    assert pages.is_contiguous() and slots.is_contiguous(), slots.stride()
    out = torch.empty((*slots.shape, shape.width), dtype=torch.float32, device=pages.device)
    _load_packed[(slots.numel(),)](
        pages,
        slots,
        out,
        pages.shape[1],
        PAGE_ROWS=page_rows,
        SHAPE=shape,
        TILES=triton.next_power_of_2(shape.num_tiles),
        PLAIN=triton.next_power_of_2(shape.plain),
        num_warps=1,
        **early_launch(pages.device),
    )
    return out


@triton.jit
def _rounded(value):  # type: ignore[no-untyped-def]
    """Rounds finite numbers to bfloat16, to the nearest and of two to the even one, as bits of float32."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def _small(value):  # type: ignore[no-untyped-def]
    """Rounds finite numbers to E4M3, as ``_rounded`` does: by bits, which is the same on all devices."""
    positive = tl.minimum(tl.abs(value), _LARGEST)
    bits = positive.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9: the sum with 1.5 * 2**23 rounds to them.
    subnormal = (positive * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 255
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(positive < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit(do_not_specialize=["page_bytes", "row_stride"], do_not_specialize_on_alignment=["rows"])  # type: ignore[untyped-decorator]
def _store_packed(  # type: ignore[no-untyped-def]
    pages,
    slots,
    rows,
    page_bytes,
    row_stride,
    PAGE_ROWS: tl.constexpr,  # noqa: N803
    SHAPE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    PLAIN: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program packs one row."""
    value_bytes: tl.constexpr = SHAPE.scaled + 2 * SHAPE.plain
    num_tiles: tl.constexpr = SHAPE.scaled // SHAPE.tile
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    page = pages + slot // PAGE_ROWS * page_bytes
    place = page + slot % PAGE_ROWS * value_bytes
    scale = page + PAGE_ROWS * value_bytes + slot % PAGE_ROWS * (num_tiles + 1)
    tile, element, plain = tl.arange(0, TILES), tl.arange(0, SHAPE.tile), tl.arange(0, PLAIN)
    column, is_tile = tile[:, None] * SHAPE.tile + element[None, :], tile < num_tiles
    source = rows + row * row_stride
    value = _rounded(tl.load(source + column, mask=is_tile[:, None], other=0.0)).to(tl.float32, bitcast=True)
    bits = (tl.maximum(tl.max(tl.abs(value), 1), _LEAST) * (1 / _LARGEST)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 to the power of less the exponent
    tl.store(place + column, _small(value * factor[:, None]), mask=is_tile[:, None])
    tl.store(scale + tile, tl.minimum(tl.maximum(exponent + 127, 0), 255).to(tl.uint8), mask=is_tile)
    tl.store(scale + num_tiles, tl.full((), 0, tl.uint8))
    half = _rounded(tl.load(source + SHAPE.scaled + plain, mask=plain < SHAPE.plain, other=0.0)) >> 16
    tl.store(place + SHAPE.scaled + 2 * plain, (half & 255).to(tl.uint8), mask=plain < SHAPE.plain)
    tl.store(place + SHAPE.scaled + 2 * plain + 1, ((half >> 8) & 255).to(tl.uint8), mask=plain < SHAPE.plain)


@triton.jit(do_not_specialize=["page_bytes"])  # type: ignore[untyped-decorator]
def _load_packed(  # type: ignore[no-untyped-def]
    pages,
    slots,
    out,
    page_bytes,
    PAGE_ROWS: tl.constexpr,  # noqa: N803
    SHAPE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    PLAIN: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program unpacks one row; zeros for slot -1, of which nothing is read."""
    value_bytes: tl.constexpr = SHAPE.scaled + 2 * SHAPE.plain
    num_tiles: tl.constexpr = SHAPE.scaled // SHAPE.tile
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    tile, element, plain = tl.arange(0, TILES), tl.arange(0, SHAPE.tile), tl.arange(0, PLAIN)
    num_there = tl.where(slot < 0, 0, num_tiles)
    page = pages + tl.maximum(slot, 0) // PAGE_ROWS * page_bytes
    place = page + tl.maximum(slot, 0) % PAGE_ROWS * value_bytes
    scale = page + PAGE_ROWS * value_bytes + tl.maximum(slot, 0) % PAGE_ROWS * (num_tiles + 1)
    column = tile[:, None] * SHAPE.tile + element[None, :]
    small = tl.load(place + column, mask=(tile < num_there)[:, None], other=0).to(tl.float8e4nv, bitcast=True)
    exponent = tl.load(scale + tile, mask=tile < num_there, other=127).to(tl.int32)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    target = out + row * (SHAPE.scaled + SHAPE.plain)
    tl.store(target + column, small.to(tl.float32) * factor[:, None], mask=(tile < num_tiles)[:, None])
    is_there = plain < tl.where(slot < 0, 0, SHAPE.plain)
    low = tl.load(place + SHAPE.scaled + 2 * plain, mask=is_there, other=0).to(tl.uint16)
    high = tl.load(place + SHAPE.scaled + 2 * plain + 1, mask=is_there, other=0).to(tl.uint16)
    rest = (low | (high << 8)).to(tl.bfloat16, bitcast=True).to(tl.float32)
    tl.store(target + SHAPE.scaled + plain, rest, mask=plain < SHAPE.plain)
