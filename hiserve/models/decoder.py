"""The decoder: one transformer with settings, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.layers.attention import SelfAttention
from hiserve.layers.embedding import Embedding
from hiserve.layers.linear import Linear
from hiserve.layers.mlp import GatedMLP
from hiserve.layers.moe import DenseExperts, Experts, MoE, SparseExperts
from hiserve.layers.norm import RMSNorm
from hiserve.layers.rotary import Rotary
from hiserve.models.config import ExpertsConfig, ModelConfig
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.weights import load_parameters


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE


class Decoder:
    """A pre-norm decoder with rotary positions, grouped-query attention, and a gated MLP or experts.

    Args:
        config: The model's shape.
        parameters: As ``names.parameter_table`` names them. Taken out one by one, so that a
            projection that keeps a packed copy frees the original.
        max_len: Tokens of the longest request.
    """

    def __init__(self, config: ModelConfig, parameters: dict[str, Tensor], max_len: int) -> None:
        embedding = parameters.pop("embedding")
        self._embedding = Embedding(embedding)
        frequencies = rotary_frequencies(config.rope, config.head_dim, max_len).to(embedding.device)
        self._rotary = Rotary(frequencies, embedding.dtype, config.rope.attention_factor)
        self._layers = [_layer(config, parameters, index) for index in range(config.num_layers)]
        self._norm = RMSNorm(parameters.pop("norm"), config.norm_eps)
        self._head = Linear(parameters.pop("head", embedding))

    def forward(self, inputs: ForwardInputs, layers: Sequence[LayerKV], attention: Attention) -> ForwardOutputs:
        """Computes the step's tokens and stores their keys and values.

        Args:
            inputs: The batch.
            layers: The pool's views, one per layer.
            attention: A backend on which ``plan(inputs)`` was called.
        """
        rotation = self._rotary(inputs.positions)
        x = self._embedding(inputs.input_ids)
        for index, (layer, kv) in enumerate(zip(self._layers, layers, strict=True)):
            if inputs.before_layer is not None:
                inputs.before_layer(index)
            x = x + layer.attention(layer.input_norm(x), inputs, rotation, kv, attention)
            x = x + layer.mlp(layer.mlp_norm(x))
        last = x.index_select(0, inputs.logits_rows)
        return ForwardOutputs(logits=self._head(self._norm(last)))


def _layer(config: ModelConfig, parameters: dict[str, Tensor], index: int) -> _Layer:
    ours = f"layers.{index}."
    qk_norm = None
    if config.has_qk_norm:
        query, key = parameters.pop(ours + "q_norm"), parameters.pop(ours + "k_norm")
        weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        qk_norm = RMSNorm(weight, config.norm_eps)
    return _Layer(
        input_norm=RMSNorm(parameters.pop(ours + "input_norm"), config.norm_eps),
        attention=SelfAttention(
            layer=index,
            qkv=_linear(parameters, ours + "qkv"),
            out=_linear(parameters, ours + "out"),
            qk_norm=qk_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
        mlp_norm=RMSNorm(parameters.pop(ours + "mlp_norm"), config.norm_eps),
        mlp=(
            _moe(config.experts, parameters, ours)
            if config.experts is not None and config.experts.is_in(index)
            else GatedMLP(gate_up=_linear(parameters, ours + "gate_up"), down=_linear(parameters, ours + "down"))
        ),
    )


def _linear(parameters: dict[str, Tensor], name: str) -> Linear:
    return Linear(parameters.pop(name), parameters.pop(name + "_bias", None))


def _moe(config: ExpertsConfig, parameters: dict[str, Tensor], ours: str) -> MoE:
    """Stacks matrices of experts as ``[num_experts, rows, columns]``; on the CPU each expert packs its own."""
    gate_up, down = (
        matrices.view(config.num_experts, -1, matrices.shape[1])
        for matrices in (parameters.pop(ours + "experts_gate_up"), parameters.pop(ours + "experts_down"))
    )
    experts: Experts = DenseExperts(gate_up, down)
    if gate_up.device.type == "cpu":
        experts = SparseExperts(
            [GatedMLP(gate_up=Linear(mine), down=Linear(its)) for mine, its in zip(gate_up, down, strict=True)]
        )
    return MoE(
        router=Linear(parameters.pop(ours + "router")),
        experts=experts,
        num_per_token=config.num_per_token,
        is_normalized=config.is_normalized,
    )


def load_decoder(
    folder: Path, config: ModelConfig, *, dtype: str, device: str, load_format: str, max_len: int | None = None
) -> Decoder:
    """Reads a checkpoint, or draws random weights of its shape.

    Args:
        folder: Checkpoint folder.
        config: Its shape.
        dtype: Type name of weights and activations, a key of ``config.DTYPE_BYTES``.
        device: ``cpu`` or ``cuda``.
        load_format: ``auto`` or ``dummy``.
        max_len: Tokens of the longest request; None is the model's context.

    Raises:
        ModelError: The checkpoint cannot be used.
    """
    parameters = load_parameters(folder, config, getattr(torch, dtype), torch.device(device), load_format)
    return Decoder(config, parameters, config.context_length if max_len is None else max_len)
