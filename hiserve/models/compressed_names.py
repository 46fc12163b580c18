"""Maps each parameter of a decoder with compressed attention to its tensors in a checkpoint (DeepSeek-V4)."""

from __future__ import annotations

import re

from hiserve.models.compressed_config import CompressedConfig, LayerKind
from hiserve.models.experts_config import ExpertsConfig
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import ExpertNaming, Form, Part, TensorSource, parameter_table, stack

Table = dict[str, tuple[TensorSource, ...]]

# Parts of the names in released files, and what transformers calls them; each is applied to all names, in this order.
_RELEASED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(layers|norm|hc_head)(?=[._])", r"model.\1"),
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"\bhc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"(\.self_attn\..*|\.self_attn)\.norm\.", r"\1.kv_norm."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.ape$", ".position_bias"),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(\.mlp\..*)\.w1\.", r"\1.gate_proj."),
        (r"(\.mlp\..*)\.w2\.", r"\1.down_proj."),
        (r"(\.mlp\..*)\.w3\.", r"\1.up_proj."),
        (r"(\.(self_attn|mlp)\..*)\.scale$", r"\1.weight_scale_inv"),
    )
)


def compressed_name(source: str) -> str:
    """Returns the name that transformers gives to a tensor of a released checkpoint; its own names stay."""
    for pattern, replacement in _RELEASED:
        source = pattern.sub(replacement, source)
    return source


def table_of(config: ModelConfig, naming: ExpertNaming = ExpertNaming.EACH) -> Table:
    """Returns every parameter of a model's decoder and the checkpoint tensors stacked in it."""
    return parameter_table(config, naming) if config.compressed is None else compressed_table(config, naming)


def compressed_table(config: ModelConfig, naming: ExpertNaming = ExpertNaming.EACH) -> Table:
    """Returns every parameter of the decoder and the checkpoint tensors stacked in it."""
    hidden, compressed = config.hidden_size, config.compressed
    assert compressed is not None, config.architecture
    table = {
        "embedding": stack(("model.embed_tokens.weight", (config.vocab_size, hidden))),
        "norm": stack(("model.norm.weight", (hidden,))),
        **_mix("head_mix", "model.hc_head.hc_", compressed.streams.count, compressed.streams.count, hidden, 1),
    }
    if not config.tie_embeddings:
        table["head"] = stack(("lm_head.weight", (config.vocab_size, hidden)))
    for layer in range(config.num_layers):
        table |= _layer(config, compressed, layer, f"model.layers.{layer}.", naming)
    return table


def stream_head_table(config: ModelConfig, theirs: str) -> Table:
    """Returns every parameter of a head that drafts from streams, whose names begin with ``theirs`` in a checkpoint.

    ``config`` is that of its one layer.
    """
    hidden, compressed = config.hidden_size, config.compressed
    assert compressed is not None, config.architecture
    norms = {"embedding_norm": "enorm", "state_norm": "hnorm", "norm": "norm"}
    joins = {"embedding_join": "e_proj", "state_join": "h_proj"}
    return {
        **{ours: stack((f"{theirs}{name}.weight", (hidden,))) for ours, name in norms.items()},
        **{ours: stack((f"{theirs}{name}.weight", (hidden, hidden))) for ours, name in joins.items()},
        **_mix("head_mix", theirs + "hc_head.hc_", compressed.streams.count, compressed.streams.count, hidden, 1),
        **_layer(config, compressed, 0, theirs, ExpertNaming.EACH),
    }


def _layer(config: ModelConfig, compressed: CompressedConfig, layer: int, theirs: str, naming: ExpertNaming) -> Table:
    hidden, ours = config.hidden_size, f"layers.{layer}."
    count = compressed.streams.count
    assert config.experts is not None, config.architecture
    return {
        ours + "input_norm": stack((theirs + "input_layernorm.weight", (hidden,))),
        ours + "mlp_norm": stack((theirs + "post_attention_layernorm.weight", (hidden,))),
        **_mix(ours + "attn_mix", theirs + "attn_hc.", count, (2 + count) * count, hidden, 3),
        **_mix(ours + "mlp_mix", theirs + "ffn_hc.", count, (2 + count) * count, hidden, 3),
        **_attention(compressed, config.num_heads, hidden, compressed.kinds[layer], ours, theirs + "self_attn."),
        **_experts(config, config.experts, layer, ours, theirs + "mlp.", naming),
    }


