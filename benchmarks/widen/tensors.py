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

import torch
from torch import Tensor

from benchmarks.widen.places import Axis, Places

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


def last_part(name: str) -> str:
    """Returns what a tensor is: ``q_proj``, ``input_layernorm`` …"""
    return name.removesuffix(".weight").rpartition(".")[2]


class Filler:
    """Fills tensors of one wide model.

    Args:
        places: Of the narrow model in the wide one.
        seed: Of what is random; a tensor depends on it and its own name alone.
    """

    def __init__(self, places: Places, seed: int) -> None:
        self._places, self._seed = places, seed
        narrow, wide = places.narrow, places.wide
        self._mark = narrow.hidden_size
        self._norm_scale = math.sqrt(narrow.hidden_size / wide.hidden_size)
        self._query_scale = math.sqrt(wide.head_dim / narrow.head_dim)  # attention divides by the roots of these
        self._is_tied = wide.tie_embeddings

    def fill(self, name: str, out: Tensor, source: Tensor | None) -> None:
        """Fills a tensor.

        Args:
            name: In the wide checkpoint.
            out: Float ``[rows, columns]`` or ``[hidden_size]`` of the wide model, on any device.
            source: The narrow model's tensor, on any device; None for one of an extra layer.
        """
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
        """Returns the wide shape of a tensor of a draft head."""
        if source.ndim == 1:
            return (self._places.wide.hidden_size,)
        rows, columns = (self._places.axes[axis] for axis in _MAPS[last_part(name)])
        return (rows.size, columns.size * (source.shape[1] // len(columns.places)))
