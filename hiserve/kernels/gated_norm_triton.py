"""Norms with a gate in one launch of Triton; ``kernels.norms`` is the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next

_BLOCK_HEADS = 4
_ELEMENTS_PER_WARP = 512


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like ``norms.gated_rms_norm``, for a contiguous ``x``; the elements of a head of ``gate`` lie together."""
    assert x.is_contiguous() and gate.stride(2) == 1 == weight.stride(0), f"elements {gate.stride()} apart"
    assert weight.dtype == x.dtype, f"a weight of {weight.dtype}, heads of {x.dtype}"
    num_tokens, num_heads, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    heads = min(_BLOCK_HEADS, triton.next_power_of_2(num_heads))
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x, gate, weight, out, eps, gate.stride(0), gate.stride(1),
        NUM_HEADS=num_heads, SIZE=size, BLOCK_HEADS=heads, BLOCK=block, IS_WIDE=x.dtype == torch.float64,
        num_warps=max(1, heads * block // _ELEMENTS_PER_WARP), **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["eps"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, out, eps, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    IS_WIDE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program norms some heads of one token."""
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    dtype: tl.constexpr = x.dtype.element_ty
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    place = (token * NUM_HEADS + head) * SIZE + column
    mask = (head < NUM_HEADS) & (column < SIZE)
    start_next(IS_EARLY)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(wide)
    await_previous(IS_EARLY)
    value = tl.load(x + place, mask=mask, other=0.0).to(wide)
    factor = tl.load(gate + token * token_stride + head * head_stride + column, mask=mask, other=0.0).to(wide)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    normed = ((value * scale).to(dtype).to(wide) * weights).to(dtype).to(wide)
    tl.store(out + place, (normed * (factor / (1.0 + tl.exp(-factor)))).to(dtype), mask=mask)
