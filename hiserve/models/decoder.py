"""The decoder: one transformer with settings, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.kernels.ops import Ops, ops_for
from hiserve.layers.attention import SelfAttention
from hiserve.layers.embedding import Embedding
from hiserve.layers.linear import Linear
from hiserve.layers.mlp import GatedMLP
from hiserve.layers.moe import Experts, MoE, SparseExperts, StackedExperts
from hiserve.layers.norm import RMSNorm
from hiserve.layers.rotary import Rotary
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.model_config import ExpertsConfig, ModelConfig
from hiserve.models.weights import load_parameters


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer of a decoder.

    Attributes:
        input_norm: Before attention.
        attention: Queries, keys and values to what they mix, and back.
        mlp_norm: Before the MLP.
        mlp: Or its experts.
    """

    input_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE

    def finish(self, attn_out: Tensor, residual: Tensor) -> Tensor:
        """Computes what follows attention, token by token; returns what the residual stream does not hold yet.

        Args:
            attn_out: ``[T, num_heads * head_dim]``, what attention gave.
            residual: ``[T, hidden_size]``. Updated in place.
        """
        return self.mlp(self.mlp_norm.add(self.attention.out(attn_out), residual))


class Decoder:
    """A pre-norm decoder with rotary positions, grouped-query attention, and a gated MLP or experts.

    Args:
        config: The model's shape.
        parameters: As ``names.parameter_table`` names them. Taken out one by one, so that a
            projection that keeps a packed copy frees the original.
        max_len: Tokens of the longest request.
        aux_layers: Layers, counted from 0, whose output is shown of every token: the residual stream behind each. The number
            of layers stands for the states behind the last norm.

    Attributes:
        embedding: Of tokens; draft heads share it.
        head: States to logits; likewise.
    """

    def __init__(
        self, config: ModelConfig, parameters: dict[str, Tensor], max_len: int, aux_layers: tuple[int, ...] = ()
    ) -> None:
        embedding = parameters.pop("embedding")
        self.embedding = Embedding(embedding)
        frequencies = rotary_frequencies(config.rope, config.head_dim, max_len).to(embedding.device)
        ops = ops_for(embedding.device)
        self._rotary = Rotary(frequencies, embedding.dtype, ops, config.rope.attention_factor)
        self._layers = [make_layer(config, parameters, index, ops) for index in range(config.num_layers)]
        self._norm = RMSNorm(parameters.pop("norm"), config.norm_eps, ops)
        self.head = Linear(parameters.pop("head", embedding))
        self._columns = {
            layer: slice(i * config.hidden_size, (i + 1) * config.hidden_size) for i, layer in enumerate(aux_layers)
        }
        self._has_last_aux = any(layer >= config.num_layers - 1 for layer in aux_layers)

    @property
    def hidden_states_size(self) -> int:
        """Elements that are shown of each token."""
        return len(self._columns) * self.embedding.weight.shape[1]

    def forward(self, inputs: ForwardInputs, layers: Sequence[LayerKV], attention: Attention) -> ForwardOutputs:
        """Computes the step's tokens and stores their keys and values.

        Args:
            inputs: The batch.
            layers: The pool's views, one per layer.
            attention: A backend on which ``plan(inputs)`` was called.
        """
        hidden_states = self.new_hidden_states(inputs.input_ids.shape[0]) if inputs.wants_hidden_states else None
        attn_out, residual = self.trunk(inputs, layers, attention, hidden_states)
        logits = self.logits(attn_out, residual, inputs.logits_rows, hidden_states)
        return ForwardOutputs(logits=logits, hidden_states=hidden_states)

    def new_hidden_states(self, num_tokens: int) -> Tensor | None:
        """Returns room for what is shown of so many tokens; None where nothing is."""
        return self.embedding.weight.new_empty((num_tokens, self.hidden_states_size)) if self._columns else None

    def trunk(
        self,
        inputs: ForwardInputs,
        layers: Sequence[LayerKV],
        attention: Attention,
        hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes all that tokens have to do with each other: everything up to the last attention.

        Args:
            inputs: The batch.
            layers: The pool's views, one per layer.
            attention: A backend on which ``plan(inputs)`` was called.
            hidden_states: ``[T, hidden_states_size]``. Filled in for the layers before the last; None shows nothing.

        Returns:
            ``[T, num_heads * head_dim]``, what the last attention gives, and ``[T, hidden_size]``, the residual stream
            before it.
        """
        rotation = self._rotary(inputs.positions)
        residual = self.embedding(inputs.input_ids)
        x = self._layers[0].input_norm(residual)
        for index, (layer, kv) in enumerate(zip(self._layers, layers, strict=True)):
            if inputs.before_layer is not None:
                inputs.before_layer(index)
            attn_out = layer.attention(x, inputs, rotation, kv, attention)
            if index + 1 < len(self._layers):
                x = self._layers[index + 1].input_norm.add(layer.finish(attn_out, residual), residual)
                self._keep_aux(index, residual, hidden_states)
        return attn_out, residual

    def logits(
        self, attn_out: Tensor, residual: Tensor, logits_rows: Tensor, hidden_states: Tensor | None = None
    ) -> Tensor:
        """Returns the logits ``[N, vocab_size]`` of some tokens.

        Of a prompt few are wanted: the others stop here, unless the last layer is shown.

        Args:
            attn_out: From ``trunk``.
            residual: Likewise; rows past those of ``attn_out`` mean nothing. Unchanged.
            logits_rows: int64 ``[N]``, indices into T.
            hidden_states: As ``trunk`` left it. Filled in for the last layer and what follows it.
        """
        if hidden_states is None or not self._has_last_aux:
            residual = residual.index_select(0, logits_rows)
            return self.head(self._finish(attn_out.index_select(0, logits_rows), residual))
        residual = residual[: attn_out.shape[0]].clone()
        states = self._finish(attn_out, residual)
        self._keep_aux(len(self._layers) - 1, residual, hidden_states)
        self._keep_aux(len(self._layers), states, hidden_states)
        return self.head(states.index_select(0, logits_rows))

    def _finish(self, attn_out: Tensor, residual: Tensor) -> Tensor:
        """Computes what follows the last attention; leaves the last layer's output in ``residual``."""
        return self._norm.add(self._layers[-1].finish(attn_out, residual), residual)

    def _keep_aux(self, layer: int, states: Tensor, hidden_states: Tensor | None) -> None:
        if hidden_states is not None and layer in self._columns:
            hidden_states[:, self._columns[layer]] = states


def make_layer(config: ModelConfig, parameters: dict[str, Tensor], index: int, ops: Ops) -> Layer:
    """Takes the parameters of one layer out of a decoder's; ``index`` counts from 0."""
    ours = f"layers.{index}."
    qk_weight = None
    if config.has_qk_norm:
        query, key = parameters.pop(ours + "q_norm"), parameters.pop(ours + "k_norm")
        qk_weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return Layer(
        input_norm=RMSNorm(parameters.pop(ours + "input_norm"), config.norm_eps, ops),
        attention=SelfAttention(
            layer=index,
            qkv=_linear(parameters, ours + "qkv"),
            out=_linear(parameters, ours + "out", is_behind_attention=True),
            qk_weight=qk_weight,
            eps=config.norm_eps,
            head_dim=config.head_dim,
            ops=ops,
        ),
        mlp_norm=RMSNorm(parameters.pop(ours + "mlp_norm"), config.norm_eps, ops),
        mlp=(
            _moe(config.experts, parameters, ours, ops)
            if config.experts is not None and config.experts.is_in(index)
            else GatedMLP(_linear(parameters, ours + "gate_up"), _linear(parameters, ours + "down"), ops)
        ),
    )


def _linear(parameters: dict[str, Tensor], name: str, *, is_behind_attention: bool = False) -> Linear:
    weight, bias = parameters.pop(name), parameters.pop(name + "_bias", None)
    return Linear(weight, bias, is_behind_attention=is_behind_attention)


def _moe(config: ExpertsConfig, parameters: dict[str, Tensor], ours: str, ops: Ops) -> MoE:
    """Stacks matrices of experts as ``[num_experts, rows, columns]``; on the CPU each expert packs its own."""
    gate_up, down = (
        matrices.view(config.num_experts, -1, matrices.shape[1])
        for matrices in (parameters.pop(ours + "experts_gate_up"), parameters.pop(ours + "experts_down"))
    )
    experts: Experts = StackedExperts(gate_up, down, ops)
    if gate_up.device.type == "cpu":
        experts = SparseExperts(
            [GatedMLP(Linear(mine), Linear(its), ops) for mine, its in zip(gate_up, down, strict=True)]
        )
    return MoE(
        router=Linear(parameters.pop(ours + "router")),
        experts=experts,
        num_per_token=config.num_per_token,
        is_normalized=config.is_normalized,
        ops=ops,
    )


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    load_format: str,
    max_len: int | None = None,
    aux_layers: tuple[int, ...] = (),
) -> Decoder:
    """Reads a checkpoint, or draws random weights of its shape.

    Args:
        folder: Checkpoint folder.
        config: Its shape.
        dtype: Type name of weights and activations, a key of ``config.DTYPE_BYTES``.
        device: ``cpu`` or ``cuda``.
        load_format: ``auto`` or ``dummy``.
        max_len: Tokens of the longest request; None is the model's context.
        aux_layers: As ``Decoder`` takes them.

    Raises:
        ModelError: The checkpoint cannot be used.
    """
    parameters = load_parameters(folder, config, getattr(torch, dtype), torch.device(device), load_format)
    return Decoder(config, parameters, config.context_length if max_len is None else max_len, aux_layers)


def attention_shape(config: ModelConfig, *, dtype: torch.dtype, page_size: int) -> AttentionShape:
    """Returns the shape of the attention in every layer.

    Args:
        config: Of the model.
        dtype: Of queries, keys and values.
        page_size: Tokens per page.
    """
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        windows=config.windows,
    )
