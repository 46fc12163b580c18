"""Norms with a gate, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
