"""The decoder of models with several residual streams and compressed attention (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.attention.union import UnionAttention
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.kernels.compressed_ops import CompressedOps, compressed_ops_for
from hiserve.kernels.ops import Ops
from hiserve.kernels.pairs import PairFrequencies
from hiserve.layers import Embedding, Experts, GatedMLP, Linear, RMSNorm
from hiserve.models.compressed_attention import CompressedSelfAttention, Turns, make_compressed_attention
from hiserve.models.compressed_config import LayerKind
from hiserve.models.decoder import make_experts
from hiserve.models.experts_config import RootRouting
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.model_config import ModelConfig
from hiserve.models.streams import Mix, make_mix


@dataclass(frozen=True, slots=True, eq=False)
class HashedExperts:
    """Experts whose likelihood is the root of softplus, chosen by the best scores or by a table of the tokens.

    Attributes:
        router: ``[num_experts, hidden_size]``, float32 or float64.
        experts: All of them.
        num_per_token: Experts that compute a token.
        scale: Factor of the shares.
        bias: ``[num_experts]``, of the choice; None with a table.
        table: int64 ``[vocab_size, num_per_token]``, the experts of each token; None where scores decide.
        shared: Computes every token beside them; None if ``experts`` has it.
        ops: Of its device.
    """

    router: Linear
    experts: Experts
    num_per_token: int
    scale: float
    bias: Tensor | None
    table: Tensor | None
    shared: GatedMLP | None
    ops: CompressedOps

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """Maps ``[T, hidden_size]`` to the same shape; ``input_ids`` are int32 ``[T]``."""
        given = None if self.table is None else (self.table, input_ids)
        shares, chosen = self.ops.route_by_root(
            self.router(x), self.num_per_token, self.scale, bias=self.bias, given=given
        )
        mixed = self.experts(x, shares, chosen)
        return mixed if self.shared is None else mixed + self.shared(x)


@dataclass(frozen=True, slots=True, eq=False)
class StreamLayer:
    """One layer: attention, then experts, each between streams that are mixed."""

    attn_mix: Mix
    input_norm: RMSNorm
    attention: CompressedSelfAttention
    mlp_mix: Mix
    mlp_norm: RMSNorm
    mlp: HashedExperts

    def attend(
        self, streams: Tensor, inputs: ForwardInputs, turns: Turns, kv: LayerKV, attention: UnionAttention
    ) -> Tensor:
        """Stores rows and attends. Maps ``[T, n, hidden_size]`` to the same shape."""
        mixed = self.attn_mix.split(streams)
        return self.attn_mix.merge(mixed, self.attention(self.input_norm(mixed.x), inputs, turns, kv, attention))

    def finish(self, streams: Tensor, input_ids: Tensor) -> Tensor:
        """Computes the experts. Maps ``[T, n, hidden_size]`` to the same shape."""
        mixed = self.mlp_mix.split(streams)
        return self.mlp_mix.merge(mixed, self.mlp(self.mlp_norm(mixed.x), input_ids))


class StreamDecoder:
    """A decoder with several residual streams, compressed attention, and experts of which a table may choose some.

    Args:
        config: The model's shape.
        parameters: Named as in ``compressed_names.compressed_table``. Removed one by one.
        max_len: Tokens of the longest request.
        aux_layers: The number of layers, if the streams behind the last layer are returned as hidden states.
        ops: Of the device of the parameters; shared with draft heads.
        exchange: Of a rank of a group, whose share ``config`` and ``parameters`` are; None holds all.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Tensor],
        max_len: int,
        aux_layers: tuple[int, ...],
        ops: Ops,
        exchange: Exchange | None = None,
    ) -> None:
        compressed = config.compressed
        assert compressed is not None and set(aux_layers) <= {config.num_layers}, (config.architecture, aux_layers)
        first = 0 if exchange is None else exchange.shard.tokens(config.vocab_size)[0]
        self.embedding = Embedding(
            parameters.pop("embedding"), None, exchange, first
        )  # of tokens; shared with draft heads
        self.sinks = ()
        self.exchange = exchange
        self.ops = ops
        self._compressed = compressed
        self._rotary = Rotary(config, max_len, self.embedding.weight)
        self._layers = [
            make_stream_layer(config, parameters, layer, ops, exchange) for layer in range(config.num_layers)
        ]
        self._join = make_mix(parameters, "head_mix", compressed.streams, config.norm_eps)
        self._norm = RMSNorm(parameters.pop("norm"), config.norm_eps, ops)
        self.head = Linear(
            parameters.pop("head", self.embedding.weight), ops
        )  # states to logits; shared with draft heads
        self._has_aux = bool(aux_layers)

    @property
    def hidden_states_size(self) -> int:
        """Elements of a token's hidden states."""
        return self._compressed.streams.count * self.embedding.weight.shape[1] if self._has_aux else 0

    def exchanges(
        self, num_tokens: int, num_logits: int, *, wants_hidden_states: bool, num_padded: int = 0
    ) -> list[Exchanged]:
        """Returns what a rank exchanges in a forward, as ``Decoder.exchanges``."""
        size, dtype = self.embedding.weight.shape[1], self.embedding.weight.dtype
        num_last = num_tokens if self._has_aux and wants_hidden_states else num_logits
        whole, last = (Exchanged("sum", rows, size, dtype) for rows in (max(num_tokens, num_padded), num_last))
        return [whole] * (2 * len(self._layers)) + [last]

    def new_hidden_states(self, num_tokens: int) -> None:
        """Returns None: ``finish`` makes them, of the streams behind the last layer."""

    def forward(self, inputs: ForwardInputs, layers: Sequence[LayerKV], attention: Attention) -> ForwardOutputs:
        """Computes the step's tokens and stores their rows; arguments as for ``Decoder.forward``."""
        return self.finish(self.trunk(inputs, layers, attention), inputs)

    def trunk(
        self,
        inputs: ForwardInputs,
        layers: Sequence[LayerKV],
        attention: Attention,
        hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Computes everything up to the last attention, as ``Decoder.trunk``; returns the streams behind it, of all tokens."""
        assert isinstance(attention, UnionAttention) and hidden_states is None, type(attention)
        if inputs.before_layer is not None:
            inputs.before_layer(None)  # loads of several groups are whole, or not there
        streams = self.embedding(inputs.input_ids)[:, None].expand(-1, self._compressed.streams.count, -1)
        turns = self._rotary(inputs.positions)
        mixed = self._layers[0].attn_mix.split(streams)
        for index, (layer, kv) in enumerate(zip(self._layers, layers, strict=True)):
            turn = turns[self._compressed.kinds[index]]
            out = layer.attention(layer.input_norm(mixed.x), inputs, turn, kv, attention)
            if index + 1 == len(self._layers):
                break
            mixed = layer.mlp_mix.pass_on(mixed, out)
            out = layer.mlp(layer.mlp_norm(mixed.x), inputs.input_ids)
            mixed = self._layers[index + 1].attn_mix.pass_on(mixed, out)
        return (layer.attn_mix.merge(mixed, out),)

    def finish(
        self, reached: tuple[Tensor, ...], inputs: ForwardInputs, hidden_states: Tensor | None = None
    ) -> ForwardOutputs:
        """Computes everything after the last attention, as ``Decoder.finish``; all tokens if hidden states are wanted."""
        assert hidden_states is None, hidden_states.shape
        (streams,), rows, ids = reached, inputs.logits_rows, inputs.input_ids
        keeps = self._has_aux and inputs.wants_hidden_states
        if keeps:
            streams = self._layers[-1].finish(streams, ids)
            wanted = streams.index_select(0, rows)
        else:
            wanted = self._layers[-1].finish(streams.index_select(0, rows), ids.index_select(0, rows))
        logits = self.head(self._norm(self._join.join(wanted)))
        return ForwardOutputs(logits=logits, hidden_states=streams.flatten(1) if keeps else None)


class Rotary:
    """Angles of a step, by the kinds of layers: of all in one launch."""

    def __init__(self, config: ModelConfig, max_len: int, like: Tensor) -> None:
        compressed, device = config.compressed, like.device
        assert compressed is not None, config.architecture
        own, local = config.rope, config.local_rope or config.rope
        ratios = {LayerKind.SPARSE: compressed.sparse_ratio, LayerKind.HEAVY: compressed.heavy_ratio}
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._ops = compressed_ops_for(device)
        self._kinds = tuple(dict.fromkeys(compressed.kinds))
        # Of tokens with compressed rows, then of each kind: of tokens with a window alone, or of its rows.
        ropes = [own, *(local if kind is LayerKind.WINDOW else own for kind in self._kinds)]
        found = [rotary_frequencies(rope, compressed.rope_dim, max_len) for rope in ropes]
        self._angles = PairFrequencies(
            frequencies=torch.stack(found).to(device),
            factors=torch.tensor([rope.attention_factor for rope in ropes], dtype=torch.float32).to(device),
            ratios=torch.tensor([1, *(ratios.get(kind, 1) for kind in self._kinds)]).to(device),
        )

    def __call__(self, positions: Tensor) -> dict[LayerKind, Turns]:
        """Returns the rotations of int64 positions ``[T]``."""
        cos, sin = self._ops.pair_angles(positions, self._angles, self._dtype)
        turns: dict[LayerKind, Turns] = {}
        for place, kind in enumerate(self._kinds, start=1):
            of_tokens = place if kind is LayerKind.WINDOW else 0
            turns[kind] = Turns(cos[of_tokens], sin[of_tokens], cos[place], sin[place])
        return turns


def make_stream_layer(
    config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops, exchange: Exchange | None
) -> StreamLayer:
    """Removes the parameters of one layer, counted from 0, from a decoder's, and makes the layer; ``exchange`` as for ``StreamDecoder``."""
    ours, compressed, experts = f"layers.{index}.", config.compressed, config.experts
    assert compressed is not None and experts is not None and isinstance(experts.routing, RootRouting), config
    attn_mix, mlp_mix = (
        make_mix(parameters, ours + name, compressed.streams, config.norm_eps, exchange)
        for name in ("attn_mix", "mlp_mix")
    )
    input_norm, mlp_norm = (
        RMSNorm(parameters.pop(ours + name), config.norm_eps, ops) for name in ("input_norm", "mlp_norm")
    )
    mixed, shared = make_experts(experts, config.activation, parameters, ours, ops)
    router = parameters.pop(ours + "router")
    return StreamLayer(
        attn_mix=attn_mix,
        input_norm=input_norm,
        attention=make_compressed_attention(config, parameters, index, ops),
        mlp_mix=mlp_mix,
        mlp_norm=mlp_norm,
        mlp=HashedExperts(
            router=Linear(router.to(torch.promote_types(router.dtype, torch.float32)), ops),
            experts=mixed,
            num_per_token=experts.num_per_token,
            scale=experts.routing.scale,
            bias=parameters.pop(ours + "choice_bias", None),
            table=parameters.pop(ours + "expert_table", None),
            shared=shared,
            ops=compressed_ops_for(router.device),
        ),
    )
