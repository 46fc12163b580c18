"""The attention layer: projects, rotates, stores keys and values, attends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.ops import Ops
from hiserve.layers.linear import Linear
from hiserve.layers.rotary import Rotation


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
    """

    layer: int
    qkv: Linear
    out: Linear
    qk_weight: Tensor | None
    eps: float
    head_dim: int
    ops: Ops

    def __call__(
        self, x: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Stores the step's keys and values and attends. Returns ``[T, num_heads * head_dim]``, before ``out``."""
        q, k, v = self.store(x, inputs, rotation, kv)
        return attention.forward(q, k, v, kv, self.layer).flatten(1)

    def store(self, x: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
        """Stores keys and values, and returns queries, keys and values, each ``[T, heads, head_dim]``."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        return self.ops.rotate_and_store(qkv, self.qk_weight, self.eps, rotation.cos, rotation.sin, kv, inputs.slots)
