"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2): absorbed queries over rows by slot.

Tokens of prompts that see few more than are chosen attend to keys and values that are expanded, under a mask, which takes less time
(``attention.chosen_prompts``).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.chosen_prompts import ChosenPrompts, PromptOps, plan_prompts
from hiserve.attention.latent import MIN_EXPANDED, absorb
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.core.row_shapes import PackedPages, PackedShape
from hiserve.kernels.row_codecs import pages_of
from hiserve.kernels.union_rows import RangeRows


class ChosenOps(PromptOps, Protocol):
    """The operations; ``kernels.chosen_reference`` documents each."""

    def choose_rows(self, q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
        """Returns the slots of the best rows of each token, in the order of rows."""

    def choose_bits(self, q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
        """Returns the best rows of each token as bits."""

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


class IndexedAttention:
    """Attends to chosen rows; where no row of a step is longer than the rows that are chosen, all are, and nothing is scored.

    A layer with an index calls ``choose``, then ``forward``; a layer without one calls ``forward`` alone, and takes the last choice.

    Args:
        shape: With ``latent`` and ``index``.
        plain: Attends to all rows.
        ops: Choose rows, and attend to these.
        min_expanded: Least tokens of a row in a step that are expanded; None is none, as in graphs, which depend on no lengths of the
            host.
    """

    def __init__(
        self, shape: AttentionShape, plain: Attention, ops: ChosenOps, min_expanded: int | None = MIN_EXPANDED
    ) -> None:
        assert shape.latent is not None and shape.index is not None and not shape.hides_first, shape
        self.needs_host_lengths = plain.needs_host_lengths
        self._shape, self._latent, self._most = shape, shape.latent, shape.index.most
        self._plain, self._ops, self._min_expanded = plain, ops, min_expanded
        self._is_choosing = False
        self._prompts: ChosenPrompts | None = None  # tokens that are expanded
        self._bits: Tensor | None = None  # their last choice
        self._slots: Tensor | None = None  # that of the others
        self._counts: Tensor | None = None

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns one whose plain steps expand nothing."""
        plain = self._plain.captured(num_rows, width)
        return None if plain is None else IndexedAttention(self._shape, plain, self._ops, min_expanded=None)

    def ragged(self) -> Attention | None:
        """Likewise."""
        plain = self._plain.ragged()
        return None if plain is None else IndexedAttention(self._shape, plain, self._ops, min_expanded=None)

    def plan(self, inputs: ForwardInputs) -> None:
        """Plans the plain attention if it will do: by the bound of the longest row, which in a graph is that of all replays."""
        self._bits = self._slots = self._prompts = None
        self._is_choosing = inputs.max_kv_len > self._most
        if not self._is_choosing:
            self._plain.plan(inputs)
        elif self._min_expanded is not None:
            self._prompts = plan_prompts(self._shape, self._ops, inputs, self._min_expanded)

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
        """Chooses the rows of each token by their scores, the best, and of equal ones the first.

        Args:
            q: ``[T, heads, n]``, of the index.
            weights: ``[T, heads]``, of the heads' scores, which are divided by the root of ``heads * n``; float32, or float64 for float64.
            keys: ``[slots, n]``, or packed, this step's included.
            inputs: Of the step.
            packed: From ``packed``.
        """
        scale = (q.shape[1] * q.shape[2]) ** -0.5

        def seen(tokens: Tensor | None, most: int) -> tuple[Tensor, Tensor, RangeRows]:
            places = (inputs.token_rows, inputs.positions, q, weights)
            mine = places if tokens is None else tuple(each[tokens] for each in places)
            rows = RangeRows(
                pool=keys,
                table=inputs.page_table,
                token_rows=mine[0],
                positions=mine[1],
                page_rows=self._shape.page_size,
                most=most,
                packed=packed,
            )
            return mine[2], mine[3], rows

        others = None
        if self._prompts is not None:
            self._bits = self._ops.choose_bits(*seen(self._prompts.tokens, self._prompts.most), self._most, scale)
            others = self._prompts.others
            if others is None:
                return
        queries, factors, rows = seen(others, inputs.max_kv_len)
        self._counts = (rows.positions + 1).clamp_(max=self._most)
        self._slots = self._ops.choose_rows(queries, factors, rows, self._most, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; ``kv`` is a ``LatentKV``."""
        if not self._is_choosing:
            return self._plain.forward(q, k, v, kv, layer, out)
        assert isinstance(kv, LatentKV), type(kv)
        out = q.new_empty((*q.shape[:2], self._latent.value_dim)) if out is None else out
        if self._prompts is None:
            self._attend_chosen(q, kv, layer, out)
        else:
            assert self._bits is not None, f"no choice in layer {layer}"
            self._prompts.attend(q, kv, self._bits, out)
            if (others := self._prompts.others) is not None:
                mine = q[others]
                found = self._attend_chosen(mine, kv, layer, out.new_empty((len(mine), *out.shape[1:])))
                out.index_copy_(0, others, found)
        if layer + 1 == self._shape.num_layers:  # drafts, which come next, have that memory
            self._bits = self._slots = self._counts = None
        return out

    def _attend_chosen(self, q: Tensor, kv: LatentKV, layer: int, out: Tensor) -> Tensor:
        assert self._slots is not None and self._counts is not None, f"no choice in layer {layer}"
        absorbed = absorb(q, kv.to_keys)
        latents = self._ops.attend_chosen(
            absorbed, kv.k[:, 0], self._slots, self._counts, self._latent.scale, self._latent.rank, kv.packed
        )
        torch.bmm(latents.transpose(0, 1), kv.to_values.transpose(1, 2), out=out.transpose(0, 1))
        return out