def _mix(ours: str, theirs: str, count: int, rows: int, hidden: int, num_scales: int) -> Table:
    """Returns the weights that streams are mixed by: ``rows`` of them for ``count`` streams."""
    return {
        ours: stack((theirs + "fn", (rows, count * hidden))),
        ours + "_base": stack((theirs + "base", (rows,))),
        ours + "_scale": stack((theirs + "scale", (num_scales,))),
    }


def _attention(
    compressed: CompressedConfig, num_heads: int, hidden: int, kind: LayerKind, ours: str, theirs: str
) -> Table:
    """Returns the parameters of a layer's attention; all projections of one input are one matrix."""
    rank, width, queries = compressed.query_rank, compressed.width, num_heads * compressed.width
    groups, out_rank = compressed.num_groups, compressed.out_rank
    into: list[Part] = [(theirs + "q_a_proj.weight", (rank, hidden)), (theirs + "kv_proj.weight", (width, hidden))]
    up: list[Part] = [(theirs + "q_b_proj.weight", (queries, rank))]
    table = {
        ours + "query_latent_norm": stack((theirs + "q_a_norm.weight", (rank,))),
        ours + "row_norm": stack((theirs + "kv_norm.weight", (width,))),
        ours + "sinks": stack((theirs + "sinks", (num_heads,))),
        ours + "out_groups": stack((theirs + "o_a_proj.weight", (groups * out_rank, queries // groups))),
        ours + "out": stack((theirs + "o_b_proj.weight", (hidden, groups * out_rank))),
    }
    theirs += "compressor."
    if kind is not LayerKind.WINDOW:
        num_series = 2 if kind is LayerKind.SPARSE else 1
        ratio = compressed.sparse_ratio if kind is LayerKind.SPARSE else compressed.heavy_ratio
        table |= _compressor(into, ours, theirs, ratio, width, num_series, hidden)
    if kind is LayerKind.SPARSE:
        theirs += "indexer."
        inner = compressed.index_width
        table |= _compressor(into, ours + "index_", theirs, compressed.sparse_ratio, inner, 2, hidden)
        into.append((theirs + "scorer.weights_proj.weight", (compressed.index_heads, hidden)))
        up.append((theirs + "q_b_proj.weight", (compressed.index_heads * inner, rank)))
    return table | {ours + "into": stack(*into), ours + "query_up": stack(*up)}


def _compressor(
    into: list[Part], ours: str, theirs: str, ratio: int, width: int, num_series: int, hidden: int
) -> Table:
    """Adds a compressor's projections to those of its input, and returns its other parameters."""
    rows = num_series * width
    into += [(f"{theirs}{name}.weight", (rows, hidden)) for name in ("kv_proj", "gate_proj")]
    return {
        ours + "position_bias": stack((theirs + "position_bias", (ratio, rows))),
        ours + "compressed_norm": stack((theirs + "kv_norm.weight", (width,))),
    }


def _experts(
    config: ModelConfig, experts: ExpertsConfig, layer: int, ours: str, theirs: str, naming: ExpertNaming
) -> Table:
    inner, count, hidden = experts.intermediate_size, experts.num_experts, config.hidden_size
    gate_up: list[Part] = [(theirs + "experts.gate_up_proj", (count, 2 * inner, hidden))]
    down: list[Part] = [(theirs + "experts.down_proj", (count, hidden, inner))]
    if naming is not ExpertNaming.FUSED:
        each = [f"{theirs}experts.{expert}." for expert in range(count)]
        gate_up = [(f"{one}{name}.weight", (inner, hidden)) for one in each for name in ("gate_proj", "up_proj")]
        down = [(one + "down_proj.weight", (hidden, inner)) for one in each]
    shared, size = theirs + "shared_experts.", experts.shared_size
    choice = {ours + "choice_bias": stack((theirs + "gate.e_score_correction_bias", (count,)))}
    if experts.hashes(layer):
        shape = (config.vocab_size, experts.num_per_token)
        choice = {ours + "expert_table": (TensorSource(theirs + "gate.tid2eid", shape, form=Form.NUMBERS),)}
    return {
        ours + "router": stack((theirs + "gate.weight", (count, hidden))),
        **choice,
        ours + "shared_gate_up": stack(
            *((f"{shared}{name}.weight", (size, hidden)) for name in ("gate_proj", "up_proj"))
        ),
        ours + "shared_down": stack((shared + "down_proj.weight", (hidden, size))),
        ours + "experts_gate_up": stack(*gate_up),
        ours + "experts_down": stack(*down),
    }
