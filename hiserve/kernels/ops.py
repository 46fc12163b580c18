"""What layers ask of a device, and the module that does it there."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.core.forward import LayerKV

# Found by name: triton, which a device's kernels need, is not installed everywhere.
_MODULES = {"cpu": "hiserve.kernels.reference", "cuda": "hiserve.kernels.fused"}


class Ops(Protocol):
    """The operations of a decoder. ``kernels.reference`` says what each of them computes.

    None waits for the device, and shapes depend on shapes alone: a CUDA graph can record them all. Weights may be read
    while the kernel before still runs: nothing that a step computes is one.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norms the last dimension of ``[T, n]``."""

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds ``delta`` to ``residual`` in place and returns its norm."""

    def rotations(
        self, positions: Tensor, frequencies: Tensor, attention_factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of positions."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        qk_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms and rotates queries and keys, and writes keys and values into their slots."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_behind_attention: bool) -> Tensor:
        """Projects ``[T, n]``; told whether that comes from an attention, beside which a device may not want to begin."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns ``silu(gate) * up``."""

    def route(self, logits: Tensor, num_per_token: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
        """Returns shares and numbers of the likeliest experts."""

    def mix_experts(self, x: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Adds up what the chosen experts make of each token."""


def ops_for(device: torch.device) -> Ops:
    """Returns the operations of a device."""
    return cast(Ops, importlib.import_module(_MODULES[device.type]))
