"""Reads the shape of an index beside latents, without torch (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan
from hiserve.core.row_shapes import PackedShape, packed_key
from hiserve.models.config_fields import ConfigFields, Count, Size, convert, nonsense

KEYS = "index"  # the group of the keys
_FULL, _SHARED = "full", "shared"
_SLOT_ELEMENTS = 4  # of 16 bits: slots have 64
_LETTERS = {"F": _FULL, "S": _SHARED}
_MOST = {"index_n_heads": 2**12, "index_head_dim": 2**14}


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys beside the latents, one of each token and layer, by whose scores a token chooses the tokens that it sees."""

    query_rank: int  # elements of the latent of which queries are made, that of attention's queries
    num_heads: int  # of queries
    width: int  # elements of a key, of which the first ``LatentConfig.rope_dim`` are rotated
    most: int  # tokens that a token sees
    is_interleaved: bool  # rotated elements are paired with their neighbours, else the first half with the second
    # Layers that choose, counted from 0, ascending; the others take the choice of the last before them.
    layers: tuple[int, ...]

    def num_params(self, hidden_size: int) -> int:
        """Returns the parameters of all layers."""
        queries = self.num_heads * self.width * self.query_rank
        return len(self.layers) * ((self.width + self.num_heads) * hidden_size + queries + 2 * self.width)

    @property
    def packed_key(self) -> PackedShape | None:
        """A key in 8 bits; None if it cannot be."""
        return packed_key(self.width)

    @property
    def slot_elements(self) -> int:
        """Elements that a token stores, all layers together."""
        return len(self.layers) * self.width

    def step_elements(self) -> int:
        """Returns elements of a token in one layer: queries, as they come and rotated, weights, a key, and the slots of its choice."""
        return 2 * self.num_heads * self.width + self.num_heads + 4 * self.width + _SLOT_ELEMENTS * self.most

    def cache_plan(self, rows: CacheGroupSpec, *, packs_rows: bool) -> CachePlan:
        """Returns the groups of all layers; ``rows`` are the latents, of all layers."""
        packed = self.packed_key if packs_rows else None
        assert packed is not None or not packs_rows, f"keys of {self.width} numbers cannot be packed"
        size = self.width if packed is None else packed.row_bytes
        keys = CacheGroupSpec(
            name=KEYS,
            num_layers=len(self.layers),
            num_kv_heads=1,
            head_dim=size,
            dtype=rows.dtype if packed is None else "uint8",
            codec="latent" if packed is None else "packed",
            value_dim=size,
        )
        every, places = range(rows.num_layers), {layer: place for place, layer in enumerate(self.layers)}
        return CachePlan(
            groups=(rows, keys),
            layers=tuple((rows.name, layer) for layer in every),
            beside=tuple(((KEYS, places[layer]),) if layer in places else () for layer in every),
        )


class _Fields(msgspec.Struct):
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    indexer_rope_interleave: bool | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: Count = 1
    index_skip_topk_offset: Count = 2


def read_index(raw: dict[str, Any], fields: ConfigFields, path: Path, *, shares: bool) -> IndexConfig:
    """Returns the index that ``config.json`` describes.

    Args:
        raw: All fields, with the family's defaults.
        fields: Those that all models have.
        path: For messages.
        shares: Layers may take the choice of a layer before them, and neighbours are rotated together unless the file says
            otherwise. Without, all layers choose and halves are rotated.

    Raises:
        ModelError: A field is missing, has the wrong type, is out of range, or contradicts others.
    """
    own = convert(raw, _Fields, path)
    count, rope_dim = fields.num_hidden_layers, fields.qk_rope_head_dim or 0
    types = _types(own, count) if shares else [_FULL] * count
    facts = {
        **{
            f"{name} is {getattr(own, name)}, and the most is {most}": getattr(own, name) > most
            for name, most in _MOST.items()
        },
        "q_lora_rank is null, but the queries of an index are made of that latent": fields.q_lora_rank is None,
        f"index_head_dim {own.index_head_dim} is less than qk_rope_head_dim {rope_dim}": own.index_head_dim < rope_dim,
        f"layers have indexers of the types {', '.join(sorted(set(types)))}; {_FULL} and {_SHARED} are supported": (
            set(types) - {_FULL, _SHARED}
        ),
        f"{len(types)} layers have an indexer's type, and num_hidden_layers is {count}": len(types) < count,
        "the first layer takes the choice of a layer before it": types[:1] == [_SHARED],
    }
    for fact, is_so in facts.items():
        if is_so:
            raise nonsense(path, fact)
    return IndexConfig(
        query_rank=fields.q_lora_rank or 0,
        num_heads=own.index_n_heads,
        width=own.index_head_dim,
        most=own.index_topk,
        is_interleaved=shares if own.indexer_rope_interleave is None else own.indexer_rope_interleave,
        layers=tuple(layer for layer, each in enumerate(types[:count]) if each == _FULL),
    )


def _types(own: _Fields, count: int) -> list[str]:
    """Returns the type of each layer's indexer: by name, by a pattern of letters, or every so many layers from one on."""
    if own.indexer_types is not None:
        return own.indexer_types
    if (pattern := own.index_topk_pattern) is not None:
        return [_LETTERS.get(each, each) for each in pattern]
    every, first = max(own.index_topk_freq, 1), own.index_skip_topk_offset - 1
    return [_SHARED if max(layer - first, 0) % every else _FULL for layer in range(count)]
