"""Rotation of adjacent pairs, the norms before it, and its angles, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.reference import rms_norm
from hiserve.kernels.row_codecs import store_packed


@dataclass(frozen=True, slots=True, eq=False)
class PairFrequencies:
    """What K kinds of layers are rotated by: token p by the angles of position ``p // ratio * ratio``.

    Attributes:
        frequencies: float32 ``[K, m]``.
        factors: float32 ``[K]``, of cosines and sines.
        ratios: int64 ``[K]``.
    """

    frequencies: Tensor
    factors: Tensor
    ratios: Tensor


def pair_angles(positions: Tensor, kinds: PairFrequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of int64 positions ``[T]``, each ``[K, T, m]``.

    Angles are float32 products for every type of the model, as in ``reference.rotations``.
    """
    ratios, factors = kinds.ratios[:, None], kinds.factors[:, None, None]
    angles = (positions // ratios * ratios).to(torch.float32)[..., None] * kinds.frequencies[:, None]
    return (angles.cos() * factors).to(dtype), (angles.sin() * factors).to(dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, is_back: bool = False) -> Tensor:
    """Rotates the last elements of each head, every one paired with its neighbour.

    Args:
        x: ``[T, heads, n]``.
        cos: ``[T, m]``, float32 or wider, ``2 * m`` at most ``n``.
        sin: Like ``cos``.
        is_back: Rotates by the negated angles.
    """
    plain, turned = x.split_with_sizes((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    even, odd = turned.to(cos.dtype).reshape(*turned.shape[:-1], cos.shape[-1], 2).unbind(-1)
    cos, sin = cos[:, None], (-sin if is_back else sin)[:, None]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((plain, pairs.flatten(-2).to(x.dtype)), -1)


def norm_plain(x: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to a root mean square of 1; 16-bit inputs are reduced in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def store_rows(
    heads: Tensor,
    row: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> Tensor:
    """Norms and rotates queries and rows, and writes rows into their slots.

    Args:
        heads: ``[T, heads, n]``, of queries, normed without weights; there may be no heads.
        row: ``[T, n]``, of the same type.
        norm: ``[n]``, weights of the rows' norm.
        eps: Of both norms.
        cos: As for ``rotate_pairs``.
        sin: Likewise.
        pool: ``[slots, n]``, or packed.
        slots: int64 ``[T]``.
        packed: How ``pool`` holds rows in 8 bits; None is as they are.

    Returns:
        The queries, ``[T, heads, n]``.
    """
    rows = rotate_pairs(rms_norm(row, norm, eps)[:, None], cos, sin)[:, 0]
    if packed is None:
        pool.index_copy_(0, slots, rows)
    else:
        store_packed(pool, slots, rows, packed)
    return rotate_pairs(norm_plain(heads, eps), cos, sin)
