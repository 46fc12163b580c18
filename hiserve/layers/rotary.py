"""Rotary position embedding: its angles, once a step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.kernels.reference import rope


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of one step's positions.

    Attributes:
        cos: ``[T, 1, head_dim]``.
        sin: ``[T, 1, head_dim]``, the first half negated.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates ``[T, heads, head_dim]``."""
        return rope(x, self.cos, self.sin)


class Rotary:
    """Angles ``position * frequency`` (Su et al., RoFormer, 2021).

    Angles are float32 products whatever the model's dtype: checkpoints were trained with them, and at
    position 8,000 float64 angles would differ in the fourth digit.

    Args:
        frequencies: float32 ``[head_dim / 2]``, where positions will lie.
        dtype: The model's; rotation happens in float32, or in float64 for a float64 model.
        attention_factor: Cosines and sines are multiplied by it.
    """

    def __init__(self, frequencies: Tensor, dtype: torch.dtype, attention_factor: float = 1.0) -> None:
        self._frequencies = frequencies
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._attention_factor = attention_factor

    def __call__(self, positions: Tensor) -> Rotation:
        """Returns the rotation of int64 positions ``[T]``."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos.mul_(self._attention_factor), sin.mul_(self._attention_factor)
        cos, sin = cos.to(self._dtype), sin.to(self._dtype)
        return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))
