"""Maps each parameter of the decoder to its tensors in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hiserve.models.delta_config import DeltaConfig
from hiserve.models.experts_config import ExpertsConfig
from hiserve.models.index_config import IndexConfig
from hiserve.models.latent_config import LatentConfig
from hiserve.models.model_config import ModelConfig

Part = tuple[str, tuple[int, ...]]

MXFP4_GROUP = 32  # values of a row with one scale


class ExpertNaming(Enum):
    """Spelling of experts in a checkpoint: one tensor per expert, Mixtral's own names, or all experts in one tensor.

    gpt-oss has all experts in one tensor of transposed matrices, or packed.
    """

    EACH = "mlp.experts.0.gate_proj"
    MIXTRAL = "block_sparse_moe.experts.0.w1"
    FUSED = "mlp.experts.gate_up_proj"
    TRANSPOSED = "mlp.experts.gate_up_proj_bias"
    MXFP4 = "mlp.experts.gate_up_proj_blocks"

    @classmethod
    def of(cls, sources: Collection[str]) -> ExpertNaming:
        """Returns the spelling of a checkpoint with these tensors."""
        if any(".block_sparse_moe." in source for source in sources):
            return cls.MIXTRAL
        found = {
            each for each in (cls.MXFP4, cls.TRANSPOSED, cls.FUSED) for source in sources if source.endswith(each.value)
        }
        return next((each for each in (cls.MXFP4, cls.TRANSPOSED, cls.FUSED) if each in found), cls.EACH)


class Form(Enum):
    """Layout of a tensor's elements in a checkpoint."""

    PLAIN = "rows of the parameter"
    NUMBERS = "rows of whole numbers"
    TRANSPOSED = "matrices ``[n, columns, rows]``"
    # Two tensors: ``[n, rows, groups, 16]`` bytes, two 4-bit values of a row each, the lower first; and ``[n, rows,
    # groups]`` exponents (OCP Microscaling Formats, 2023).
    MXFP4 = "blocks and scales"


class Cut(NamedTuple):
    """A part of a tensor along one dimension, or several parts."""

    dim: int
    begin: int
    end: int
    others: tuple[tuple[int, int], ...] = ()  # begin and end of each further part

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each."""
        return ((self.begin, self.end), *self.others)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One checkpoint tensor and its place in a parameter."""

    source: str
    shape: tuple[int, ...]
    # First row of the parameter that it fills; tensors of three dimensions count as their matrices stacked.
    start: int = 0
    form: Form = Form.PLAIN
    is_interleaved: bool = False  # gate and up rows alternate; the parameter has all gate rows first
    cut: Cut | None = None  # the part that the parameter has; None is all

    @property
    def is_converted(self) -> bool:
        """Whether its elements cannot be read in place."""
        return self.form not in (Form.PLAIN, Form.NUMBERS) or self.is_interleaved

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it fills."""
        return self.part[0] if len(self.shape) == 1 else math.prod(self.part[:-1])

    def spans(self, dim: int) -> tuple[tuple[int, int], ...]:
        """Returns begin and end of each part that the parameter has along a dimension."""
        return self.cut.parts if self.cut is not None and self.cut.dim == dim else ((0, self.shape[dim]),)

    def in_units(self, source: str, of_rows: int, of_columns: int) -> TensorSource:
        """Returns the tensor ``source``, which has an element for so many rows and columns of this matrix, and its part."""
        units, cut = (of_rows, of_columns), self.cut
        if cut is not None:
            unit = units[cut.dim]
            assert cut.begin % unit == 0 == cut.end % unit and not cut.others, (
                f"{self.source} is cut at {cut} in units of {unit}"
            )
            cut = Cut(cut.dim, cut.begin // unit, cut.end // unit)
        shape = tuple(-(-size // unit) for size, unit in zip(self.shape, units, strict=True))
        return TensorSource(source, shape, cut=cut)

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part that the parameter has."""
        if self.cut is None:
            return self.shape
        size = sum(end - begin for begin, end in self.cut.parts)
        return (*self.shape[: self.cut.dim], size, *self.shape[self.cut.dim + 1 :])


