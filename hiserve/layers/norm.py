"""RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.kernels.ops import Ops


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Scales the last dimension to a root mean square of 1, then by a weight.

    Attributes:
        weight: ``[n]``.
        eps: Added to the mean square.
    """

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Norms ``[T, n]``."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Adds ``delta`` to ``residual`` in place, both ``[T, n]``, and norms the sum."""
        return self.ops.add_rms_norm(delta, residual, self.weight, self.eps)
