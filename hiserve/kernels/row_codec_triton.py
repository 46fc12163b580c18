"""Rows in 8 bits within kernels of Triton: packed as they are stored, unpacked in registers; ``kernels.row_codecs`` is the twin.

Kernels know them by two constants: numbers of a row, a power of 2, and of its tiles. Rows have one tile in bfloat16, the last;
keys of an index have one tile in all; a tile of 0 numbers stands for rows that are not packed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.row_shapes import LEAST_EXPONENT, PackedPages
from hiserve.kernels import row_codecs

_LARGEST, _LEAST = tl.constexpr(row_codecs.LARGEST), tl.constexpr(row_codecs.LEAST)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)


def tile_of(packed: PackedPages | None, pool: Tensor, width: int, page_rows: int) -> int:
    """Returns the numbers of a tile in rows of ``width`` numbers, in pages of ``page_rows``; 0 if they are not packed."""
    if packed is None:
        return 0
    shape = packed.shape
    assert shape.width == width and packed.page_rows == page_rows, (packed, width, page_rows)
    assert (shape.plain == 0 and shape.tile == width) if shape.has_wide_scales else shape.plain == shape.tile, shape
    assert shape.scale_bytes == (4 if shape.has_wide_scales else 8), shape
    assert pool.is_contiguous() and pool.shape[1] == shape.row_bytes, (pool.shape, pool.stride(), shape)
    return shape.tile


@triton.jit
def rounded(value):  # type: ignore[no-untyped-def]
    """Rounds finite numbers to bfloat16, to the nearest and of two to the even one, as bits of float32."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def to_e4m3(value):  # type: ignore[no-untyped-def]
    """Rounds finite numbers to E4M3, as ``rounded`` does: by bits, which is the same on all devices."""
    positive = tl.minimum(tl.abs(value), _LARGEST)
    bits = positive.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9: the sum with 1.5 * 2**23 rounds to them.
    subnormal = (positive * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 255
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(positive < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _scale_exponents(largest):  # type: ignore[no-untyped-def]
    """As ``row_codecs.scale_exponents``."""
    bits = (tl.maximum(largest, _LEAST) * (1 / _LARGEST)).to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_2(exponent):  # type: ignore[no-untyped-def]
    """2 to the power of exponents from -126 on, float32; infinite from 128 on."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_halves(one, other, pool, scales, slot, place, half, head, which, mask, NUM_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores heads of keys or values: as they are, or in 8 bits, each with a power of 2 as its scale (``row_codecs.store_heads``).

    Args:
        one: ``[H, half]``, the first halves of heads.
        other: The second halves.
        pool: Of a plane.
        scales: int32, of both planes; None if they are not packed.
        slot: Of the token.
        place: Of the elements of ``one``, from the start of the pool.
        half: Elements from ``one`` to ``other``.
        head: Which KV heads they are, ``[H, 1]``.
        which: 0 of keys, 1 of values.
        mask: Which elements there are.
        NUM_HEADS: KV heads.

    Returns:
        Both halves as they are read, of their type.
    """
    if scales is None:
        tl.store(pool + place, one, mask=mask)
        tl.store(pool + place + half, other, mask=mask)
    else:
        first, second = one.to(tl.float32), other.to(tl.float32)
        largest = tl.maximum(tl.abs(first), tl.abs(second))
        # Of what is not finite no number is read: its scale is infinite.
        largest = tl.where((first != first) | (second != second), float("inf"), largest)
        exponent = tl.maximum(_scale_exponents(tl.max(largest, 1)[:, None]), _LEAST_EXPONENT)
        row = scales.to(tl.pointer_type(tl.uint8), bitcast=True) + slot * (4 * ((NUM_HEADS + 1) // 2)) + which
        tl.store(row + 2 * head, (exponent + 127).to(tl.uint8), mask=head < NUM_HEADS)
        if NUM_HEADS % 2 != 0:  # the bytes of a page depend on its tokens alone, those that are never read too
            tl.store(row + 2 * NUM_HEADS, tl.full((), 0, tl.uint8))
        divided, factor = power_of_2(-exponent), power_of_2(exponent)
        small, others = to_e4m3(first * divided), to_e4m3(second * divided)
        tl.store(pool + place, small, mask=mask)
        tl.store(pool + place + half, others, mask=mask)
        one, other = (widened(small) * factor).to(one.dtype), (widened(others) * factor).to(one.dtype)
    return one, other


@triton.jit
def widened(small):  # type: ignore[no-untyped-def]
    """Bits of E4M3 as float32."""
    return small.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def places_of(pool, slot, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where the numbers of rows begin, and where their scales do."""
    value_bytes: tl.constexpr = WIDTH if TILE == WIDTH else WIDTH + TILE
    scale_bytes: tl.constexpr = 4 if TILE == WIDTH else 8
    place = slot.to(tl.uint32)  # a pool has no more than 2**31 of them, and of slot -1 nothing is read
    page, row = place // PAGE_ROWS, place % PAGE_ROWS
    first = pool + page.to(tl.int64) * (PAGE_ROWS * (value_bytes + scale_bytes))
    return first + row * value_bytes, first + PAGE_ROWS * value_bytes + row * scale_bytes


@triton.jit
def store_row(row, pool, slot, slot_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a row, float32 ``[WIDTH]``, in a slot."""
    if TILE == 0:
        tl.store(pool + slot * slot_stride + tl.arange(0, WIDTH), row.to(pool.dtype.element_ty))
    else:
        place, scale = places_of(pool, slot, WIDTH, TILE, PAGE_ROWS)
        value = rounded(row).to(tl.float32, bitcast=True)
        if TILE == WIDTH:
            factor = tl.maximum(tl.max(tl.abs(value), 0), _LEAST) * (1 / _LARGEST)
            small = to_e4m3(tl.div_rn(value, tl.broadcast_to(factor, [WIDTH])))
            tl.store(place + tl.arange(0, WIDTH), small)
            tl.store(scale.to(tl.pointer_type(tl.float32), bitcast=True), factor)
        else:
            _store_tiles(tl.reshape(value, [WIDTH // TILE, TILE]), place, scale, WIDTH, TILE)


@triton.jit
def store_key(parts, places, are_there, pool, slot, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a key of an index that comes in three parts, at places of its numbers; those that are not there are 0."""
    one, two, three = parts
    one, two = rounded(one).to(tl.float32, bitcast=True), rounded(two).to(tl.float32, bitcast=True)
    three = rounded(three).to(tl.float32, bitcast=True)
    largest = tl.maximum(tl.max(tl.abs(one), 0), tl.max(tl.abs(two), 0))
    factor = tl.maximum(tl.maximum(largest, tl.max(tl.abs(three), 0)), _LEAST) * (1 / _LARGEST)
    place, scale = places_of(pool, slot, WIDTH, WIDTH, PAGE_ROWS)
    tl.store(scale.to(tl.pointer_type(tl.float32), bitcast=True), factor)
    small = to_e4m3(tl.div_rn(one, tl.broadcast_to(factor, one.shape)))
    tl.store(place + places[0], small, mask=are_there[0])
    small = to_e4m3(tl.div_rn(two, tl.broadcast_to(factor, two.shape)))
    tl.store(place + places[1], small, mask=are_there[1])
    small = to_e4m3(tl.div_rn(three, tl.broadcast_to(factor, three.shape)))
    tl.store(place + places[2], small, mask=are_there[2])


@triton.jit
def _store_tiles(value, place, scale, WIDTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the tiles of a row, each with its scale, the last in bfloat16."""
    num_tiles: tl.constexpr = WIDTH // TILE - 1
    tile, element = tl.arange(0, WIDTH // TILE), tl.arange(0, TILE)
    is_scaled = tile < num_tiles
    exponent = _scale_exponents(tl.max(tl.abs(value), 1))
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 to the power of less the exponent
    column = tile[:, None] * TILE + element[None, :]
    tl.store(place + column, to_e4m3(value * factor[:, None]), mask=is_scaled[:, None])
    tl.store(scale + tile, tl.minimum(tl.maximum(exponent + 127, 0), 255).to(tl.uint8), mask=is_scaled)
    for pad in tl.static_range(num_tiles, 8):
        tl.store(scale + pad, tl.full((), 0, tl.uint8))
    last = (place + num_tiles * TILE).to(tl.pointer_type(tl.int16), bitcast=True)
    half = (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(last + column - num_tiles * TILE, half, mask=(tile >= num_tiles)[:, None])


@triton.jit
def load_rows(place, scale, is_there, DTYPE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the rows at places ``[K]``, ``[K, WIDTH]`` of a type; zeros where there is none, and nothing is read."""
    num_tiles: tl.constexpr = WIDTH // TILE - 1
    tile, element = tl.arange(0, WIDTH // TILE), tl.arange(0, TILE)
    is_scaled = is_there[:, None] & (tile < num_tiles)[None, :]
    column = tile[:, None] * TILE + element[None, :]
    small = tl.load(place[:, None, None] + column[None, :, :], mask=is_scaled[:, :, None], other=0)
    # All scales of a row at once: bytes alone would not be loaded ahead of their use.
    scales = tl.load(scale.to(tl.pointer_type(tl.int64), bitcast=True), mask=is_there, other=0)
    exponent = ((scales[:, None] >> (8 * tile)[None, :]) & 255).to(tl.int32)
    factor = (exponent << 23).to(tl.float32, bitcast=True).to(DTYPE)
    scaled = small.to(tl.float8e4nv, bitcast=True).to(DTYPE) * factor[:, :, None]
    last = (place + num_tiles * TILE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    plain = tl.load(last[:, None] + element[None, :], mask=is_there[:, None], other=0.0).to(DTYPE)
    rows = tl.where((tile < num_tiles)[None, :, None], scaled, plain[:, None, :])
    return tl.reshape(rows, [place.shape[0], WIDTH])


@triton.jit
def load_keys(pool, slot, is_there, DTYPE: tl.constexpr, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the keys of an index of slots ``[K]`` as ``load_rows``, and factors ``[K]`` of their products, above 0."""
    place, scale = places_of(pool, slot, WIDTH, WIDTH, PAGE_ROWS)
    small = tl.load(place[:, None] + tl.arange(0, WIDTH)[None, :], mask=is_there[:, None], other=0)
    factors = tl.load(scale.to(tl.pointer_type(tl.float32), bitcast=True), mask=is_there, other=1.0)
    return small.to(tl.float8e4nv, bitcast=True).to(DTYPE), factors
