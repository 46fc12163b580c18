"""The keys of an index beside latents, and the rotation of its queries, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.row_codecs import store_packed


def store_index_keys(
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> None:
    """Norms keys, less their mean, rotates their first elements, and writes them into their slots.

    Args:
        key: ``[T, n]``.
        weight: ``[n]``, of the norm.
        bias: Likewise.
        eps: Added to the variance.
        cos: From ``reference.rotations``, ``[T, 1, m]``, ``m`` at most ``n``.
        sin: Likewise.
        pool: ``[num_slots, n]``, or packed.
        slots: int64 ``[T]``.
        packed: How ``pool`` holds keys in 8 bits; None is as they are.
    """
    normed = F.layer_norm(key, weight.shape, weight, bias, eps)
    keys = rotate_first(normed[:, None], cos, sin)[:, 0]
    if packed is None:
        pool.index_copy_(0, slots, keys)
    else:
        store_packed(pool, slots, keys, packed)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first elements of each head ``[T, heads, n]``, as ``reference.rope`` does all. ``x`` may be overwritten."""
    size = cos.shape[2]
    turned, plain = x.split_with_sizes((size, x.shape[2] - size), -1)
    wide = turned.to(cos.dtype)
    rotated = (wide * cos).addcmul_(wide.roll(size // 2, -1), sin).to(x.dtype)
    return torch.cat((rotated, plain), -1)
