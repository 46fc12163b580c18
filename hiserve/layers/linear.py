"""Dense projections."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from hiserve.kernels.cpu import can_pack, pack, packed_linear


class Linear:
    """A projection without bias; several projections of one input are one matrix.

    Args:
        weight: ``[out_features, in_features]``. Copied where packing makes products faster.
    """

    def __init__(self, weight: Tensor) -> None:
        is_packed = can_pack(weight)
        self._weight = pack(weight) if is_packed else weight
        self._project: Callable[[Tensor, Tensor], Tensor] = packed_linear if is_packed else F.linear

    def __call__(self, x: Tensor) -> Tensor:
        """Projects ``[T, in_features]``."""
        return self._project(x, self._weight)