def parameter_table(
    config: ModelConfig, naming: ExpertNaming = ExpertNaming.EACH
) -> dict[str, tuple[TensorSource, ...]]:
    """Returns every parameter of the decoder and the checkpoint tensors stacked in it."""
    hidden = config.hidden_size
    table = {
        "embedding": stack(("model.embed_tokens.weight", (config.vocab_size, hidden))),
        "norm": stack(("model.norm.weight", (hidden,))),
    }
    if not config.tie_embeddings:
        table["head"] = stack(("lm_head.weight", (config.vocab_size, hidden)))
    for layer in range(config.num_layers):
        table |= layer_table(config, layer, f"model.layers.{layer}.", naming=naming)
    return table


def text_name(source: str) -> str:
    """Returns the name that a tensor of a multimodal checkpoint has in one of its text model alone."""
    for prefix, replacement in _NESTED.items():
        if source.startswith(prefix):
            return replacement + source.removeprefix(prefix)
    return source


# Prefixes of multimodal checkpoints, as released and as transformers 5 names its modules; the longest first.
_NESTED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def bundled_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Returns name prefixes of draft heads' tensors in the model's own files, which are not layers of the model."""
    if config.compressed is not None or config.delta is not None:
        return ("mtp.",)
    extra = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return (*(f"model.layers.{layer}." for layer in extra), *(f"model.mtp_layers.{i}." for i in range(len(extra))))


def layer_table(
    config: ModelConfig, layer: int, theirs: str, *, width: int | None = None, naming: ExpertNaming = ExpertNaming.EACH
) -> dict[str, tuple[TensorSource, ...]]:
    """Returns the parameters of one layer.

    ``theirs`` is the prefix of the layer's names in the checkpoint; ``width`` that of attention's input, by default
    ``hidden_size``.
    """
    hidden, ours = config.hidden_size, f"layers.{layer}."
    table = {ours + "input_norm": stack((theirs + "input_layernorm.weight", (hidden,)))}
    if config.delta is not None and layer in config.delta.layers:
        table |= _delta(config.delta, hidden, ours, theirs + "linear_attn.")
    elif config.has_attention_gates:
        table |= _gated_attention(config, ours, theirs + "self_attn.")
    elif config.latent is None:
        table |= _attention(config, ours, theirs + "self_attn.", width or hidden)
    else:
        index = config.index if config.index is not None and layer in config.index.layers else None
        table |= _latent_attention(config.latent, index, config.num_heads, hidden, ours, theirs + "self_attn.")
    table |= _mlp_norms(config, ours, theirs)
    if config.experts is not None and config.experts.is_in(layer):
        return table | _experts(config.experts, hidden, ours, theirs, naming)
    return table | _mlp(config, ours, theirs + "mlp.")


def _attention(config: ModelConfig, ours: str, theirs: str, width: int) -> dict[str, tuple[TensorSource, ...]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = _projection(
        ours + "qkv", theirs, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, width, config.has_qkv_bias
    )
    table |= _projection(ours + "out", theirs, {"o_proj": config.hidden_size}, queries, config.has_out_bias)
    if config.has_sinks:
        table[ours + "sinks"] = stack((theirs + "sinks", (config.num_heads,)))
    if config.has_qk_norm:
        table[ours + "q_norm"] = stack((theirs + "q_norm.weight", (config.head_dim,)))
        table[ours + "k_norm"] = stack((theirs + "k_norm.weight", (config.head_dim,)))
    return table


def _gated_attention(config: ModelConfig, ours: str, theirs: str) -> dict[str, tuple[TensorSource, ...]]:
    hidden, queries, keys = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    return {
        ours + "query_gate": stack((theirs + "q_proj.weight", (2 * queries, hidden))),
        ours + "key_value": stack(*((f"{theirs}{name}_proj.weight", (keys, hidden)) for name in "kv")),
        ours + "out": stack((theirs + "o_proj.weight", (hidden, queries))),
        ours + "q_norm": stack((theirs + "q_norm.weight", (config.head_dim,))),
        ours + "k_norm": stack((theirs + "k_norm.weight", (config.head_dim,))),
    }


def _delta(delta: DeltaConfig, hidden: int, ours: str, theirs: str) -> dict[str, tuple[TensorSource, ...]]:
    heads, channels, values = delta.num_value_heads, delta.num_channels, delta.value_size
    rows = {"in_proj_qkv": channels, "in_proj_b": heads, "in_proj_a": heads, "in_proj_z": values}
    into = _projection(ours + "delta_in", theirs, rows, hidden, False)
    if delta.is_interleaved:
        into = _projection(ours + "delta_qkvz", theirs, {"in_proj_qkvz": channels + values}, hidden, False)
        into |= _projection(ours + "delta_ba", theirs, {"in_proj_ba": 2 * heads}, hidden, False)
    return into | {
        ours + "delta_conv": stack((theirs + "conv1d.weight", (channels, 1, delta.conv_width))),
        ours + "decay_rate": stack((theirs + "A_log", (heads,))),
        ours + "decay_bias": stack((theirs + "dt_bias", (heads,))),
        ours + "delta_gain": stack((theirs + "norm.weight", (delta.value_dim,))),
        ours + "out": stack((theirs + "out_proj.weight", (hidden, values))),
    }


def _latent_attention(
    latent: LatentConfig, index: IndexConfig | None, num_heads: int, hidden: int, ours: str, theirs: str
) -> dict[str, tuple[TensorSource, ...]]:
    queries, row = num_heads * latent.key_dim, (theirs + "kv_a_proj_with_mqa.weight", (latent.width, hidden))
    table = {
        ours + "latent_norm": stack((theirs + "kv_a_layernorm.weight", (latent.rank,))),
        ours + "latent_up": stack(
            (theirs + "kv_b_proj.weight", (num_heads * (latent.nope_dim + latent.value_dim), latent.rank))
        ),
        ours + "out": stack((theirs + "o_proj.weight", (hidden, num_heads * latent.value_dim))),
    }
    if latent.query_rank is None:
        return table | {ours + "latents": stack((theirs + "q_proj.weight", (queries, hidden)), row)}
    into = [(theirs + "q_a_proj.weight", (latent.query_rank, hidden)), row]
    if index is not None:
        its, queries_of_index = theirs + "indexer.", index.num_heads * index.width
        into += [(its + "wk.weight", (index.width, hidden)), (its + "weights_proj.weight", (index.num_heads, hidden))]
        table |= {
            ours + "index_up": stack((its + "wq_b.weight", (queries_of_index, latent.query_rank))),
            ours + "index_norm": stack((its + "k_norm.weight", (index.width,))),
            ours + "index_norm_bias": stack((its + "k_norm.bias", (index.width,))),
        }
    return table | {
        ours + "latents": stack(*into),
        ours + "query_latent_norm": stack((theirs + "q_a_layernorm.weight", (latent.query_rank,))),
        ours + "query_up": stack((theirs + "q_b_proj.weight", (queries, latent.query_rank))),
    }


def _mlp_norms(config: ModelConfig, ours: str, theirs: str) -> dict[str, tuple[TensorSource, ...]]:
    """Returns the norm before the MLP; with norms on outputs it has another name, because theirs comes after attention."""
    names = {"mlp_norm": "post_attention_layernorm"}
    if config.has_out_norms:
        names = {
            "attn_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
    return {ours + name: stack((f"{theirs}{its}.weight", (config.hidden_size,))) for name, its in names.items()}


def _mlp(config: ModelConfig, ours: str, theirs: str) -> dict[str, tuple[TensorSource, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = {"gate_proj": inner, "up_proj": inner}
    return _projection(ours + "gate_up", theirs, gate_up, hidden, config.has_mlp_bias) | _projection(
        ours + "down", theirs, {"down_proj": hidden}, inner, config.has_mlp_bias
    )


def _projection(
    ours: str, theirs: str, rows: dict[str, int], width: int, has_bias: bool
) -> dict[str, tuple[TensorSource, ...]]:
    """Returns stacked projections of one input, by name and rows, and their biases."""
    table = {ours: stack(*((f"{theirs}{name}.weight", (count, width)) for name, count in rows.items()))}
    if has_bias:
        table[ours + "_bias"] = stack(*((f"{theirs}{name}.bias", (count,)) for name, count in rows.items()))
    return table


def _experts(
    experts: ExpertsConfig, hidden: int, ours: str, theirs: str, naming: ExpertNaming
) -> dict[str, tuple[TensorSource, ...]]:
    """Returns gate and up rows, expert by expert, and the experts' down rows."""
    inner, count = experts.intermediate_size, experts.num_experts
    theirs += "block_sparse_moe." if naming is ExpertNaming.MIXTRAL else "mlp."
    gate, up, down = ("w1", "w3", "w2") if naming is ExpertNaming.MIXTRAL else ("gate_proj", "up_proj", "down_proj")
    gate_up_parts: list[Part] = []
    down_parts: list[Part] = []
    for expert in range(count):
        one = f"{theirs}experts.{expert}."
        gate_up_parts += [(f"{one}{name}.weight", (inner, hidden)) for name in (gate, up)]
        down_parts.append((f"{one}{down}.weight", (hidden, inner)))
    if naming is ExpertNaming.FUSED:
        gate_up_parts = [(theirs + "experts.gate_up_proj", (count, 2 * inner, hidden))]
        down_parts = [(theirs + "experts.down_proj", (count, hidden, inner))]
    router = theirs + ("router" if experts.has_bias else "gate")
    table = {ours + "router": stack((router + ".weight", (count, hidden)))}
    if experts.has_bias:
        table |= {ours + "router_bias": stack((router + ".bias", (count,)))}
        table |= _expert_biases(experts, hidden, ours, theirs)
    if experts.routing is not None:
        table[ours + "choice_bias"] = stack((theirs + "gate.e_score_correction_bias", (count,)))
    if size := experts.shared_size:
        shared, whose = {"gate_proj": size, "up_proj": size}, theirs + "shared_experts."
        if experts.has_shared_gate:
            whose = theirs + "shared_expert."
            table[ours + "shared_gate"] = stack((theirs + "shared_expert_gate.weight", (1, hidden)))
        table |= _projection(ours + "shared_gate_up", whose, shared, hidden, False)
        table |= _projection(ours + "shared_down", whose, {"down_proj": hidden}, size, False)
    if naming in (ExpertNaming.TRANSPOSED, ExpertNaming.MXFP4):
        gate_up = _converted(theirs + "experts.gate_up_proj", (count, 2 * inner, hidden), naming, is_interleaved=True)
        return table | {
            ours + "experts_gate_up": gate_up,
            ours + "experts_down": _converted(theirs + "experts.down_proj", (count, hidden, inner), naming),
        }
    return table | {ours + "experts_gate_up": stack(*gate_up_parts), ours + "experts_down": stack(*down_parts)}


