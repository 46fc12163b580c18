"""Rotation of adjacent pairs, and a norm without weights, in Triton; ``kernels.pairs`` is the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import pairs
from hiserve.kernels.launch import await_previous, early_launch, start_next

_ELEMENTS = 4096  # of a program


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like ``pairs.rotate_pairs``; float64, and heads whose elements are no power of 2, use the twin."""
    return _turn(x, cos, sin, None) if _fits(x) else pairs.rotate_pairs(x, cos, sin)


def norm_plain(x: Tensor, eps: float) -> Tensor:
    """Like ``pairs.norm_plain``, for ``[T, heads, n]``; as ``rotate_pairs``."""
    return _turn(x, None, None, eps) if _fits(x) and x.ndim == 3 else pairs.norm_plain(x, eps)


def norm_and_rotate(x: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Like ``pairs.norm_and_rotate``; as ``rotate_pairs``."""
    return _turn(x, cos, sin, eps) if _fits(x) else pairs.norm_and_rotate(x, eps, cos, sin)


def _fits(x: Tensor) -> bool:
    return x.dtype != torch.float64 and not x.shape[-1] & (x.shape[-1] - 1)


def _turn(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float | None) -> Tensor:
    num_tokens, num_heads, width = x.shape
    assert x.stride(2) == 1, x.stride()
    assert cos is None or (cos.stride(1) == 1 and sin is not None and sin.stride() == cos.stride()), "turns lie apart"
    out = torch.empty((num_tokens, num_heads, width), dtype=x.dtype, device=x.device)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _ELEMENTS // width))
    _turn_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        x,
        cos,
        sin,
        out,
        eps or 0.0,
        x.stride(0),
        x.stride(1),
        0 if cos is None else cos.stride(0),
        num_heads,
        WIDTH=width,
        PAIRS=0 if cos is None else cos.shape[1],
        BLOCK_HEADS=block_heads,
        IS_NORMED=eps is not None,
        num_warps=max(1, min(8, block_heads * width // 512)),
        **early_launch(x.device),
    )
    return out


@triton.jit(
    do_not_specialize=["eps", "token_stride", "head_stride", "turn_stride", "num_heads"],
    do_not_specialize_on_alignment=["x"],
)  # type: ignore[untyped-decorator]
def _turn_kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    eps,
    token_stride,
    head_stride,
    turn_stride,
    num_heads,
    WIDTH: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    BLOCK_HEADS: tl.constexpr,  # noqa: N803
    IS_NORMED: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program norms and turns some heads of a token; the norm is rounded to the type of heads."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, WIDTH)
    mask = (head < num_heads)[:, None]
    source = x + token * token_stride + head[:, None] * head_stride + column[None, :]
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if IS_NORMED:
        value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if PAIRS > 0:
        even, odd = tl.split(tl.reshape(value, [BLOCK_HEADS, WIDTH // 2, 2]))
        pair = tl.arange(0, WIDTH // 2) - (WIDTH // 2 - PAIRS)
        cosine = tl.load(cos + token * turn_stride + pair, mask=pair >= 0, other=1.0)[None, :]
        sine = tl.load(sin + token * turn_stride + pair, mask=pair >= 0, other=0.0)[None, :]
        turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
        value = tl.reshape(turned, [BLOCK_HEADS, WIDTH])
    target = out + (token * num_heads + head[:, None]) * WIDTH + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)
