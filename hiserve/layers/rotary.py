"""Rotary position embedding: the angles of a step, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.kernels.ops import Ops


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of one step's positions.

    Attributes:
        cos: ``[T, 1, head_dim]``.
        sin: ``[T, 1, head_dim]``, the first half negated.
    """

    cos: Tensor
    sin: Tensor


class Rotary:
    """Angles ``position * frequency`` (Su et al., RoFormer, 2021).

    They are computed in each step: one launch, where a table for 131,072 positions would take 128 MiB.

    Args:
        frequencies: float32 ``[head_dim / 2]``, on the device of the positions.
        dtype: The model's; rotation is float32, or float64 for a float64 model.
        ops: The device's operations.
        attention_factor: Factor of cosines and sines.
    """

    def __init__(self, frequencies: Tensor, dtype: torch.dtype, ops: Ops, attention_factor: float = 1.0) -> None:
        self._frequencies = frequencies
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._ops = ops
        self._attention_factor = attention_factor

    def __call__(self, positions: Tensor) -> Rotation:
        """Returns the rotation of int64 positions ``[T]``."""
        return Rotation(*self._ops.rotations(positions, self._frequencies, self._attention_factor, self._dtype))
