"""The decoder: one configurable transformer for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape, IndexShape
from hiserve.core.activation import Activation
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.kernels.ops import Ops
from hiserve.kernels.packed_weights import Weights
from hiserve.kernels.parts import Summand
from hiserve.kernels.routing import ExpertGroups
from hiserve.layers import (
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    MoE,
    RMSNorm,
    Rotary,
    SelfAttention,
    SparseExperts,
    StackedExperts,
)
from hiserve.models.delta_layer import DeltaLayer, make_delta_layer
from hiserve.models.experts_config import ExpertsConfig, GroupRouting
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.gated_attention import make_gated_attention
from hiserve.models.latent_attention import LatentSelfAttention, latent_shape, make_latent_attention
from hiserve.models.model_config import ModelConfig
from hiserve.models.rope import RopeConfig


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer of a decoder; ``attention`` mixes tokens, perhaps by states, ``mlp`` is an MLP or experts."""

    input_norm: RMSNorm
    attention: SelfAttention | LatentSelfAttention | DeltaLayer
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE
    # Norms of the outputs of attention and of the MLP; None without.
    attn_out_norm: RMSNorm | None = None
    mlp_out_norm: RMSNorm | None = None

    def finish(self, attn_out: Tensor, residual: Tensor) -> Summand:
        """Computes the layer after attention; returns the MLP's output, not yet added to the residual stream.

        ``attn_out`` is attention's output, ``[T, num_heads * head_dim]``; ``residual``, ``[T, hidden_size]``, is updated in
        place.
        """
        if self.attn_out_norm is not None and self.mlp_out_norm is not None:
            delta = self.attn_out_norm.output(self.attention.out(attn_out))
            return self.mlp_out_norm.output(self.mlp(self.mlp_norm.inputs(residual, delta)))
        if self.mlp_norm.exchange is not None:
            return self.mlp(self.mlp_norm.inputs(residual, self.attention.out(attn_out)))
        x = self.mlp_norm.inputs(residual, self.attention.out.parts(attn_out))
        return self.mlp.parts(x) if isinstance(self.mlp, GatedMLP) else self.mlp(x)


