"""Latents in 8 bits within kernels of Triton: packed as they are stored, unpacked in registers; ``kernels.row_codecs`` is the twin.

A row is a latent, whose quarters have a float32 scale each, and a rotated key, which stays in bfloat16. The halves of a latent lie
byte by byte in turns, so that elements of 16 bits have one of each: kernels widen two at once, and multiply half by half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core import row_shapes
from hiserve.core.row_shapes import PackedPages, packed_latent
from hiserve.kernels import row_codecs
from hiserve.kernels.row_codec_triton import rounded, to_e4m3, widened

_SCALES = tl.constexpr(row_shapes.LATENT_SCALES)
_SCALE_BYTES = tl.constexpr(row_shapes.LATENT_SCALES * row_shapes.WIDE_SCALE_BYTES)
# As ``few_bits.widen_e4m3``, then times scales.
_SCALED = tl.constexpr("""{
.reg .b32 a, b, c, d;
shl.b32 a, $2, 8;
shl.b32 b, $2, 4;
shr.u32 c, $2, 4;
and.b32 b, b, 0x07f007f0;
and.b32 c, c, 0x07f007f0;
lop3.b32 b, a, 0x80008000, b, 0xea;
lop3.b32 c, $2, 0x80008000, c, 0xea;
mov.b32 a, 0x7b807b80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 b, b, a, d;
fma.rn.bf16x2 c, c, a, d;
fma.rn.bf16x2 c, c, $4, d;
fma.rn.bf16x2 $0, b, $3, d;
mov.b32 $1, c;
}""")
_LARGEST, _LEAST = tl.constexpr(row_codecs.LARGEST), tl.constexpr(row_codecs.LEAST)


def page_rows_of(packed: PackedPages | None, pool: Tensor, rank: int, rope_dim: int) -> int:
    """Returns the rows of a page of packed latents, as kernels take it; 0 if they are not packed. ``pool`` is ``[slots, ...]``."""
    if packed is None:
        return 0
    assert packed.shape == packed_latent(rank, rope_dim), (packed, rank, rope_dim)
    assert pool.is_contiguous() and pool.shape[-1] == packed.shape.row_bytes, (pool.shape, pool.stride(), packed)
    return packed.page_rows


@triton.jit
def _places_of(pool, slot, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where the numbers of rows begin, and where their scales do."""
    value_bytes: tl.constexpr = RANK + 2 * ROPE_DIM
    place = slot.to(tl.uint32)  # a pool has no more than 2**31 of them
    page, row = place // PAGE_ROWS, place % PAGE_ROWS
    first = pool + page.to(tl.int64) * (PAGE_ROWS * (value_bytes + _SCALE_BYTES))
    scales = (first + PAGE_ROWS * value_bytes + row * _SCALE_BYTES).to(tl.pointer_type(tl.float32), bitcast=True)
    return first + row * value_bytes, scales


@triton.jit
def load_latents(  # type: ignore[no-untyped-def]
    pool, slot, is_there,
    DTYPE: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr,
    HAS_INSTRUCTIONS: tl.constexpr
):  # fmt: skip
    """Returns the halves of the latents of slots ``[K]``, ``[K, RANK / 2]``, and rotated keys, ``[K, ROPE_DIM]``; zeros where there is none."""
    place, scale = _places_of(pool, slot, RANK, ROPE_DIM, PAGE_ROWS)
    tile: tl.constexpr = RANK // _SCALES
    mask, quarter = is_there[:, None], tl.arange(0, 2)[None, :]
    column = tl.arange(0, 2)[:, None] * tile + tl.arange(0, tile)[None, :]
    pairs = place.to(tl.pointer_type(tl.int16), bitcast=True)[:, None, None] + column[None, :, :]
    low = tl.load(scale[:, None] + quarter, mask=mask, other=0.0)
    high = tl.load(scale[:, None] + 2 + quarter, mask=mask, other=0.0)
    one, two = _widen(tl.load(pairs, mask=mask[:, :, None], other=0), low, high, DTYPE, HAS_INSTRUCTIONS)
    one, two = tl.reshape(one, [slot.shape[0], RANK // 2]), tl.reshape(two, [slot.shape[0], RANK // 2])
    turns = (place + RANK).to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + tl.arange(0, ROPE_DIM)[None, :]
    return one, two, tl.load(turns, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _widen(pairs, low, high, DTYPE: tl.constexpr, HAS_INSTRUCTIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers of the lower and of the upper bytes of int16 ``[K, 2, N]``, times scales ``[K, 2]``, each rounded once."""
    if HAS_INSTRUCTIONS:
        low = tl.broadcast_to(low.to(tl.bfloat16)[:, :, None], pairs.shape)
        high = tl.broadcast_to(high.to(tl.bfloat16)[:, :, None], pairs.shape)
        one, other = tl.inline_asm_elementwise(
            _SCALED, "=r,=r,r,r,r", [pairs, low, high], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        one = (widened((pairs & 255).to(tl.uint8)) * low[:, :, None]).to(DTYPE)
        other = (widened((pairs >> 8 & 255).to(tl.uint8)) * high[:, :, None]).to(DTYPE)
    return one, other


@triton.jit
def store_latent(latent, pool, slot, slot_stride, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a latent in a slot: as it is, or packed.

    Returns:
        It as it is read, of its type, and where the rotated key is stored.
    """
    column = tl.arange(0, latent.shape[0])
    if PAGE_ROWS == 0:
        stored = pool + slot * slot_stride
        tl.store(stored + column, latent, mask=column < RANK)
        stored += RANK
    else:
        place, scale = _places_of(pool, slot, RANK, ROPE_DIM, PAGE_ROWS)
        tile: tl.constexpr = RANK // _SCALES
        value = tl.reshape(rounded(latent).to(tl.float32, bitcast=True), [_SCALES, tile])
        # Of what is not finite no number is read: its scale is infinite.
        largest = tl.max(tl.where(value != value, float("inf"), tl.abs(value)), 1)
        # Up to a number of bfloat16, whose products with numbers are then rounded once, in any kernel.
        factor = (tl.maximum(largest, _LEAST) * (1 / _LARGEST)).to(tl.int32, bitcast=True)
        factor = ((factor + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        small = to_e4m3(tl.div_rn(value, tl.broadcast_to(factor[:, None], [_SCALES, tile])))
        pairs = tl.permute(tl.reshape(small, [2, RANK // 2]), (1, 0))
        tl.store(place + column, tl.reshape(pairs, [RANK]))
        tl.store(scale + tl.arange(0, _SCALES), factor)
        latent = tl.reshape(widened(small) * factor[:, None], [RANK]).to(latent.dtype)
        stored = (place + RANK).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    return latent, stored


@triton.jit
def store_turned(turned, stored, mask, PAGE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores elements of a rotated key, of packed rows in bfloat16. Returns them as they are read, of their type."""
    if PAGE_ROWS:
        turned = rounded(turned).to(tl.float32, bitcast=True).to(turned.dtype)
    tl.store(stored, turned.to(stored.dtype.element_ty), mask=mask)
    return turned
