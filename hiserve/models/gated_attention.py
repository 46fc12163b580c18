"""Grouped-query attention with gates of its outputs, and of which a part of each head is rotated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.ops import Ops
from hiserve.kernels.terms import Inputs
from hiserve.layers import Linear, Rotation, SelfAttention
from hiserve.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class GatedSelfAttention(SelfAttention):
    """Each element of the output is multiplied by the sigmoid of its gate.

    Attributes:
        num_heads: Query heads, whose gates are the last rows of ``qkv``.
    """

    num_heads: int = field(kw_only=True)

    def __call__(
        self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """As ``SelfAttention``, gated."""
        qkv, gates = self._project(x)
        q, k, v = self.store_heads(qkv, inputs, rotation, kv)
        return self.ops.sigmoid_mul(attention.forward(q, k, v, kv, self.layer).flatten(1), gates.flatten(1))

    def store(self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
        """As ``SelfAttention.store``, without the gates."""
        return self.store_heads(self._project(x)[0], inputs, rotation, kv)

    def _project(self, x: Inputs) -> tuple[Tensor, ...]:
        """Returns queries, keys and values, then gates, each ``[T, heads, head_dim]``, of one tensor."""
        projected = self.qkv(x)
        return projected.view(projected.shape[0], -1, self.head_dim).tensor_split((-self.num_heads,), 1)


def make_gated_attention(
    config: ModelConfig, parameters: dict[str, Tensor], layer: int, ops: Ops
) -> GatedSelfAttention:
    """Removes the parameters of the attention of one layer, counted from 0, from a decoder's, and makes it."""
    ours, head_dim = f"layers.{layer}.", config.head_dim
    both = parameters.pop(ours + "query_gate")  # of each head first the query, then the gate
    query, gate = both.view(config.num_heads, 2, head_dim, -1).unbind(1)
    keys, values = parameters.pop(ours + "key_value").view(2, config.num_kv_heads, head_dim, -1)
    order = paired_halves(head_dim, config.rotary_dim).to(both.device)
    query, keys = (each.index_select(1, order) for each in (query, keys))
    norms = (parameters.pop(ours + name).index_select(0, order) for name in ("q_norm", "k_norm"))
    counts = (config.num_heads, config.num_kv_heads)
    weight = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
    # Cosines have YaRN's factor, also those of elements that are not rotated: there it is taken back.
    is_still = order >= config.rotary_dim
    weight = torch.where(is_still, weight / config.rope.attention_factor, weight)
    return GatedSelfAttention(
        layer=layer,
        qkv=Linear(torch.cat([each.flatten(0, 1) for each in (query, keys, values, gate)]), ops),
        out=Linear(parameters.pop(ours + "out"), ops, is_after_attention=True),
        qk_weight=weight,
        eps=config.norm_eps,
        head_dim=head_dim,
        ops=ops,
        num_heads=config.num_heads,
    )


def paired_halves(head_dim: int, rotary_dim: int) -> Tensor:
    """Returns the order of a head's elements in which those that are rotated together are half a head apart.

    A rotation of the whole head then serves: the angles of the elements behind the first ``rotary_dim`` are 0. Products of
    queries and keys stay the same.
    """
    turned, half = rotary_dim // 2, head_dim // 2
    first, second = torch.arange(turned), torch.arange(turned, rotary_dim)
    still = torch.arange(rotary_dim, head_dim)
    return torch.cat((first, still[: half - turned], second, still[half - turned :]))
