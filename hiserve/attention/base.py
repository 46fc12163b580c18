"""The protocol of an attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hiserve.core.forward import ForwardInputs, LayerKV


class Attention(Protocol):
    """Causal attention of a ragged batch over paged keys and values."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Prepares one step. Host work is allowed here, and only here."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int) -> Tensor:
        """Attends: token t of a row sees the row's positions up to its own.

        Args:
            q: ``[T, num_heads, head_dim]``. Head h reads KV head ``h // (num_heads / num_kv_heads)``.
            k: ``[T, num_kv_heads, head_dim]``. This step's keys, which already stand in their slots.
            v: Like ``k``.
            kv: The layer's pool.
            layer: Index of the layer.

        Returns:
            ``[T, num_heads, head_dim]``. Nothing in it depends on a slot outside the row.
        """
