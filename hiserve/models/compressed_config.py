"""Reads the shape of compressed attention and of the streams around it (DeepSeek-V4), without torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hiserve.core.row_shapes import PackedShape, packed_key, packed_row
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields, Count, Epsilon, Size, convert, nonsense


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
    def packed_row(self) -> PackedShape | None:
        """Rows in 8 bits; None if they do not fit into tiles."""
        return packed_row(self.width, self.rope_dim)

    @property
    def packed_key(self) -> PackedShape | None:
        """Likewise of the index."""
        return packed_key(self.index_width)

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


# The largest of each size; beyond these, shapes and tables would themselves fill memory, and a step would not end.
_MOST = {
    "o_groups": 2**10,
    "o_lora_rank": 2**16,
    "index_n_heads": 2**12,
    "index_head_dim": 2**14,
    "index_topk": 2**13,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 2**10,
}


def read_compressed(raw: dict[str, Any], fields: ConfigFields, path: Path) -> CompressedConfig:
    """Returns the compressed attention that ``config.json`` describes.

    Args:
        raw: All fields, from ``compressed_spelling.respell_compressed``, with the family's defaults.
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
    facts = {
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
    for fact, is_so in facts.items():
        if is_so:
            raise nonsense(path, fact)
    return config
