"""An index beside the latents of a layer (DeepSeek-V3.2, GLM-5), made of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hiserve.attention.indexed import IndexedAttention
from hiserve.core.forward import ForwardInputs, GroupedKV, LayerKV
from hiserve.kernels.ops import Ops
from hiserve.layers import Linear, Rotation
from hiserve.models.index_config import KEYS, IndexConfig

_EPS = 1e-6  # of the norm of keys, whatever the model's other norms have


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Stores a key of each token, and chooses by them the tokens that a token sees.

    Released engines multiply queries and keys by a Hadamard matrix first, which changes no product of the two.

    Attributes:
        up: From the queries' latent to the queries of all heads.
        norm: ``[width]``, of keys.
        norm_bias: Likewise.
        config: Its shape.
        ops: Of its device.
    """

    up: Linear
    norm: Tensor
    norm_bias: Tensor
    config: IndexConfig
    ops: Ops

    def __call__(
        self,
        latent: Tensor,
        key: Tensor,
        weights: Tensor,
        inputs: ForwardInputs,
        rotation: Rotation,
        kv: LayerKV,
        attention: IndexedAttention,
    ) -> None:
        """Stores the step's keys, and lets ``attention`` choose where it must.

        Args:
            latent: ``[T, query_rank]``, normed.
            key: ``[T, width]``, before its norm.
            weights: ``[T, heads]``, of the heads' scores.
            inputs: Of the step.
            rotation: Likewise.
            kv: The layer's memory.
            attention: On which ``plan(inputs)`` was called.
        """
        assert isinstance(kv, GroupedKV), "a layer with an index, but no memory for its keys"
        keys = kv.beside[KEYS]
        turns = (rotation.cos, rotation.sin)
        packed = attention.packed(keys, self.config.packed_key)
        self.ops.store_index_keys(key, self.norm, self.norm_bias, _EPS, *turns, keys, inputs.slots, packed)
        if attention.is_choosing:
            queries = self.up(latent).view(latent.shape[0], self.config.num_heads, -1)
            wide = weights.to(rotation.cos.dtype)
            attention.choose(self.ops.rotate_first(queries, *turns), wide, keys, inputs, packed)
