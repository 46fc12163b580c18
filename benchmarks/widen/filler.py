"""A tensor of the wide model, filled in place from the narrow model's.

The residual stream of the wide model is that of the narrow one, then zeros. A mean square over H in place of h elements
is h / H times as large, so each norm's weight is multiplied by sqrt(h / H), and its eps (of config.json) by h / H.
What reads the stream may be random wherever it reads zeros or feeds what nobody reads, and is: it is there to cost what
a real model costs. What writes the stream is zero but for the narrow model's part.

Padded tokens must never be drawn, and Llama has no bias. Element h of the stream, the *mark*, is ``MARK`` from the
embedding on and written by nobody else; rows of the output head that belong to padded tokens multiply it by ``-LOUD``,
all others by zero. Squared, it is below the last bit of any mean square, float64 included; so no norm feels it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.models.model_config import ModelConfig

STD = 0.02
MARK = 2.0**-30
LOUD = 2.0**50  # a padded token's logit is -2**20 over the root mean square of the narrow stream
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # float16 has room for neither
# What a matrix maps to what, by the last part of its name.
_MAPS = {
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("vocab", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
    "fc": ("hidden", "hidden"),
    "eh_proj": ("hidden", "hidden"),
}


@dataclass(frozen=True)
class Axis:
    """One dimension of a matrix."""

    size: int  # in the wide model
    places: Tensor  # int64 ``[narrow size]``. Where each coordinate of the narrow model lies
    taken: Tensor  # int64. Those, and what else of the wide model must be zero for their sake: the rest of their heads

    def repeated(self, count: int) -> Axis:
        """Returns this axis several times over, one behind the other."""
        begins = self.size * torch.arange(count)[:, None]
        return Axis(self.size * count, (begins + self.places).flatten(), (begins + self.taken).flatten())


class Places:
    """Layers, heads and pairs of a narrow model in a wide one.

    Layers are spread evenly. Query heads stay with their key and value head. With the same ``rope_theta``, heads that
    are r times as wide have every frequency of the narrow ones, to the last bit, in each r-th pair.

    Raises ValueError.

    Attributes:
        layers: The wide layer that each narrow one lies in; others are extra.
        axes: By name.
    """

    def __init__(self, narrow: ModelConfig, wide: ModelConfig) -> None:
        _refuse(narrow, wide)
        self.narrow, self.wide = narrow, wide
        self.layers = tuple(layer * wide.num_layers // narrow.num_layers for layer in range(narrow.num_layers))
        group, wide_group = narrow.num_heads // narrow.num_kv_heads, wide.num_heads // wide.num_kv_heads
        queries = [head // group * wide_group + head % group for head in range(narrow.num_heads)]
        self.axes = {
            "hidden": _first(narrow.hidden_size, wide.hidden_size),
            "inner": _first(narrow.intermediate_size, wide.intermediate_size),
            "vocab": _first(narrow.vocab_size, wide.vocab_size),
            "queries": self._heads(queries, wide.num_heads),
            "keys": self._heads(list(range(narrow.num_kv_heads)), wide.num_kv_heads),
        }

    def _heads(self, heads: list[int], count: int) -> Axis:
        """Returns the axis of heads; a pair is an element of a head's first half and the same one of its second."""
        dim, wide_dim = self.narrow.head_dim, self.wide.head_dim
        pairs = torch.arange(dim // 2) * (wide_dim // dim)
        begins = wide_dim * torch.tensor(heads)[:, None]
        places = begins + torch.cat((pairs, pairs + wide_dim // 2))
        return Axis(count * wide_dim, places.flatten(), (begins + torch.arange(wide_dim)).flatten())


def _first(size: int, wide_size: int) -> Axis:
    places = torch.arange(size)
    return Axis(wide_size, places, places)


def _refuse(narrow: ModelConfig, wide: ModelConfig) -> None:
    pairs = {
        "vocab_size": (narrow.vocab_size, wide.vocab_size),
        "hidden_size": (narrow.hidden_size + 1, wide.hidden_size),  # one more carries what padded tokens are known by
        "intermediate_size": (narrow.intermediate_size, wide.intermediate_size),
        "num_layers": (narrow.num_layers, wide.num_layers),
        "num_kv_heads": (narrow.num_kv_heads, wide.num_kv_heads),
        "query heads of a key head": (
            narrow.num_heads // narrow.num_kv_heads,
            wide.num_heads // wide.num_kv_heads,
        ),
        "head_dim": (narrow.head_dim, wide.head_dim),
    }
    for name, (least, held) in pairs.items():
        if held < least:
            raise ValueError(f"{name} of the wide model is {held}, and must be {least} or more")
    if wide.head_dim % narrow.head_dim:
        raise ValueError(f"head_dim {wide.head_dim} is no multiple of {narrow.head_dim}")
    if narrow.rope.kind != "default" or narrow.rope != wide.rope:
        raise ValueError(f"frequencies differ: {narrow.rope} and {wide.rope}")
    for model in (narrow, wide):
        if model.has_qk_norm or model.has_qkv_bias or model.has_out_bias or model.has_mlp_bias or model.experts:
            raise ValueError(f"{model.architecture} has more than the matrices and norms of a plain Llama")


def last_part(name: str) -> str:
    """Returns what a tensor is: ``q_proj``, ``input_layernorm`` …"""
    return name.removesuffix(".weight").rpartition(".")[2]


class Filler:
    """Fills tensors of one wide model; what is random in a tensor depends on the seed and the tensor's name alone."""

    def __init__(self, places: Places, seed: int) -> None:
        self._places, self._seed = places, seed
        narrow, wide = places.narrow, places.wide
        self._mark = narrow.hidden_size
        self._norm_scale = math.sqrt(narrow.hidden_size / wide.hidden_size)
        self._query_scale = math.sqrt(wide.head_dim / narrow.head_dim)  # attention divides by the roots of these
        self._is_tied = wide.tie_embeddings

    def fill(self, name: str, out: Tensor, source: Tensor | None) -> None:
        """Fills ``[rows, columns]`` or ``[hidden_size]`` of the wide checkpoint; ``source`` None is an extra layer's."""
        if out.dtype not in _DTYPES:
            raise ValueError(f"a widened model cannot be {out.dtype}: {LOUD:g} and {MARK:g} are out of its range")
        if out.ndim == 1:
            out.fill_(self._norm_scale)
            if source is not None:
                out[: len(source)] = (source.double() * self._norm_scale).to(out)
            return
        kind = last_part(name)
        rows, columns = self._axes(kind, out.shape[1])
        if _MAPS[kind][0] == "hidden":
            out.zero_()
        else:
            seed = zlib.crc32(name.encode(), self._seed)
            out.normal_(0.0, STD, generator=torch.Generator(out.device).manual_seed(seed))
            if source is not None:
                out.index_fill_(0, rows.taken.to(out.device), 0.0)
        if source is not None:
            scale = self._query_scale if kind == "q_proj" else 1.0
            block = (source.double() * scale).to(out)
            out[rows.places.to(out.device)[:, None], columns.places.to(out.device)] = block
            self._pass_mark(kind, out, len(rows.places))

    def _axes(self, kind: str, num_columns: int) -> tuple[Axis, Axis]:
        """Rows and columns of a matrix; heads read up to three streams side by side."""
        rows, columns = (self._places.axes[axis] for axis in _MAPS[kind])
        return rows, columns.repeated(num_columns // columns.size)

    def _pass_mark(self, kind: str, out: Tensor, num_tokens: int) -> None:
        """Sets what makes, passes on and reads the mark; ``out`` has ``num_tokens`` rows of the narrow vocabulary."""
        if kind == "embed_tokens":
            out[:, self._mark] = MARK
        if kind == "lm_head" or (kind == "embed_tokens" and self._is_tied):
            out[num_tokens:, self._mark] = -LOUD
        if kind in ("fc", "eh_proj"):  # of the first stream: the lowest layer's, or the embedding
            out[self._mark, self._mark] = 1.0

    def shape(self, name: str, source: Tensor) -> tuple[int, ...]:
        if source.ndim == 1:
            return (self._places.wide.hidden_size,)
        rows, columns = (self._places.axes[axis] for axis in _MAPS[last_part(name)])
        return (rows.size, columns.size * (source.shape[1] // len(columns.places)))
