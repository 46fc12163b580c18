"""Reads the shape of compressed attention and of the streams around it (DeepSeek-V4), without torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields, Count, Epsilon, Size, convert


class LayerKind(StrEnum):
    """What a layer's tokens see beside their window."""

    WINDOW = "sliding_attention"  # nothing
    SPARSE = "compressed_sparse_attention"  # the compressed rows that an index chooses
    HEAVY = "heavily_compressed_attention"  # all compressed rows


class StreamsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A residual stream of several, mixed by doubly stochastic matrices (manifold-constrained hyper-connections)."""

    count: int
    iterations: int  # of Sinkhorn and Knopp's algorithm
    eps: float  # added to weights and to the sums that divide them


class CompressedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose heads share one row, over a window of tokens and rows that each stand for several tokens.

    A row of ratio r is made of the inputs of r tokens, in sparse layers of those of 2 r tokens. A token at position p
    sees row v if v < (p + 1) // r.
    """

    kinds: tuple[LayerKind, ...]  # of each layer
    sparse_ratio: int  # tokens of a compressed row in sparse layers
    heavy_ratio: int  # likewise in heavy ones
    window: int  # a token at position p sees the rows of tokens above p - window
    width: int  # elements of a row, key and value at once, and of a head's query
    rope_dim: int  # the last elements of a row, which are rotated, paired with their neighbours
    query_rank: int  # elements of the queries' own latent
    num_groups: int  # groups of heads whose outputs are projected apart
    out_rank: int  # elements that each of these projections has
    index_heads: int
    index_width: int  # elements of an index key, of which the last ``rope_dim`` are rotated
    index_topk: int  # compressed rows that a token of a sparse layer sees at most
    streams: StreamsConfig

    def ratio(self, layer: int) -> int:
        """Returns the tokens of a compressed row of a layer; 0 if it has none."""
        return {LayerKind.SPARSE: self.sparse_ratio, LayerKind.HEAVY: self.heavy_ratio}.get(self.kinds[layer], 0)

    @property
    def ratios(self) -> tuple[int, ...]:
        """The different ratios of the layers, ascending."""
        return tuple(sorted({self.ratio(layer) for layer in range(len(self.kinds))} - {0}))

    @property
    def index_ratio(self) -> int:
        """Tokens of a row that an index chooses; 0 without such layers."""
        return self.sparse_ratio if LayerKind.SPARSE in self.kinds else 0

    def count(self, kind: LayerKind) -> int:
        """Returns the layers of a kind."""
        return self.kinds.count(kind)

    def num_params(self, hidden_size: int, num_heads: int) -> int:
        """Returns the parameters of all layers' attention and mixing of streams, and of the last mixing."""
        queries = num_heads * self.width
        layer = (hidden_size + 1 + queries) * self.query_rank + self.width * (hidden_size + 1) + num_heads
        layer += self.out_rank * (queries + self.num_groups * hidden_size)
        count = self.streams.count
        mix = (2 + count) * count * (count * hidden_size + 1) + 3
        last = count * (count * hidden_size + 1) + 1
        heavy = self._compressor(hidden_size, self.heavy_ratio, self.width, 1)
        sparse = self._compressor(hidden_size, self.sparse_ratio, self.width, 2)
        sparse += self._compressor(hidden_size, self.sparse_ratio, self.index_width, 2)
        sparse += self.index_heads * (self.query_rank * self.index_width + hidden_size)
        compressed = self.count(LayerKind.HEAVY) * heavy + self.count(LayerKind.SPARSE) * sparse
        return len(self.kinds) * (layer + 2 * mix) + compressed + last

    @staticmethod
    def _compressor(hidden_size: int, ratio: int, width: int, series: int) -> int:
        return series * width * (2 * hidden_size + ratio) + width

    def step_elements(self, num_heads: int, hidden_size: int) -> int:
        """Returns elements of a token in one layer's attention, streams included."""
        inputs = 4 * (self.width + self.index_width)  # kv and scores of both series
        queries = 3 * num_heads * self.width + self.index_heads * self.index_width
        return queries + inputs + self.num_groups * self.out_rank + 2 * self.streams.count * hidden_size


class _Fields(msgspec.Struct):
    """The fields that describe compressed attention, in the spelling of transformers 5."""

    layer_types: list[str]
    sparse_ratio: Size
    heavy_ratio: Size
    sliding_window: Size
    head_dim: Size
    qk_rope_head_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    hc_mult: Size
    hc_sinkhorn_iters: Count
    hc_eps: Epsilon


