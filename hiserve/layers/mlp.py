"""The gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.kernels.ops import Ops
from hiserve.layers.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))``.

    Attributes:
        gate_up: Gate rows, then up rows: ``[2 * intermediate_size, hidden_size]``.
        down: ``[hidden_size, intermediate_size]``.
    """

    gate_up: Linear
    down: Linear
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape."""
        return self.down(self.ops.silu_mul(self.gate_up(x)))
