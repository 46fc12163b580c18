"""Prompts whose tokens attend to the keys that an index chose, expanded, with a mask of the choice.

It computes all keys that a token may see, chosen or not, and pays where they are few: see ``docs/design/cache.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.attention.latent import expand, most_keys
from hiserve.core.forward import ForwardInputs, LatentKV
from hiserve.core.upload import upload
from hiserve.kernels.chosen_bits import BLOCK_KEYS, MAX_SPAN, ExpandedRows
from hiserve.kernels.row_codecs import load_latents

_RATE = 1.2
"""Operations on expanded keys in the time of one on absorbed ones, at least: 1.8 on an H200 with the heads of DeepSeek-V3.2, of which no record is
kept; those of GLM-5 were not measured.

With it expansion pays, of the sizes of DeepSeek-V3.2, for tokens that see up to ``MAX_SPAN`` times as many as are chosen: 2,048 absorbed
keys take as many operations as 6,960 expanded ones.
"""


class PromptOps(Protocol):
    """The operations; ``kernels.chosen_reference`` documents each."""

    def can_attend_expanded(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
        """Whether it has heads of so many elements."""

    def attend_expanded(
        self, q: Tensor, keys: Tensor, values: Tensor, bits: Tensor, rows: ExpandedRows, scale: float, out: Tensor
    ) -> None:
        """Attends to chosen keys, into ``out``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows whose keys are in memory at once."""

    slots: Tensor  # int64, of all their keys; a row that is padded has its last one more than once
    rows: ExpandedRows


@dataclass(frozen=True, slots=True, eq=False)
class ChosenPrompts:
    """Tokens of a step that attend to expanded keys.

    Attributes:
        tokens: int64, which they are; None is all.
        others: int64, which the others are; None without any.
        most: Upper bound of the tokens that one of them sees.
    """

    tokens: Tensor | None
    others: Tensor | None
    most: int
    _groups: Sequence[_Group]
    _ops: PromptOps
    _scale: float

    def attend(self, q: Tensor, kv: LatentKV, bits: Tensor, out: Tensor) -> None:
        """Attends for these tokens.

        Args:
            q: ``[T, num_heads, nope_dim + rope_dim]``, of all tokens of the step.
            kv: Of the layer, which holds the step's rows too.
            bits: Of the choices of these tokens alone, as ``choose_bits`` returns them.
            out: ``[T, num_heads, value_dim]``.
        """
        for group in self._groups:
            keys, values = expand(load_latents(kv, group.slots, q.dtype), kv)
            self._ops.attend_expanded(q, keys, values, bits, group.rows, self._scale, out)


def most_seen(shape: AttentionShape) -> int:
    """Returns up to how many tokens one may see whose keys are expanded: beyond it, the chosen ones alone take less time absorbed."""
    latent, index = shape.latent, shape.index
    assert latent is not None and index is not None, shape
    absorbed, expanded = 2 * latent.rank + latent.rope_dim, latent.nope_dim + latent.rope_dim + latent.value_dim
    return int(index.most * min(MAX_SPAN, _RATE * absorbed / expanded))


def plan_prompts(shape: AttentionShape, ops: PromptOps, inputs: ForwardInputs, least: int) -> ChosenPrompts | None:
    """Returns the tokens of a step to expand; None if there are none. The host knows exact lengths of rows that do not decode.

    Args:
        shape: Of the attention.
        ops: Attend.
        inputs: Of the step.
        least: Tokens of a row to expand, at least: fewer do not repay its keys.
    """
    latent, room = shape.latent, most_keys(shape)
    assert latent is not None, shape
    if not ops.can_attend_expanded(latent.nope_dim + latent.rope_dim, latent.value_dim, shape.dtype):
        return None
    starts = inputs.kv_bounds - inputs.q_lens
    counts = np.minimum(np.maximum(most_seen(shape) - starts, 0), inputs.q_lens)
    sizes = -(-(starts + counts) // BLOCK_KEYS) * BLOCK_KEYS
    counts[(counts < least) | (sizes - counts > room)] = 0
    counts[: inputs.num_decode] = 0
    rows = np.flatnonzero(counts)
    if not rows.size:
        return None
    firsts = inputs.q_lens.cumsum() - inputs.q_lens
    bits = counts.cumsum() - counts
    number = np.arange(inputs.q_lens.sum()) - np.repeat(firsts, inputs.q_lens)
    is_expanded = number < np.repeat(counts, inputs.q_lens)
    tokens = others = None
    if not is_expanded.all():
        tokens, others = upload((np.flatnonzero(is_expanded), np.flatnonzero(~is_expanded)), inputs.kv_lens.device)
    groups = []
    for mine in _split(rows, sizes - counts, room):
        columns = (firsts[mine], counts[mine], bits[mine], sizes[mine].cumsum() - sizes[mine], starts[mine])
        groups.append(_group(shape, inputs, mine, sizes[mine], np.stack(columns, 1).astype(np.int32)))
    return ChosenPrompts(tokens, others, int((starts + counts)[rows].max()), groups, ops, latent.scale)


def _split(rows: np.ndarray, beside: np.ndarray, room: int) -> list[np.ndarray]:
    """Splits rows into groups, of whose keys as many as there is room for are of no new tokens."""
    cuts, size = [], 0
    for place, row in enumerate(rows):
        size += int(beside[row])
        if size > room:
            cuts.append(place)
            size = int(beside[row])
    return np.split(rows, cuts)


def _group(
    shape: AttentionShape, inputs: ForwardInputs, rows: np.ndarray, sizes: np.ndarray, columns: np.ndarray
) -> _Group:
    """Returns the group of some rows, of so many keys each."""
    last = columns[:, 1] + columns[:, 4] - 1
    position = np.arange(sizes.sum()) - np.repeat(columns[:, 3], sizes)
    position = np.minimum(position, np.repeat(last, sizes)).astype(np.int64)
    entries, position_of, where = upload((np.repeat(rows, sizes), position, columns), inputs.kv_lens.device)
    pages = inputs.page_table[entries, position_of // shape.page_size].long()
    slots = pages * shape.page_size + position_of % shape.page_size
    return _Group(slots, ExpandedRows(columns, where))
