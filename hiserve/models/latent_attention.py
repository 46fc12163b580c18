"""A decoder layer's latent attention (DeepSeek-V2, arXiv:2405.04434), made of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention, LatentShape
from hiserve.attention.indexed import IndexedAttention
from hiserve.core.forward import ForwardInputs, GroupedKV, LatentKV, LayerKV
from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.ops import Ops
from hiserve.kernels.row_codecs import pages_of
from hiserve.kernels.terms import Inputs
from hiserve.layers import Linear, RMSNorm, Rotation
from hiserve.models.index_config import KEYS, IndexConfig
from hiserve.models.latent_config import LatentConfig
from hiserve.models.model_config import ModelConfig

_EPS = 1e-6  # of the norms of latents and of an index's keys, whatever the model's other norms have


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


@dataclass(frozen=True, slots=True, eq=False)
class LatentSelfAttention:
    """Self-attention whose heads share one row per token of the paged pool.

    Attributes:
        layer: Index of the layer.
        into: From the layer's input: queries or their latent, then the latent of keys and values, then the rotated key, then the
            index's key and the weights of its heads.
        sizes: Rows of ``into``: of the queries, of latent and key together, and of the index.
        query_norm: Of the queries' latent; None where ``into`` gives queries.
        query_up: From that latent to queries, likewise.
        row_weight: ``[rank]``, of the norm of the latent of keys and values.
        to_keys: As in ``LatentKV``.
        to_values: Likewise.
        out: ``[hidden_size, num_heads * value_dim]``.
        config: Its shape.
        index: Chooses the tokens that a token sees; None where all are seen, or the choice is that of a layer before.
        ops: Of its device.
    """

    layer: int
    into: Linear
    sizes: tuple[int, ...]
    query_norm: RMSNorm | None
    query_up: Linear | None
    row_weight: Tensor
    to_keys: Tensor
    to_values: Tensor
    out: Linear
    config: LatentConfig
    index: RowIndex | None
    ops: Ops

    def __call__(
        self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Stores the step's rows and attends. Returns ``[T, num_heads * value_dim]``, before ``out``."""
        source, row, *of_index = self._project(x)
        if self.index is not None:
            assert isinstance(attention, IndexedAttention), type(attention)
            key, weights = of_index
            self.index(source, key, weights, inputs, rotation, kv, attention)
        q, k, v = self._store(source, row, inputs, rotation, kv)
        latents = LatentKV(k=kv.k, v=kv.v, to_keys=self.to_keys, to_values=self.to_values, packed=self._packed(kv))
        return attention.forward(q, k, v, latents, self.layer).flatten(1)

    def store(self, x: Inputs, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
        """Stores rows, and returns queries, rows as they are read, and their latents.

        Queries are ``[T, num_heads, nope_dim + rope_dim]``, rows ``[T, 1, rank + rope_dim]``.
        """
        source, row = self._project(x)
        return self._store(source, row, inputs, rotation, kv)

    def _project(self, x: Inputs) -> tuple[Tensor, ...]:
        """Returns queries or their latent, normed, then rows before their norm, then what the index has of the input."""
        source, *others = self.into(x).split_with_sizes(self.sizes, -1)
        return (source if self.query_norm is None else self.query_norm(source), *others)

    def _store(
        self, source: Tensor, row: Tensor, inputs: ForwardInputs, rotation: Rotation, kv: LayerKV
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        q = source if self.query_up is None else self.query_up(source)
        q = q.view(source.shape[0], -1, config.key_dim)
        turns = rotation.cos, rotation.sin
        q, rows = self.ops.store_latents(q, row, self.row_weight, _EPS, *turns, kv, inputs.slots, self._packed(kv))
        return q, rows, rows[..., : config.rank]

    def _packed(self, kv: LayerKV) -> PackedPages | None:
        """Returns how a layer's pool holds rows in 8 bits; None if it does not."""
        return pages_of(kv.k, self.config.packed_row, kv.page_rows)


def make_latent_attention(
    config: ModelConfig, parameters: dict[str, Tensor], layer: int, ops: Ops
) -> LatentSelfAttention:
    """Removes the parameters of the attention of one layer, counted from 0, from a decoder's, and makes it."""
    latent, ours = config.latent, f"layers.{layer}."
    assert latent is not None
    into, up = parameters.pop(ours + "latents"), parameters.pop(ours + "latent_up")
    query_up = parameters.pop(ours + "query_up", None)
    sizes = [config.num_heads * latent.key_dim if query_up is None else query_up.shape[1], latent.width]
    if latent.is_interleaved:
        _pair_halves(into[None, sizes[0] + latent.rank : sum(sizes)])
        queries = into[: sizes[0]] if query_up is None else query_up
        _pair_halves(queries.view(config.num_heads, latent.key_dim, -1)[:, latent.nope_dim :])
    index = None
    if config.index is not None and layer in config.index.layers:
        index = _make_index(config.index, latent.rope_dim, into[sum(sizes) :], parameters, ours, ops)
        sizes += [config.index.width, config.index.num_heads]
    to_keys, to_values = up.view(config.num_heads, -1, latent.rank).split_with_sizes(
        (latent.nope_dim, latent.value_dim), 1
    )
    return LatentSelfAttention(
        layer=layer,
        into=Linear(into, ops),
        sizes=tuple(sizes),
        query_norm=None if query_up is None else RMSNorm(parameters.pop(ours + "query_latent_norm"), _EPS, ops),
        query_up=None if query_up is None else Linear(query_up, ops),
        row_weight=parameters.pop(ours + "latent_norm"),
        to_keys=to_keys,
        to_values=to_values,
        out=Linear(parameters.pop(ours + "out"), ops, is_after_attention=True),
        config=latent,
        index=index,
        ops=ops,
    )


def _make_index(
    config: IndexConfig, rope_dim: int, into: Tensor, parameters: dict[str, Tensor], ours: str, ops: Ops
) -> RowIndex:
    """As ``make_latent_attention``; ``into`` are its rows of the projection of the layer's input, keys first."""
    up, norm, bias = (parameters.pop(ours + name) for name in ("index_up", "index_norm", "index_norm_bias"))
    if config.is_interleaved:
        _pair_halves(up.view(config.num_heads, config.width, -1)[:, :rope_dim])
        for each in (into, norm[:, None], bias[:, None]):
            _pair_halves(each[None, :rope_dim])
    return RowIndex(Linear(up, ops), norm, bias, config, ops)


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
