"""Dense projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A projection without bias; several projections of one input are one matrix.

    Attributes:
        weight: ``[out_features, in_features]``.
    """

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Projects ``[..., in_features]``."""
        return F.linear(x, self.weight)