_KIND_OF_RATIO = {0: LayerKind.WINDOW, 4: LayerKind.SPARSE, 128: LayerKind.HEAVY}
_DEFAULT_RATIOS = {LayerKind.SPARSE: 4, LayerKind.HEAVY: 128}
_DEFAULT_ROPE_DIM, _DEFAULT_HEAD_DIM = 64, 512
_NUM_HASH_LAYERS = 3
_HASH, _CHOSEN = "hash_moe", "moe"
_MTP_RATIOS = 1  # entries of ``compress_ratios`` behind those of the layers, for one head that drafts token after token
_VISION = ("vision_config", "vision_n_layers", "vision_hidden_size")
# The largest of each size; beyond these, shapes and tables would themselves fill memory.
_MOST = {"o_groups": 2**10, "o_lora_rank": 2**16, "index_n_heads": 2**12, "index_head_dim": 2**14, "hc_mult": 64}


def respell_compressed(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of a model with compressed attention in one spelling.

    Files as they were released count layers by ratios and hash layers; transformers names a type for each layer, and
    rotations ``main``, of layers with a window alone, and ``compress``, of the others. Afterwards rotations are named
    as in models whose windows have their own.

    Raises:
        ModelError: They cannot be read, or describe a part that is not supported.
    """
    fields = dict(raw)
    _refuse_parts(fields)
    count = fields.get("num_hidden_layers")
    if not isinstance(count, int):
        raise _nonsense(path, f"num_hidden_layers is {count!r}")
    rates = fields.pop("compress_rates", None) or {}
    if not isinstance(rates, dict):
        raise _nonsense(path, f"compress_rates is {rates!r}")
    for kind, old, new in (
        (LayerKind.SPARSE, "compress_rate_csa", "sparse_ratio"),
        (LayerKind.HEAVY, "compress_rate_hca", "heavy_ratio"),
    ):
        given = fields.pop(old, None)
        fields[new] = (rates.get(kind) or _DEFAULT_RATIOS[kind]) if given is None else given
    fields["layer_types"] = _layer_types(fields, count, path)
    hashed = fields.pop("num_hash_layers", None)
    if fields.get("mlp_layer_types") is None:
        hashed = _NUM_HASH_LAYERS if hashed is None else hashed
        fields["mlp_layer_types"] = [_HASH if layer < hashed else _CHOSEN for layer in range(count)]
    else:
        fields["mlp_layer_types"] = fields["mlp_layer_types"][:count]
    fields["qk_rope_head_dim"] = _rope_dim(fields, path)
    fields["intermediate_size"] = fields.get("moe_intermediate_size")
    return fields | _rotations(fields, path)


def _refuse_parts(fields: dict[str, Any]) -> None:
    for name in fields:
        if name.startswith("dspark_") and fields[name]:
            raise ModelError(
                f"DeepseekV4ForCausalLM with {name} is not supported yet: drafts of DSpark. Checkpoints whose head drafts one "
                "token after another are supported.",
                param="model",
            )
    if fields.get("mlp_bias"):
        raise ModelError(
            "DeepseekV4ForCausalLM with mlp_bias is not supported yet; without biases it is.", param="model"
        )
    if named := [name for name in _VISION if fields.get(name)]:
        raise ModelError(
            f"DeepseekV4ForCausalLM with {', '.join(named)} is not supported: images. Give a checkpoint of text alone.",
            param="model",
        )


def _layer_types(fields: dict[str, Any], count: int, path: Path) -> list[str]:
    """Returns the type of each layer, from a list of them, from one of ratios, or as in the model without either."""
    ratios, types = fields.pop("compress_ratios", None), fields.get("layer_types")
    if ratios is not None:
        if not isinstance(ratios, list) or len(ratios) < count:
            raise _nonsense(path, f"compress_ratios is {ratios!r}, for {count} layers")
        if len(ratios) > count + _MTP_RATIOS:
            raise ModelError(
                f"DeepseekV4ForCausalLM with {len(ratios) - count} compress_ratios behind its {count} layers is not supported "
                "yet: drafts of DSpark. Checkpoints whose head drafts one token after another are supported.",
                param="model",
            )
        given = ratios[:count]
        if types is None:
            if unknown := sorted({str(ratio) for ratio in given if ratio not in _KIND_OF_RATIO}):
                raise ModelError(
                    f"compress_ratios has {', '.join(unknown)}; without layer_types only "
                    f"{', '.join(map(str, _KIND_OF_RATIO))} are supported. Name layer_types and compress_rates.",
                    param="model",
                )
            return [_KIND_OF_RATIO[ratio] for ratio in given]
    if types is None:
        return [LayerKind.SPARSE if layer >= 2 and layer % 2 else LayerKind.HEAVY for layer in range(count)]
    if not isinstance(types, list) or len(types) < count:
        raise _nonsense(path, f"layer_types is {types!r}, for {count} layers")
    return types[:count]


def _rope_dim(fields: dict[str, Any], path: Path) -> int:
    factor, head_dim = fields.pop("partial_rotary_factor", None), fields.get("head_dim") or _DEFAULT_HEAD_DIM
    given = fields.get("qk_rope_head_dim")
    if given is not None:
        return given  # type: ignore[no-any-return]
    if factor is None:
        return _DEFAULT_ROPE_DIM
    if not isinstance(factor, (int, float)) or not 0 < factor <= 1 or not isinstance(head_dim, int):
        raise _nonsense(path, f"partial_rotary_factor is {factor!r}")
    return int(head_dim * factor)


def _rotations(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns both rotations. YaRN scales no cosines here, whatever factor it would have."""
    given = fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise _nonsense(path, f"rope_parameters is {given!r}")
    main, compress = given.get("main"), given.get("compress")
    if not (isinstance(main, dict) and isinstance(compress, dict)):
        main, compress = {}, {name: value for name, value in given.items() if name not in ("main", "compress")}
        compress.pop("rope_theta", None)  # of the file's only rotation, which is that of windows
    main = {name: value for name, value in main.items() if name != "partial_rotary_factor"}
    compress = {name: value for name, value in compress.items() if name != "partial_rotary_factor"}
    if (compress.get("rope_type") or compress.get("type")) == "yarn":
        compress.setdefault("attention_factor", 1.0)
    theta = main.get("rope_theta") or fields.get("rope_theta") or 10_000.0
    wide = compress.get("rope_theta") or fields.pop("compress_rope_theta", None) or 160_000.0
    fields.pop("compress_rope_theta", None)
    return {
        "rope_theta": wide,
        "rope_local_base_freq": theta,
        "rope_parameters": {
            "full_attention": compress | {"rope_theta": wide},
            "sliding_attention": main | {"rope_theta": theta},
        },
    }


def read_compressed(raw: dict[str, Any], fields: ConfigFields, path: Path) -> CompressedConfig:
    """Returns the compressed attention that ``config.json`` describes.

    Args:
        raw: All fields, from ``respell_compressed``, with the family's defaults.
        fields: Those that all models have.
        path: For messages.

    Raises:
        ModelError: A field is missing, has the wrong type, is out of range, or contradicts others.
    """
    own = convert(raw, _Fields, path)
    if unknown := sorted(set(own.layer_types) - set(LayerKind)):
        raise ModelError(
            f"layer_types of config.json has {', '.join(unknown)}, which is not supported yet. Supported: "
            f"{', '.join(LayerKind)}.",
            param="model",
        )
    config = CompressedConfig(
        kinds=tuple(LayerKind(kind) for kind in own.layer_types),
        sparse_ratio=own.sparse_ratio,
        heavy_ratio=own.heavy_ratio,
        window=own.sliding_window,
        width=own.head_dim,
        rope_dim=own.qk_rope_head_dim,
        query_rank=own.q_lora_rank,
        num_groups=own.o_groups,
        out_rank=own.o_lora_rank,
        index_heads=own.index_n_heads,
        index_width=own.index_head_dim,
        index_topk=own.index_topk,
        streams=StreamsConfig(count=own.hc_mult, iterations=own.hc_sinkhorn_iters, eps=own.hc_eps),
    )
    nonsense = {
        **{
            f"{name} is {getattr(own, name)}, and the most is {most}": getattr(own, name) > most
            for name, most in _MOST.items()
        },
        f"{fields.num_key_value_heads} key-value heads, where all heads share one row": fields.num_key_value_heads
        not in (None, 1),
        f"{fields.num_attention_heads} attention heads do not divide into {own.o_groups} groups": (
            fields.num_attention_heads % own.o_groups
        ),
        f"qk_rope_head_dim {own.qk_rope_head_dim} is odd, but RoPE turns pairs": own.qk_rope_head_dim % 2,
        f"qk_rope_head_dim {own.qk_rope_head_dim} is more than rows or index keys have": own.qk_rope_head_dim
        > min(own.head_dim, own.index_head_dim),
        "hc_sinkhorn_iters is 0, and streams are mixed after one iteration at least": own.hc_sinkhorn_iters < 1,
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise _nonsense(path, fact)
    return config


def _nonsense(path: Path, fact: str) -> ModelError:
    return ModelError(
        f"{path.name} in {str(path.parent)!r} makes no sense: {fact}. Correct it, or fetch the file again.",
        param="model",
    )
