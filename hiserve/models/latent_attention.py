"""A decoder layer's latent attention (DeepSeek-V2, arXiv:2405.04434), made of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention, LatentShape
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.kernels.ops import Ops
from hiserve.layers import Linear, RMSNorm, Rotation
from hiserve.models.latent_config import LatentConfig
from hiserve.models.model_config import ModelConfig

_EPS = 1e-6  # of the norms of latents, whatever the model's other norms have


@dataclass(frozen=True, slots=True, eq=False)
class LatentSelfAttention:
    """Self-attention whose heads share one row per token of the paged pool.

    Attributes:
        layer: Index of the layer.
        into: From the layer's input: queries or their latent, then the latent of keys and values, then the rotated key.
        query_norm: Of the queries' latent; None where ``into`` gives queries.
        query_up: From that latent to queries, likewise.
        row_weight: ``[rank]``, of the norm of the latent of keys and values.
        to_keys: As in ``LatentKV``.
        to_values: Likewise.
        out: ``[hidden_size, num_heads * value_dim]``.
        config: Its shape.
        ops: Of its device.
    """

    layer: int
    into: Linear
    query_norm: RMSNorm | None
    query_up: Linear | None
    row_weight: Tensor
    to_keys: Tensor
    to_values: Tensor
    out: Linear
    config: LatentConfig
    ops: Ops

    def __call__(
        self, x: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Stores the step's rows and attends. Returns ``[T, num_heads * value_dim]``, before ``out``."""
        q, k, v = self.store(x, inputs, rotation, kv)
        latents = LatentKV(k=kv.k, v=kv.v, to_keys=self.to_keys, to_values=self.to_values)
        return attention.forward(q, k, v, latents, self.layer).flatten(1)

    def store(self, x: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
        """Stores rows, and returns queries, rows and their latents.

        Queries are ``[T, num_heads, nope_dim + rope_dim]``, rows ``[T, 1, rank + rope_dim]``.
        """
        config = self.config
        projected = self.into(x)
        q, row = projected.split_with_sizes((projected.shape[1] - config.width, config.width), -1)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q = q.view(x.shape[0], -1, config.key_dim)
        q, rows = self.ops.store_latents(q, row, self.row_weight, _EPS, rotation.cos, rotation.sin, kv, inputs.slots)
        return q, rows, rows[..., : config.rank]


def make_latent_attention(
    config: ModelConfig, parameters: dict[str, Tensor], layer: int, ops: Ops
) -> LatentSelfAttention:
    """Removes the parameters of the attention of one layer, counted from 0, from a decoder's, and makes it."""
    latent, ours = config.latent, f"layers.{layer}."
    assert latent is not None
    into, up = parameters.pop(ours + "latents"), parameters.pop(ours + "latent_up")
    query_up = parameters.pop(ours + "query_up", None)
    if latent.is_interleaved:
        _pair_halves(into[None, -latent.rope_dim :])
        queries = into[: -latent.width] if query_up is None else query_up
        _pair_halves(queries.view(config.num_heads, latent.key_dim, -1)[:, latent.nope_dim :])
    to_keys, to_values = up.view(config.num_heads, -1, latent.rank).split_with_sizes(
        (latent.nope_dim, latent.value_dim), 1
    )
    return LatentSelfAttention(
        layer=layer,
        into=Linear(into),
        query_norm=None if query_up is None else RMSNorm(parameters.pop(ours + "query_latent_norm"), _EPS, ops),
        query_up=None if query_up is None else Linear(query_up),
        row_weight=parameters.pop(ours + "latent_norm"),
        to_keys=to_keys,
        to_values=to_values,
        out=Linear(parameters.pop(ours + "out"), is_after_attention=True),
        config=latent,
        ops=ops,
    )


def _pair_halves(rows: Tensor) -> None:
    """Reorders in place the rows of elements that are rotated with their neighbours: first the even ones, then the odd.

    ``rows`` is ``[num_heads, rope_dim, n]``. Products of queries and keys stay the same, and both halves are paired as ``kernels.reference.rope`` expects.
    """
    rows.copy_(torch.cat((rows[:, 0::2], rows[:, 1::2]), 1))


def latent_shape(config: LatentConfig) -> LatentShape:
    """Returns the shape as attention backends take it."""
    return LatentShape(
        rank=config.rank,
        rope_dim=config.rope_dim,
        nope_dim=config.nope_dim,
        value_dim=config.value_dim,
        scale=config.scale,
    )
