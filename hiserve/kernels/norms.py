"""Norms, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.kernels.quantized import QuantizedWeight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension of ``[..., n]``; 16-bit inputs are reduced in float32.

    ``weight`` broadcasts to ``x`` and has its dtype, or float32, which then is the type of the product; ``eps`` is added
    to the mean square.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``residual`` in place, both ``[T, n]``, and returns the norm of the sum."""
    return rms_norm(residual.add_(delta), weight, eps)


def norm_inputs(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, reader: QuantizedWeight | None) -> Tensor:
    """Norms ``x``, with a delta as ``add_rms_norm`` does, whatever weight reads it."""
    return rms_norm(x, weight, eps) if delta is None else add_rms_norm(delta, x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to a root mean square of 1, then by a weight and by the SiLU of a gate.

    Sums and products are float32 at least; the weighted norm is rounded to the type of ``x`` in between, as checkpoints were
    trained.

    Args:
        x: ``[T, H, n]``.
        gate: Likewise, any strides.
        weight: ``[n]``.
        eps: Added to the mean square.

    Returns:
        ``[T, H, n]``, the type of ``x``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)
