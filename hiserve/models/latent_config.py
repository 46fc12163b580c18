"""Reads the shape of latent attention, without torch (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

import math

import msgspec

from hiserve.core.row_shapes import PackedShape, packed_latent
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields

# Fields that describe latent attention, without which there is none.
_NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose heads share one row per token: a latent of ``rank`` elements, and a rotated key.

    A head's key is a projection of the latent beside the rotated key, its value another projection of the latent.
    """

    rank: int  # elements of the latent
    rope_dim: int  # elements of a key that are rotated
    nope_dim: int  # elements of a head's key that are not
    value_dim: int  # elements of a head's value
    query_rank: int | None  # elements of the queries' own latent; None where queries are projected in one step
    scale: float  # factor of the scores, YaRN's included
    is_interleaved: bool  # rotated elements are paired with their neighbours, else the first half with the second

    @property
    def width(self) -> int:
        """Elements that a token stores in a layer."""
        return self.rank + self.rope_dim

    @property
    def packed_row(self) -> PackedShape | None:
        """A row in 8 bits; None if it cannot be."""
        return packed_latent(self.rank, self.rope_dim)

    @property
    def key_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def head_elements(self) -> int:
        """Elements of a head's query and of its output."""
        return self.key_dim + self.value_dim

    def num_params(self, hidden_size: int, num_heads: int) -> int:
        """Returns the parameters of a layer's attention."""
        queries, source = num_heads * self.key_dim, hidden_size
        total = hidden_size * self.width + self.rank + num_heads * (self.nope_dim + self.value_dim) * self.rank
        if self.query_rank is not None:
            total += self.query_rank * (hidden_size + 1)
            source = self.query_rank
        return total + source * queries + num_heads * self.value_dim * hidden_size

    def step_elements(self, num_heads: int) -> int:
        """Returns elements of a token in one layer's attention: queries and outputs, absorbed and as they come."""
        per_head = 2 * self.key_dim + 2 * self.width + self.rank + self.value_dim
        return num_heads * per_head + 2 * self.width + 2 * (self.query_rank or 0)


def read_latent(fields: ConfigFields) -> LatentConfig:
    """Returns the shape of the latent attention that ``config.json`` describes.

    Raises:
        ModelError: A field is missing, or describes an attention that is not supported.
    """
    sizes = [getattr(fields, name) for name in _NEEDED]
    if missing := [name for name, size in zip(_NEEDED, sizes, strict=True) if size is None]:
        raise ModelError(
            f"config.json makes no sense: latent attention lacks {', '.join(missing)}. Fetch it again.", param="model"
        )
    rank, nope_dim, rope_dim, value_dim = sizes
    if fields.attention_bias:
        raise ModelError(
            "latent attention with attention_bias is not supported yet; without biases it is.", param="model"
        )
    if rope_dim % 2:
        raise ModelError(
            f"config.json makes no sense: qk_rope_head_dim {rope_dim} is odd, but RoPE turns pairs.", param="model"
        )
    if rank % 2:
        raise ModelError(f"kv_lora_rank {rank} is odd, which is not supported; even ranks are.", param="model")
    return LatentConfig(
        rank=rank,
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=value_dim,
        query_rank=fields.q_lora_rank,
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale(fields) ** 2,
        is_interleaved=fields.rope_interleave is not False,
    )


def _mscale(fields: ConfigFields) -> float:
    """YaRN's factor of queries and of keys, which DeepSeek applies to scores; cosines have another one (``read_rope``)."""
    rope = fields.rope_parameters
    if rope is None or (rope.rope_type or rope.type or "default") == "default" or not rope.mscale_all_dim:
        return 1.0
    factor = rope.factor or 1.0
    return 1.0 if factor <= 1 else 0.1 * rope.mscale_all_dim * math.log(factor) + 1.0