def _expert_biases(experts: ExpertsConfig, hidden: int, ours: str, theirs: str) -> dict[str, tuple[TensorSource, ...]]:
    gate_up = (experts.num_experts, 2 * experts.intermediate_size)
    return {
        ours + "experts_gate_up_bias": (
            TensorSource(theirs + "experts.gate_up_proj_bias", gate_up, is_interleaved=True),
        ),
        ours + "experts_down_bias": stack((theirs + "experts.down_proj_bias", (experts.num_experts, hidden))),
    }


def _converted(
    source: str, shape: tuple[int, int, int], naming: ExpertNaming, *, is_interleaved: bool = False
) -> tuple[TensorSource, ...]:
    """Returns the tensors of matrices ``shape``, ``(experts, rows, columns)``."""
    count, rows, columns = shape
    if naming is ExpertNaming.TRANSPOSED:
        return (TensorSource(source, (count, columns, rows), form=Form.TRANSPOSED, is_interleaved=is_interleaved),)
    groups = (count, rows, columns // MXFP4_GROUP)
    return (
        TensorSource(source + "_blocks", (*groups, MXFP4_GROUP // 2), form=Form.MXFP4, is_interleaved=is_interleaved),
        TensorSource(source + "_scales", groups, form=Form.MXFP4, is_interleaved=is_interleaved),
    )


def parameter_shape(pieces: tuple[TensorSource, ...]) -> tuple[int, ...]:
    """Returns the shape of a parameter: a vector or a matrix."""
    first = pieces[0]
    if first.form is Form.MXFP4:
        count, rows, groups, _ = first.part
        return (count * rows, groups * MXFP4_GROUP)
    if first.form is Form.TRANSPOSED:
        count, columns, rows = first.part
        return (count * rows, columns)
    rows = sum(piece.num_rows for piece in pieces)
    return (rows,) if len(first.shape) == 1 else (rows, first.part[-1])


def stack(*parts: Part) -> tuple[TensorSource, ...]:
    """Returns tensors stacked by rows."""
    pieces: list[TensorSource] = []
    start = 0
    for name, shape in parts:
        pieces.append(TensorSource(name, shape, start))
        start += pieces[-1].num_rows
    return tuple(pieces)
