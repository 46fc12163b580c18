"""Rotation of adjacent pairs, and a norm without weights, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last elements of each head, every one paired with its neighbour.

    Args:
        x: ``[T, heads, n]``.
        cos: ``[T, m]``, float32 or wider, ``2 * m`` at most ``n``.
        sin: Like ``cos``; negated, it turns back.
    """
    plain, turned = x.split_with_sizes((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    even, odd = turned.to(cos.dtype).reshape(*turned.shape[:-1], cos.shape[-1], 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((plain, pairs.flatten(-2).to(x.dtype)), -1)


def norm_plain(x: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to a root mean square of 1; 16-bit inputs are reduced in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_and_rotate(x: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norms each head, then rotates it: arguments as for the two."""
    return rotate_pairs(norm_plain(x, eps), cos, sin)
