"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2): absorbed queries over rows by slot.

The first tokens of a prompt see no more tokens than are chosen, hence all: these are attended to as without an index, by keys and values
that are expanded, which takes fewer products (``docs/design/execution.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.latent import MIN_EXPANDED, absorb
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.core.row_shapes import PackedPages, PackedShape
from hiserve.core.upload import upload
from hiserve.kernels.row_codecs import pages_of
from hiserve.kernels.union_rows import RangeRows


class ChosenOps(Protocol):
    """The operations; ``kernels.chosen_reference`` documents each."""

    def choose_rows(self, q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
        """Returns the slots of the best rows of each token, in the order of rows."""

    def attend_chosen(
        self,
        q: Tensor,
        pool: Tensor,
        slots: Tensor,
        counts: Tensor,
        scale: float,
        rank: int,
        packed: PackedPages | None = None,
    ) -> Tensor:
        """Attends to rows by slot."""


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Tokens of a step, int64 on the device: of prompts those that see all tokens, and the others."""

    early: Tensor
    late: Tensor


class IndexedAttention:
    """Attends to chosen rows; where no row of a step is longer than the rows that are chosen, all are, and nothing is scored.

    A layer with an index calls ``choose``, then ``forward``; a layer without one calls ``forward`` alone, and takes the last choice.

    Args:
        shape: With ``latent`` and ``index``.
        plain: Attends to all rows.
        ops: Choose rows, and attend to these.
        min_early: Least tokens of a row in a step that ``plain`` computes beside others; None is none, as in graphs, which depend on
            no lengths of the host.
    """

    def __init__(
        self, shape: AttentionShape, plain: Attention, ops: ChosenOps, min_early: int | None = MIN_EXPANDED
    ) -> None:
        assert shape.latent is not None and shape.index is not None and not shape.hides_first, shape
        self.needs_host_lengths = plain.needs_host_lengths
        self._shape, self._latent, self._most = shape, shape.latent, shape.index.most
        self._plain, self._ops, self._min_early = plain, ops, min_early
        self._is_choosing = False
        self._split: _Split | None = None
        self._slots: Tensor | None = None  # the last choice
        self._counts: Tensor | None = None

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns one whose plain steps expand nothing."""
        plain = self._plain.captured(num_rows, width)
        return None if plain is None else IndexedAttention(self._shape, plain, self._ops, min_early=None)

    def ragged(self) -> Attention | None:
        """Likewise."""
        plain = self._plain.ragged()
        return None if plain is None else IndexedAttention(self._shape, plain, self._ops, min_early=None)

    def plan(self, inputs: ForwardInputs) -> None:
        """Plans the plain attention if it will do: by the bound of the longest row, which in a graph is that of all replays."""
        self._slots = self._split = None
        self._is_choosing = inputs.max_kv_len > self._most
        if not self._is_choosing:
            self._plain.plan(inputs)
        elif self._min_early is not None:
            self._split = self._plan_early(inputs, self._min_early)

    def _plan_early(self, inputs: ForwardInputs, least: int) -> _Split | None:
        """Plans ``plain`` for the tokens that see all others; the host knows exact lengths of rows that do not decode."""
        starts = inputs.kv_bounds - inputs.q_lens
        counts = np.minimum(np.maximum(self._most - starts, 0), inputs.q_lens)
        counts[: inputs.num_decode] = 0
        counts[counts < least] = 0
        rows = np.flatnonzero(counts)
        if not rows.size:
            return None
        number = np.arange(inputs.q_lens.sum()) - np.repeat(inputs.q_lens.cumsum() - inputs.q_lens, inputs.q_lens)
        is_early, counts = number < np.repeat(counts, inputs.q_lens), counts[rows]
        assert not is_early.all(), f"rows of {inputs.kv_bounds} tokens, of which {self._most} are chosen"
        bounds, ends = starts[rows] + counts, np.concatenate(([0], counts.cumsum())).astype(np.int32)
        columns = (rows, np.repeat(np.arange(rows.size), counts), bounds.astype(np.int64), ends)
        early, late, ours, token_rows, lens, indptr = upload(
            (np.flatnonzero(is_early), np.flatnonzero(~is_early), *columns), inputs.kv_lens.device
        )
        some = replace(
            inputs,
            input_ids=inputs.input_ids[early],
            positions=inputs.positions[early],
            slots=inputs.slots[early],
            token_rows=token_rows,
            qo_indptr=indptr,
            kv_lens=lens,
            page_table=inputs.page_table[ours],
            logits_rows=inputs.logits_rows[:0],
            q_lens=counts,
            kv_bounds=bounds,
            max_kv_len=int(bounds.max()),
            num_decode=0,
        )
        self._plain.plan(some)
        return _Split(early, late)

    @property
    def is_choosing(self) -> bool:
        """Whether the step's layers must choose."""
        return self._is_choosing

    def packed(self, pool: Tensor, shape: PackedShape | None) -> PackedPages | None:
        """Returns how a pool of keys holds them in 8 bits; None if it does not."""
        return pages_of(pool, shape, self._shape.page_size)

    def choose(
        self, q: Tensor, weights: Tensor, keys: Tensor, inputs: ForwardInputs, packed: PackedPages | None = None
    ) -> None:
        """Chooses the rows of each token by their scores, the best, and of equal ones the first; but for tokens that see all.

        Args:
            q: ``[T, heads, n]``, of the index.
            weights: ``[T, heads]``, of the heads' scores, which are divided by the root of ``heads * n``; float32, or float64 for float64.
            keys: ``[slots, n]``, or packed, this step's included.
            inputs: Of the step.
            packed: From ``packed``.
        """
        token_rows, positions = inputs.token_rows, inputs.positions
        if self._split is not None:
            late = self._split.late
            q, weights, token_rows, positions = q[late], weights[late], token_rows[late], positions[late]
        seen = RangeRows(
            pool=keys,
            table=inputs.page_table,
            token_rows=token_rows,
            positions=positions,
            page_rows=self._shape.page_size,
            most=inputs.max_kv_len,
            packed=packed,
        )
        self._counts = (positions + 1).clamp_(max=self._most)
        self._slots = self._ops.choose_rows(q, weights, seen, self._most, (q.shape[1] * q.shape[2]) ** -0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; ``kv`` is a ``LatentKV``."""
        if not self._is_choosing:
            return self._plain.forward(q, k, v, kv, layer, out)
        assert isinstance(kv, LatentKV), type(kv)
        out = q.new_empty((*q.shape[:2], self._latent.value_dim)) if out is None else out
        if self._split is None:
            return self._attend_chosen(q, kv, layer, out)
        early, late = self._split.early, self._split.late
        out.index_copy_(0, early, self._plain.forward(q[early], k[early], v[early], kv, layer))
        mine = q[late]
        return out.index_copy_(
            0, late, self._attend_chosen(mine, kv, layer, out.new_empty((len(mine), *out.shape[1:])))
        )

    def _attend_chosen(self, q: Tensor, kv: LatentKV, layer: int, out: Tensor) -> Tensor:
        assert self._slots is not None and self._counts is not None, f"no choice in layer {layer}"
        absorbed = absorb(q, kv.to_keys)
        latents = self._ops.attend_chosen(
            absorbed, kv.k[:, 0], self._slots, self._counts, self._latent.scale, self._latent.rank, kv.packed
        )
        if layer + 1 == self._shape.num_layers:  # drafts, which come next, have that memory
            self._slots = self._counts = None
        torch.bmm(latents.transpose(0, 1), kv.to_values.transpose(1, 2), out=out.transpose(0, 1))
        return out
