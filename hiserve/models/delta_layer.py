"""A decoder layer's gated delta rule (arXiv:2412.06464), made of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, GroupedKV, LayerKV
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.ops import Ops
from hiserve.kernels.terms import Inputs
from hiserve.layers import Linear, Rotation
from hiserve.models.delta_config import INPUTS, STATE, DeltaConfig


@dataclass(frozen=True, slots=True, eq=False)
class DeltaLayer:
    """Mixes tokens by a state of each row, in place of attention.

    Attributes:
        into: From the layer's input: queries, keys and values of all heads, gates of writes, gates of decay, gates of outputs.
        weights: Of the convolution and the decay.
        gain: ``[value_dim]``, of the norm of each head's output.
        eps: Of that norm.
        out: ``[hidden_size, num_value_heads * value_dim]``.
        config: Its shape.
        ops: Of its device.
    """

    into: Linear
    weights: DeltaWeights
    gain: Tensor
    eps: float
    out: Linear
    config: DeltaConfig
    ops: Ops

    def __call__(
        self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Advances the rows' states. Returns ``[T, num_value_heads * value_dim]``, before ``out``."""
        config = self.config
        assert isinstance(kv, GroupedKV), "a layer with states but no memory for them"
        pools = DeltaPools(
            ring=kv.beside[INPUTS], state=kv.k, snap_ring=kv.snapshots[INPUTS], snap_state=kv.snapshots[STATE]
        )
        shape = DeltaShape(config.num_key_heads, config.num_value_heads, config.key_dim, config.value_dim)
        parts = (config.num_channels, 2 * config.num_value_heads, config.value_size)
        mixed, gates, z = self.into(x).split_with_sizes(parts, -1)
        read = self.ops.delta(mixed, gates, self.weights, pools, inputs, shape)
        return self.ops.gated_rms_norm(read, z.view(read.shape), self.gain, self.eps).flatten(1)


def make_delta_layer(
    config: DeltaConfig, parameters: dict[str, Tensor], layer: int, eps: float, ops: Ops
) -> DeltaLayer:
    """Removes the parameters of one layer, counted from 0, from a decoder's, and makes its gated delta rule."""
    ours = f"layers.{layer}."
    into = _ordered(config, parameters, ours) if config.is_interleaved else parameters.pop(ours + "delta_in")
    return DeltaLayer(
        into=Linear(into, ops),
        weights=DeltaWeights(
            conv=parameters.pop(ours + "delta_conv").t().contiguous().t(),
            a_log=parameters.pop(ours + "decay_rate"),
            dt_bias=parameters.pop(ours + "decay_bias"),
        ),
        gain=parameters.pop(ours + "delta_gain"),
        eps=eps,
        out=Linear(parameters.pop(ours + "out"), ops),
        config=config,
        ops=ops,
    )


def _ordered(config: DeltaConfig, parameters: dict[str, Tensor], ours: str) -> Tensor:
    """Returns the projections of a checkpoint that has those of each key head beside each other, in our order."""
    heads, values = config.num_key_heads, config.value_size // config.num_key_heads
    together = parameters.pop(ours + "delta_qkvz")
    parts = (config.key_dim, config.key_dim, values, values)
    q, k, v, z = together.view(heads, -1, together.shape[1]).split_with_sizes(parts, 1)
    gates = parameters.pop(ours + "delta_ba")
    b, a = gates.view(heads, 2, -1, gates.shape[1]).unbind(1)
    return torch.cat([each.flatten(0, 1) for each in (q, k, v, b, a, z)])