class Decoder:
    """A pre-norm decoder with rotary positions, grouped-query attention, and a gated MLP or experts.

    Args:
        config: The model's shape.
        parameters: Named as in ``names.parameter_table``. Removed one by one, so that a
            projection that keeps a packed copy frees the original.
        max_len: Tokens of the longest request.
        aux_layers: Layers, counted from 0, whose outputs (the residual stream) are returned as hidden states. The
            number of layers denotes the states after the last norm.
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
        self.exchange = exchange
        embedding = parameters.pop("embedding")
        scale = None if config.embedding_scale == 1.0 else embedding.new_full((), config.embedding_scale)
        first = 0 if exchange is None else exchange.shard.tokens(config.vocab_size)[0]
        self.embedding = Embedding(embedding, scale, exchange, first)  # of tokens; shared with draft heads
        self.ops = ops
        ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
        self._rotaries = [make_rotary(rope, config, max_len, embedding, ops) for rope in ropes]
        self._local_layers = config.local_layers
        self._logit_cap = config.logit_cap
        sinks = [parameters.pop(f"layers.{index}.sinks", None) for index in range(config.num_layers)]
        self.sinks = tuple(sinks) if config.has_sinks else ()  # of each layer, as for ``AttentionShape``
        self._layers = [make_layer(config, parameters, index, ops, exchange) for index in range(config.num_layers)]
        self._norm = RMSNorm(parameters.pop("norm"), config.norm_eps, ops, adding_exchange(config, exchange))
        self.head = Linear(parameters.pop("head", embedding), ops)  # states to logits; shared with draft heads
        self._columns = {
            layer: slice(i * config.hidden_size, (i + 1) * config.hidden_size) for i, layer in enumerate(aux_layers)
        }
        self._has_last_aux = any(layer >= config.num_layers - 1 for layer in aux_layers)

    @property
    def hidden_states_size(self) -> int:
        """Elements of a token's hidden states."""
        return len(self._columns) * self.embedding.weight.shape[1]

    def forward(self, inputs: ForwardInputs, layers: Sequence[LayerKV], attention: Attention) -> ForwardOutputs:
        """Computes the step's tokens and stores their keys and values.

        ``layers`` are the pool's views, one per layer; ``plan(inputs)`` was called on ``attention``.
        """
        hidden_states = self.new_hidden_states(inputs.input_ids.shape[0]) if inputs.wants_hidden_states else None
        return self.finish(self.trunk(inputs, layers, attention, hidden_states), inputs, hidden_states)

    def exchanges(
        self, num_tokens: int, num_logits: int, *, wants_hidden_states: bool, num_padded: int = 0
    ) -> list[Exchanged]:
        """Returns what a rank exchanges in a forward of so many tokens and rows of logits, in order.

        ``num_padded`` are the tokens up to the last attention, if they are more.
        """
        size, dtype = self.embedding.weight.shape[1], self.embedding.weight.dtype
        num_last = num_tokens if wants_hidden_states and self._has_last_aux else num_logits
        whole, last = (Exchanged("sum", rows, size, dtype) for rows in (max(num_tokens, num_padded), num_last))
        return [whole] * (2 * len(self._layers) - 1) + [last, last]

    def new_hidden_states(self, num_tokens: int) -> Tensor | None:
        """Allocates hidden states of ``num_tokens`` tokens; None without auxiliary layers."""
        return self.embedding.weight.new_empty((num_tokens, self.hidden_states_size)) if self._columns else None

    def trunk(
        self,
        inputs: ForwardInputs,
        layers: Sequence[LayerKV],
        attention: Attention,
        hidden_states: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes everything up to the last attention: all operations in which tokens interact.

        Args:
            inputs: The batch.
            layers: The pool's views, one per layer.
            attention: A backend on which ``plan(inputs)`` was called.
            hidden_states: ``[T, hidden_states_size]``. Written for the layers before the last; None for none.

        Returns:
            What ``finish`` reads: ``[T, num_heads * head_dim]``, the last attention's output, and ``[T, hidden_size]``, the
            residual stream before it.
        """
        rotations = [rotary(inputs.positions) for rotary in self._rotaries]
        residual = self.embedding(inputs.input_ids)
        x = self._layers[0].input_norm.inputs(residual)
        for index, (layer, kv) in enumerate(zip(self._layers, layers, strict=True)):
            if inputs.before_layer is not None:
                inputs.before_layer(index)
            attn_out = layer.attention(x, inputs, rotations[index in self._local_layers], kv, attention)
            if index + 1 < len(self._layers):
                x = self._layers[index + 1].input_norm.inputs(residual, layer.finish(attn_out, residual))
                self._keep_aux(index, residual, hidden_states)
        return attn_out, residual

    def finish(
        self, reached: tuple[Tensor, ...], inputs: ForwardInputs, hidden_states: Tensor | None = None
    ) -> ForwardOutputs:
        """Computes everything after the last attention.

        Only tokens whose logits are wanted pass the last layer's MLP, unless hidden states of the last layer are needed.

        Args:
            reached: From ``trunk``, unchanged.
            inputs: The batch.
            hidden_states: From ``trunk``. Written for the last layer and the last norm.
        """
        (attn_out, residual), rows = reached, inputs.logits_rows
        if hidden_states is None or not self._has_last_aux:
            states = self._last_states(attn_out.index_select(0, rows), residual.index_select(0, rows))
        else:
            residual = residual.clone()
            states = self._last_states(attn_out, residual)
            self._keep_aux(len(self._layers) - 1, residual, hidden_states)
            self._keep_aux(len(self._layers), states, hidden_states)
            states = states.index_select(0, rows)
        return ForwardOutputs(logits=self._to_logits(states), hidden_states=hidden_states)

    def _to_logits(self, states: Tensor) -> Tensor:
        logits = self.head(states)
        return logits if self._logit_cap is None else logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)

    def _last_states(self, attn_out: Tensor, residual: Tensor) -> Tensor:
        """Returns the states behind the last norm; leaves the last layer's output in ``residual``."""
        return self._norm.add(self._layers[-1].finish(attn_out, residual), residual)

    def _keep_aux(self, layer: int, states: Tensor, hidden_states: Tensor | None) -> None:
        if hidden_states is not None and layer in self._columns:
            hidden_states[:, self._columns[layer]] = states


def make_rotary(rope: RopeConfig, config: ModelConfig, max_len: int, like: Tensor, ops: Ops) -> Rotary:
    """Makes the rotation of a model with weights of the type and on the device of ``like``.

    Heads of which a part is rotated have angles of 0 for the others; see ``gated_attention.paired_halves``.
    """
    frequencies = rotary_frequencies(rope, config.rotary_dim, max_len)
    if config.has_attention_gates:
        frequencies = F.pad(frequencies, (0, (config.head_dim - config.rotary_dim) // 2))
    frequencies = frequencies.to(like.device)
    return Rotary(frequencies, like.dtype, ops, rope.attention_factor)


def make_layer(
    config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops, exchange: Exchange | None = None
) -> Layer:
    """Removes the parameters of one layer, counted from 0, from a decoder's, and makes the layer; ``exchange`` as for ``Decoder``."""
    ours = f"layers.{index}."
    attention, mlp = _mixer(config, parameters, index, ops), _mlp(config, parameters, index, ops)
    readers = {
        "input_norm": attention.qkv.quantized if type(attention) is SelfAttention else None,
        "mlp_norm": mlp.gate_up.quantized if isinstance(mlp, GatedMLP) else None,
    }
    adding = adding_exchange(config, exchange)
    norms = {
        name: RMSNorm(
            parameters.pop(ours + name), config.norm_eps, ops, exchange if "out" in name else adding, readers.get(name)
        )
        for name in ("input_norm", "mlp_norm", "attn_out_norm", "mlp_out_norm")
        if config.has_out_norms or "out" not in name
    }
    return Layer(**norms, attention=attention, mlp=mlp)


def adding_exchange(config: ModelConfig, exchange: Exchange | None) -> Exchange | None:
    """Returns the exchange of norms that add a ``delta``: None where a norm of outputs makes it whole before."""
    return None if config.has_out_norms else exchange


def _mlp(config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops) -> GatedMLP | MoE:
    ours = f"layers.{index}."
    if config.experts is not None and config.experts.is_in(index):
        return _moe(config.experts, config.activation, parameters, ours, ops)
    gate_up, down = (_linear(parameters, ours + name, ops) for name in ("gate_up", "down"))
    return GatedMLP(gate_up, down, config.activation)


def _mixer(
    config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops
) -> SelfAttention | LatentSelfAttention | DeltaLayer:
    if config.delta is not None and index in config.delta.layers:
        return make_delta_layer(config.delta, parameters, index, config.norm_eps, ops)
    if config.has_attention_gates:
        return make_gated_attention(config, parameters, index, ops)
    make_attention = _grouped_attention if config.latent is None else make_latent_attention
    return make_attention(config, parameters, index, ops)


def _grouped_attention(config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops) -> SelfAttention:
    ours, qk_weight = f"layers.{index}.", None
    if config.has_qk_norm:
        query, key = parameters.pop(ours + "q_norm"), parameters.pop(ours + "k_norm")
        qk_weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return SelfAttention(
        layer=index,
        qkv=_linear(parameters, ours + "qkv", ops),
        out=_linear(parameters, ours + "out", ops, is_after_attention=True),
        qk_weight=qk_weight,
        eps=config.norm_eps,
        head_dim=config.head_dim,
        ops=ops,
        has_window=bool(config.windows) and config.windows[index] is not None,
    )


def _linear(parameters: dict[str, Tensor], name: str, ops: Ops, *, is_after_attention: bool = False) -> Linear:
    weight, bias = parameters.pop(name), parameters.pop(name + "_bias", None)
    return Linear(weight, ops, bias, is_after_attention=is_after_attention)


def make_experts(
    config: ExpertsConfig, activation: Activation, parameters: dict[str, Tensor], ours: str, ops: Ops
) -> tuple[Experts, GatedMLP | None]:
    """Makes stacked experts ``[num_experts, rows, columns]``, which may be packed; of plain ones on the CPU one MLP each.

    Returns:
        The experts, and the shared one, or None if there is none or the experts have it.
    """
    gate_up, down = (
        _matrices(parameters.pop(ours + name), config.num_experts) for name in ("experts_gate_up", "experts_down")
    )
    gate_up_bias, down_bias = (
        parameters.pop(ours + name, None) for name in ("experts_gate_up_bias", "experts_down_bias")
    )
    shared = None
    if config.shared_size:
        shared = parameters.pop(ours + "shared_gate_up"), parameters.pop(ours + "shared_down")
    on_cpu = isinstance(gate_up, Tensor) and gate_up.device.type == "cpu"
    joins = not on_cpu and config.joins_shared
    experts: Experts = StackedExperts(
        gate_up, down, ops, gate_up_bias, down_bias, activation, shared if joins else None
    )
    if on_cpu and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        none = [None] * config.num_experts
        biases = (none if bias is None else bias for bias in (gate_up_bias, down_bias))
        each = zip(gate_up, down, *biases, strict=True)
        experts = SparseExperts(
            [GatedMLP(Linear(mine, ops, one), Linear(its, ops, other), activation) for mine, its, one, other in each]
        )
    if shared is None or joins:
        return experts, None
    return experts, GatedMLP(Linear(shared[0], ops), Linear(shared[1], ops), activation)


def _matrices(weights: Weights, num_experts: int) -> Weights:
    return weights.view(num_experts, -1, weights.shape[1]) if isinstance(weights, Tensor) else weights


def _moe(config: ExpertsConfig, activation: Activation, parameters: dict[str, Tensor], ours: str, ops: Ops) -> MoE:
    experts, shared = make_experts(config, activation, parameters, ours, ops)
    router, groups = parameters.pop(ours + "router"), None
    if isinstance(routing := config.routing, GroupRouting):
        bias = parameters.pop(ours + "choice_bias")
        groups = ExpertGroups(bias, routing.num_groups, routing.num_chosen, routing.scale)
        router = router.to(bias.dtype)
    return MoE(
        router=Linear(router, ops, parameters.pop(ours + "router_bias", None)),
        experts=experts,
        num_per_token=config.num_per_token,
        is_normalized=config.is_normalized,
        ops=ops,
        groups=groups,
        shared=shared,
        shared_gate=parameters.pop(ours + "shared_gate").flatten() if config.has_shared_gate else None,
    )


def attention_shape(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    page_size: int,
    sinks: tuple[Tensor | None, ...] = (),
    packs_rows: bool = False,
    segment: int | None = None,
) -> AttentionShape:
    """Returns the shape of the attention in every layer.

    ``dtype`` is that of queries, and of keys and values that are not packed; ``sinks`` are the decoder's; ``packs_rows`` as for
    ``ModelConfig.cache_plan``; ``segment`` as for ``AttentionShape``.
    """
    assert bool(sinks) == config.has_sinks, f"{len(sinks)} layers with sinks"
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        windows=config.windows,
        latent=None if config.latent is None else latent_shape(config.latent),
        sinks=sinks,
        score_scalar=config.score_scalar,
        first_layer=0 if config.delta is None else min(set(range(config.num_layers)) - config.delta.layers),
        packs_rows=packs_rows and config.compressed is None and config.packed_bytes is not None,
        is_union=config.compressed is not None,
        index=None if config.index is None else IndexShape(config.index.width, config.index.most),
        segment=segment,
    )
