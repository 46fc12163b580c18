"""Packed weights of experts within kernels of Triton: upcast in registers; ``kernels.packed_weights`` is the twin."""

from __future__ import annotations

import triton
import triton.language as tl

from hiserve.core import packed_experts

BLOCK = tl.constexpr(packed_experts.BLOCK)
GROUP = tl.constexpr(packed_experts.GROUP)
WORDS = tl.constexpr(packed_experts.WORDS)
GROUPS = tl.constexpr(packed_experts.BLOCK // packed_experts.GROUP)

# Two products of 16 bits in one instruction, which the compiler does not find: each is added to -0.
_MULTIPLY_BF16 = tl.constexpr(
    "{ .reg .b32 p, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 p, $2, $3, z; mov.b32 {$0, $1}, p; }"
)
_MULTIPLY_F16 = tl.constexpr(
    "{ .reg .b32 p, z; mov.b32 z, 0x80008000; fma.rn.f16x2 p, $2, $3, z; mov.b32 {$0, $1}, p; }"
)


@triton.jit
def unpack_group(words, scales, NUMBER: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a group of a block of rows, ``[N, GROUP]``, in a type of 16 bits.

    Args:
        words: int32 ``[N, WORDS]``.
        scales: int32 ``[N]``.
        NUMBER: Of the group in its block.
        DTYPE: bfloat16 or float16.

    Sign, exponent and mantissa of a number become those of a 16-bit one, whose exponent has a larger bias; the scale's factor takes
    that back. The products are exact, subnormal numbers included, but for those that the type cannot hold.
    """
    IS_BF16: tl.constexpr = DTYPE.is_bf16()
    LOW: tl.constexpr = 6 if IS_BF16 else 9  # the mantissa's highest bit
    BITS: tl.constexpr = (7 << LOW) * 0x10001
    PLACE: tl.constexpr = 4 * NUMBER
    pairs = words << (12 - PLACE) & -0x7FFF8000
    if PLACE <= LOW:
        pairs |= words << (LOW - PLACE) & BITS
    else:
        pairs |= words >> (PLACE - LOW) & BITS
    exponent = ((scales >> (8 * NUMBER)) & 255)[:, None]
    if IS_BF16:
        factor = exponent * 0x800080 + 126 * 0x800080
        even, odd = tl.inline_asm_elementwise(
            _MULTIPLY_BF16, "=h,=h,r,r", [pairs, factor], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        half = (exponent + 14 << 23).to(tl.float32, bitcast=True).to(tl.float16)
        factor = half.to(tl.int16, bitcast=True).to(tl.int32)
        factor |= factor << 16
        even, odd = tl.inline_asm_elementwise(
            _MULTIPLY_F16, "=h,=h,r,r", [pairs, factor], (tl.float16, tl.float16), is_pure=True, pack=1
        )
    return tl.reshape(tl.join(even, odd), [words.shape[0], GROUP])


@triton.jit
def unpack_bytes(codes, scale, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns E4M3 numbers, uint8, times float32 scales, unless these are None, by way of float32: the shortest."""
    numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if scale is not None:
        numbers *= scale
    return numbers.to(DTYPE)
