"""A mixture of experts: each token is computed by a few of many gated MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.kernels.ops import Ops
from hiserve.layers.linear import Linear
from hiserve.layers.mlp import GatedMLP

# Maps x ``[T, hidden_size]``, shares ``[T, k]`` and their experts, int64 ``[T, k]``, to ``[T, hidden_size]``.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class MoE:
    """Adds the outputs of the experts that a router chooses for each token, weighted by shares.

    Attributes:
        router: ``[num_experts, hidden_size]``.
        num_per_token: Experts that compute a token.
        is_normalized: The shares of a token are scaled to sum to 1.
    """

    router: Linear
    experts: Experts
    num_per_token: int
    is_normalized: bool
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape."""
        return self.experts(x, *self.ops.route(self.router(x), self.num_per_token, self.is_normalized))


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """All experts at once: fixed shapes, no wait for the device.

    Attributes:
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``.
        down: ``[num_experts, hidden_size, intermediate_size]``.
    """

    gate_up: Tensor
    down: Tensor
    ops: Ops

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        return self.ops.mix_experts(x, shares, chosen, self.gate_up, self.down)


@dataclass(frozen=True, slots=True, eq=False)
class SparseExperts:
    """Every expert computes only its own tokens. For the CPU, where reading their number needs no synchronization."""

    mlps: Sequence[GatedMLP]

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Adds a token's outputs in the order of its experts, so that the sum does not depend on the batch."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(self.mlps)).tolist()
        rows = torch.split_with_sizes(order // chosen.shape[1], counts)
        weights = torch.split_with_sizes(shares.flatten()[order, None], counts)
        out = torch.zeros(x.shape, dtype=shares.dtype)
        for expert, count in enumerate(counts):
            if count:
                mine = self.mlps[expert](x[rows[expert]])
                out.index_add_(0, rows[expert], mine * weights[expert])
        return out.to(x.dtype)
