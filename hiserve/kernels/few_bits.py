"""Numbers of 8 and 4 bits in registers, as numbers of 16 bits; exact.

For bfloat16 on a GPU both are written in its instructions, for several codes at a time. Compilers convert E4M3 by way of float16,
whose conversion to bfloat16 has an eighth of the rate of other instructions, and treat each 4-bit code alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Sign and seven bits of E4M3 as the last ones of the exponent and the first of the mantissa of bfloat16, whose exponents
# count from another number: a product with 2**120 corrects that, subnormal numbers included.
_E4M3 = tl.constexpr("""{
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
fma.rn.bf16x2 $0, b, a, d;
fma.rn.bf16x2 $1, c, a, d;
}""")
# To float16 there is an instruction, for two adjacent bytes.
_E4M3_HALF = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 c, d, e;
prmt.b32 a, $2, 0, 0x0020;
prmt.b32 b, $2, 0, 0x0031;
mov.b32 {c, e}, a;
mov.b32 {d, e}, b;
cvt.rn.f16x2.e4m3x2 $0, c;
cvt.rn.f16x2.e4m3x2 $1, d;
}""")
# Four bits as the last ones of 128 in bfloat16; then, of codes without zero points of their own, less 128 and 8.
_QUARTERS = """{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
"""
_LESS = "mov.b32 a, 0x3f803f80;\nmov.b32 b, 0xc308c308;\n" + "".join(
    f"fma.rn.bf16x2 ${each}, ${each}, a, b;\n" for each in range(4)
)
_RAISED, _CENTERED = tl.constexpr(_QUARTERS + "}"), tl.constexpr(_QUARTERS + _LESS + "}")
# The bits of a 16-bit number whose last four are the units: 2**10 and 2**7.
_MAGIC = {torch.float16: 0x6400, torch.bfloat16: 0x4300}


def magic_of(dtype: torch.dtype) -> int:
    """Returns the bits that make a number of a 16-bit type of a 4-bit code; see ``widen_quarters``."""
    return _MAGIC[dtype]


def has_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels for numbers of this type run as instructions of a GPU, and these are written for it."""
    return device.type == "cuda" and dtype == torch.bfloat16


@triton.jit
def widen_e4m3(pairs, DTYPE: tl.constexpr, HAS_INSTRUCTIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers that the lower and the upper bytes of int16 are in E4M3, none of them NaN, in a 16-bit type."""
    if HAS_INSTRUCTIONS:
        if DTYPE == tl.bfloat16:  # noqa: SIM300 - Triton compares the constant
            return tl.inline_asm_elementwise(
                _E4M3, "=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:  # noqa: RET505 - Triton compiles what follows a return too
            return tl.inline_asm_elementwise(
                _E4M3_HALF, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
            )
    low, high = (pairs & 255).to(tl.uint8), (pairs >> 8 & 255).to(tl.uint8)
    return low.to(tl.float8e4nv, bitcast=True).to(DTYPE), high.to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def place_of(column):  # type: ignore[no-untyped-def]
    """Returns the byte of a column of a weight in 8 bits, whose halves of 128 columns are interleaved."""
    return column // 128 * 128 + column % 64 * 2 + column // 64 % 2


@triton.jit
def column_at(place):  # type: ignore[no-untyped-def]
    """Returns the column of a byte, as ``place_of`` places it."""
    return place // 128 * 128 + place % 2 * 64 + place // 2 % 64


@triton.jit
def widen_quarters(  # type: ignore[no-untyped-def]
    packed,
    DTYPE: tl.constexpr, MAGIC: tl.constexpr, IS_CENTERED: tl.constexpr, HAS_INSTRUCTIONS: tl.constexpr
):  # fmt: skip
    """Returns the four codes of int16, from the lowest bits on: less 8, or plus the number whose bits are ``MAGIC``."""
    if HAS_INSTRUCTIONS:
        text: tl.constexpr = _CENTERED if IS_CENTERED else _RAISED
        return tl.inline_asm_elementwise(
            text,
            "=r,=r,=r,=r,r",
            [packed],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    middle = widen_code(tl.full([1, 1], 8, tl.uint16), DTYPE, MAGIC) * IS_CENTERED
    return (
        widen_code(packed & 15, DTYPE, MAGIC) - middle,
        widen_code(packed >> 4 & 15, DTYPE, MAGIC) - middle,
        widen_code(packed >> 8 & 15, DTYPE, MAGIC) - middle,
        widen_code(packed >> 12 & 15, DTYPE, MAGIC) - middle,
    )


@triton.jit
def widen_code(code, DTYPE: tl.constexpr, MAGIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns numbers of 0 to 16 plus the number whose bits are ``MAGIC``."""
    return (code.to(tl.uint16) + MAGIC).to(tl.uint16).to(DTYPE, bitcast=True)
