"""RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.kernels.reference import rms_norm


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Scales the last dimension to a root mean square of 1, then by a weight.

    Attributes:
        weight: ``[n]``, or anything that broadcasts to the input.
        eps: Added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Norms ``[..., n]``."""
        return rms_norm(x, self.weight, self.eps)
