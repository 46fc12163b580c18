"""The operations of the layers, and the module that implements them on each device."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.packed_weights import Weights
from hiserve.kernels.parts import Summand
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.routing import ExpertGroups
from hiserve.kernels.terms import Inputs

# Imported by name: triton, which CUDA kernels need, is not installed everywhere. The second module of a device has those operations
# that are others if bits may not depend on the batch.
_MODULES = {
    "cpu": ("hiserve.kernels.reference", "hiserve.kernels.exact_reference"),
    "cuda": ("hiserve.kernels.fused", "hiserve.kernels.exact"),
}


class Ops(Protocol):
    """The operations of a decoder; ``kernels.reference`` documents each.

    None waits for the device, and shapes depend on shapes alone: a CUDA graph can record them all. Weights may be read
    while the previous kernel still runs, because no step computes them.

    Attributes:
        is_exact: The bits of a row do not depend on the other rows of a call, nor on their number.
    """

    is_exact: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norms the last dimension of ``[T, n]``."""

    def add_rms_norm(self, delta: Summand, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds ``delta`` to ``residual`` in place and returns the norm of the sum."""

    def norm_inputs(
        self, x: Tensor, delta: Summand | None, weight: Tensor, eps: float, reader: QuantizedWeight | None
    ) -> Inputs:
        """Norms as ``rms_norm``, with a delta as ``add_rms_norm``; in two terms if a quantized reader takes them."""

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

    def store_latents(
        self,
        q: Tensor,
        row: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        slots: Tensor,
        packed: PackedPages | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotates the queries of latent attention, norms and rotates rows, and writes these into their slots."""

    def store_index_keys(
        self,
        key: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
        slots: Tensor,
        packed: PackedPages | None = None,
    ) -> None:
        """Norms the keys of an index, rotates their first elements, and writes them into their slots."""

    def rotate_first(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first elements of each head; ``x`` may be overwritten."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool) -> Tensor:
        """Projects ``[T, n]`` to the weight's type. After an attention a device may launch it without overlap, which the attention needs."""

    def linear_parts(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool) -> Summand:
        """As ``linear``, for a norm that adds it to its residual stream: parts of the depth may be left to it."""

    def quantized_linear(
        self, x: Inputs, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool
    ) -> Tensor:
        """Projects ``[T, n]`` by a weight in 8 or 4 bits; otherwise as ``linear``."""

    def quantized_parts(
        self, x: Inputs, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool
    ) -> Summand:
        """As ``quantized_linear``; otherwise as ``linear_parts``."""

    def act_mul(self, gate_up: Tensor, activation: Activation = SILU) -> Tensor:
        """Returns the activation of gate and up."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns ``x`` times the sigmoid of a gate."""

    def act_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """Returns ``act_mul`` of ``linear``, in one launch for few rows."""

    def act_inputs(self, gate_up: Tensor, activation: Activation, reader: QuantizedWeight | None) -> Inputs:
        """Returns ``act_mul``; in two terms if a quantized reader takes them."""

    def route(
        self, logits: Tensor, num_per_token: int, is_normalized: bool, gated: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns shares and numbers of the likeliest experts; of a gated shared one the share alone."""

    def route_in_groups(
        self, logits: Tensor, groups: ExpertGroups, num_per_token: int, is_normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns shares and numbers of the best experts of the best groups."""

    def mix_experts(
        self,
        x: Tensor,
        shares: Tensor,
        chosen: Tensor,
        gate_up: Weights,
        down: Weights,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation = SILU,
        shared: tuple[Weights, Weights] | None = None,
    ) -> Tensor:
        """Returns each token's sum of its chosen experts' outputs, weighted by shares, and of a shared one."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norms the last dimension, and multiplies it by the SiLU of a gate."""

    def delta(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: DeltaWeights,
        pools: DeltaPools,
        inputs: ForwardInputs,
        shape: DeltaShape,
    ) -> Tensor:
        """Advances the recurrent states of the rows by the gated delta rule, and reads them for each token."""


def ops_for(device: torch.device, *, is_exact: bool = False) -> Ops:
    """Returns the operations of a device: the fastest, or those whose bits do not depend on the batch."""
    fastest, exact = _MODULES[device.type]
    ops = importlib.import_module(fastest)
    return cast(Ops, SimpleNamespace(**vars(ops) | vars(importlib.import_module(exact))) if is_exact else ops)
