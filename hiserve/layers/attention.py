"""The attention layer: project, rotate, store, attend, project."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.reference import store_kv
from hiserve.layers.linear import Linear
from hiserve.layers.norm import RMSNorm
from hiserve.layers.rotary import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class SelfAttention:
    """Grouped-query self-attention over the paged pool.

    Attributes:
        layer: Index of the layer.
        qkv: Rows of all query heads, then key heads, then value heads.
        out: ``[hidden_size, num_heads * head_dim]``.
        qk_norm: Norm of each query and key head before the rotation, weight
            ``[num_heads + num_kv_heads, head_dim]``; None without one.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements per head.
    """

    layer: int
    qkv: Linear
    out: Linear
    qk_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self, x: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape and stores the step's keys and values."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotation(qk)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        store_kv(kv, inputs.slots, k, v)
        return self.out(attention.forward(q, k, v, kv, self.layer).flatten(1))
