"""Building blocks of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.activation import SILU, Activation
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.distributed.exchange import Exchange
from hiserve.kernels.ops import Ops
from hiserve.kernels.packed_weights import Weights
from hiserve.kernels.parts import Summand
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.routing import ExpertGroups
from hiserve.kernels.terms import Inputs


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Looks up one vector per token in ``weight``, ``[vocab_size, hidden_size]``, and multiplies it by ``scale``.

    The output head may share ``weight``, which is therefore not scaled itself. A rank of a group has the rows of its tokens,
    from ``first`` on: tokens of others are 0 there, so that the sum of all ranks is exact.
    """

    weight: Tensor
    scale: Tensor | None = None  # ``[]``, of the weight's dtype; None is 1
    exchange: Exchange | None = None  # None has all tokens
    first: int = 0

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Returns ``[T, hidden_size]`` for int32 ``[T]``."""
        found = F.embedding(input_ids, self.weight) if self.exchange is None else self._of_all(self.exchange, input_ids)
        return found if self.scale is None else found.mul_(self.scale)

    def _of_all(self, exchange: Exchange, input_ids: Tensor) -> Tensor:
        rows, count = input_ids - self.first, self.weight.shape[0]
        found = F.embedding(rows.clamp(0, count - 1), self.weight)
        return exchange.sum(found.masked_fill_(((rows < 0) | (rows >= count))[:, None], 0))


class Linear:
    """A projection; several projections of one input are one matrix.

    On a CPU float32 weights are packed once: torch's own product is slow for small batches. With the embedded model's
    layers on one core of an AMD EPYC, 1 row took 1.1 ms, packed 0.85 ms; 8 rows 2.3 ms, packed 1.2 ms; 512 rows 56 ms,
    packed 24 ms. 64-bit and 16-bit products are not faster packed.

    Args:
        weight: ``[out_features, in_features]``. Copied where packing makes products faster.
        ops: Of its device. Those that are exact take weights that are not packed.
        bias: ``[out_features]``, or None.
        is_after_attention: The input is an attention's output.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        ops: Ops,
        bias: Tensor | None = None,
        *,
        is_after_attention: bool = False,
    ) -> None:
        self._weight, self._bias, self._ops = weight, bias, ops
        self._is_plain = False
        self._project: Callable[[Any, Any, Tensor | None], Tensor]
        self._project_parts: Callable[[Any, Any, Tensor | None], Summand]
        if isinstance(weight, QuantizedWeight):
            self._project = partial(ops.quantized_linear, is_after_attention=is_after_attention)
            self._project_parts = partial(ops.quantized_parts, is_after_attention=is_after_attention)
        elif can_pack(weight) and not ops.is_exact:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._project = self._project_parts = _packed_linear
        else:
            self._is_plain = True
            self._project = partial(ops.linear, is_after_attention=is_after_attention)
            self._project_parts = partial(ops.linear_parts, is_after_attention=is_after_attention)

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The weight, if it is quantized."""
        return self._weight if isinstance(self._weight, QuantizedWeight) else None

    def __call__(self, x: Inputs) -> Tensor:
        """Projects ``[T, in_features]``, of the weight's type or a narrower one, to the weight's type.

        Inputs of a quantized weight may have any floating type, which the product has too, or come in two terms.
        """
        return self._project(x, self._weight, self._bias)

    def parts(self, x: Inputs) -> Summand:
        """Projects for a norm that adds the result to its residual stream."""
        return self._project_parts(x, self._weight, self._bias)

    def activated(self, x: Inputs, activation: Activation, reader: QuantizedWeight | None) -> Inputs:
        """Projects to gates, then ups, and returns their activation for the weight that reads it, if that is quantized."""
        if self._is_plain and reader is None:
            assert isinstance(self._weight, Tensor) and isinstance(x, Tensor), "terms are inputs of quantized weights"
            return self._ops.act_linear(x, self._weight, self._bias, activation)
        return self._ops.act_inputs(self(x), activation, reader)


def can_pack(weight: Tensor) -> bool:
    """Whether products with a weight are faster packed, and this build of torch can pack it."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and weight.device.type == "cpu" and weight.dtype == torch.float32


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The operator that torch's own compiler emits for CPUs (oneDNN), as is the one that packs."""
    x = x if x.dtype == torch.float32 else x.float()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Scales the last dimension to a root mean square of 1, then by a weight.

    Attributes:
        weight: ``[n]``, of the type of the states, or float32 to round only the product.
        eps: Added to the mean square.
        exchange: Of a rank that computes a part of each ``delta`` and output; None computes them whole.
        reader: The weight of the only projection that reads ``inputs``, if it is quantized.
    """

    weight: Tensor
    eps: float
    ops: Ops
    exchange: Exchange | None = None
    reader: QuantizedWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Norms ``[T, n]``."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def output(self, x: Tensor) -> Tensor:
        """Norms the output of a block, ``[T, n]``, of which a rank computes a part; it may be overwritten."""
        return self(x if self.exchange is None else self.exchange.sum(x))

    def add(self, delta: Summand, residual: Tensor) -> Tensor:
        """Adds ``delta`` to ``residual`` in place, both ``[T, n]``, and norms the sum."""
        if self.exchange is not None:
            assert isinstance(delta, Tensor), "parts are added up before ranks are"
            return self.exchange.reduce_add_norm(delta, residual, self.weight, self.eps)
        return self.ops.add_rms_norm(delta, residual, self.weight, self.eps)

    def inputs(self, x: Tensor, delta: Summand | None = None) -> Inputs:
        """Norms ``[T, n]``, with a delta as ``add`` to it, for the reader, which may take two terms."""
        if delta is not None and self.exchange is not None:
            return self.add(delta, x)
        return self.ops.norm_inputs(x, delta, self.weight, self.eps, self.reader)


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


@dataclass(frozen=True, slots=True, eq=False)
class SelfAttention:
    """Grouped-query self-attention over the paged pool.

    Attributes:
        layer: Index of the layer.
        qkv: Rows of all query heads, then key heads, then value heads.
        out: ``[hidden_size, num_heads * head_dim]``.
        qk_weight: ``[num_heads + num_kv_heads, head_dim]``, of the norm of each query and key head before the
            rotation; None without one.
        eps: Of that norm.
        has_window: Whether tokens see a window of positions only.
    """

    layer: int
    qkv: Linear
    out: Linear
    qk_weight: Tensor | None
    eps: float
    head_dim: int
    ops: Ops
    has_window: bool = False

    def __call__(
        self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Stores the step's keys and values and attends. Returns ``[T, num_heads * head_dim]``, before ``out``."""
        q, k, v = self.store(x, inputs, rotation, kv)
        return attention.forward(q, k, v, kv, self.layer).flatten(1)

    def store(self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
        """Stores keys and values, and returns queries, keys and values, each ``[T, heads, head_dim]``."""
        projected = self.qkv(x)
        return self.store_heads(projected.view(projected.shape[0], -1, self.head_dim), inputs, rotation, kv)

    def store_heads(
        self, qkv: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``store``, of ``[T, heads, head_dim]`` before norm and rotation, which may be overwritten."""
        slots = inputs.slots
        if self.has_window and inputs.window_slots is not None:
            slots = inputs.window_slots
        return self.ops.rotate_and_store(qkv, self.qk_weight, self.eps, rotation.cos, rotation.sin, kv, slots)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """``down(activation(gate(x), up(x)))``.

    Attributes:
        gate_up: Gate rows, then up rows: ``[2 * intermediate_size, hidden_size]``.
        down: ``[hidden_size, intermediate_size]``.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = SILU

    def __call__(self, x: Inputs) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape."""
        return self.down(self.gate_up.activated(x, self.activation, self.down.quantized))

    def parts(self, x: Inputs) -> Summand:
        """As a call, for a norm that adds the result to its residual stream."""
        return self.down.parts(self.gate_up.activated(x, self.activation, self.down.quantized))


# Maps x ``[T, hidden_size]``, shares ``[T, k]`` and their experts, int64 ``[T, k]``, to ``[T, hidden_size]``. One more share is that
# of a shared expert, which they may have.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class MoE:
    """Adds the outputs of the experts that a router chooses for each token, weighted by shares.

    Attributes:
        router: ``[num_experts, hidden_size]``.
        num_per_token: Experts that compute a token.
        is_normalized: The shares of a token are scaled to sum to 1.
        groups: For a choice among groups; None is the likeliest experts. Its router computes in its own type.
        shared: Computes every token beside them; None without, or if ``experts`` has it.
        shared_gate: ``[hidden_size]``. Its output is multiplied by the sigmoid of this gate; None without. Not with groups.
    """

    router: Linear
    experts: Experts
    num_per_token: int
    is_normalized: bool
    ops: Ops
    groups: ExpertGroups | None = None
    shared: GatedMLP | None = None
    shared_gate: Tensor | None = None

    def __call__(self, x: Inputs) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape."""
        assert isinstance(x, Tensor), "inputs of several projections are not split"
        logits = self.router(x)
        if self.groups is None:
            gated = None if self.shared_gate is None else (x, self.shared_gate)
            shares, chosen = self.ops.route(logits, self.num_per_token, self.is_normalized, gated)
        else:
            shares, chosen = self.ops.route_in_groups(logits, self.groups, self.num_per_token, self.is_normalized)
        mixed = self.experts(x, shares, chosen)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        return mixed + (shared if self.shared_gate is None else shared * shares[:, self.num_per_token :].to(x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """All experts at once: fixed shapes, no wait for the device.

    Attributes:
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``.
        down: ``[num_experts, hidden_size, intermediate_size]``.
        gate_up_bias: ``[num_experts, 2 * intermediate_size]``, or None.
        down_bias: ``[num_experts, hidden_size]``, or None.
        shared: ``[2 * intermediate_size, hidden_size]`` and ``[hidden_size, intermediate_size]`` of an expert that
            computes every token; None without.
    """

    gate_up: Weights
    down: Weights
    ops: Ops
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = SILU
    shared: tuple[Weights, Weights] | None = None

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        biases = self.gate_up_bias, self.down_bias
        return self.ops.mix_experts(x, shares, chosen, self.gate_up, self.down, *biases, self.activation, self.shared)


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
        weights = torch.split_with_sizes(shares[:, : chosen.shape[1]].flatten()[order, None], counts)
        out = torch.zeros(x.shape, dtype=shares.dtype)
        for expert, count in enumerate(counts):
            if count:
                mine = self.mlps[expert](x[rows[expert]])
                out.index_add_(0, rows[expert], mine * weights[expert])
        return out.to(x.dtype)
