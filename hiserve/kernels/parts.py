"""Products whose depth is multiplied in parts, before the parts are added up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """A projection ``[T, n]``: the sum of its parts in their order, and of the bias, rounded to a type.

    Attributes:
        values: float32 ``[num_parts, T, n]``, contiguous.
        bias: ``[n]``, or None.
        dtype: Of the projection.
    """

    values: Tensor
    bias: Tensor | None
    dtype: torch.dtype


Summand = Tensor | Parts
"""What a norm adds to its residual stream."""


def pieces(delta: Summand | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Returns the values of a delta, its bias, and its number of parts, for a kernel."""
    if isinstance(delta, Parts):
        return delta.values, delta.bias, delta.values.shape[0]
    return delta, None, 1
