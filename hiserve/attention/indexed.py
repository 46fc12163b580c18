"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2): absorbed queries over rows by slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.latent import absorb
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.kernels import union_reference
from hiserve.kernels.compressed_ops import compressed_ops_for
from hiserve.kernels.union_rows import ChosenRows, RangeRows

AttendChosen: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, float, int], Tensor]
"""As ``attend_chosen``."""


def attend_chosen(q: Tensor, pool: Tensor, slots: Tensor, counts: Tensor, scale: float, rank: int) -> Tensor:
    """Attends to rows by slot.

    Args:
        q: ``[T, num_heads, n]``, absorbed.
        pool: Rows, ``[num_slots, n]``.
        slots: int64 ``[T, K]``, of the rows of each token, then anything.
        counts: int64 ``[T]``. How many of these there are, at least 1.
        scale: Factor of the scores.
        rank: Elements of a value, the first of a row.

    Returns:
        ``[T, num_heads, rank]``.
    """
    is_there = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
    found, _ = union_reference.attend(q, [ChosenRows(pool, torch.where(is_there, slots, -1))], None, scale)
    return found[..., :rank]


class IndexedAttention:
    """Attends to chosen rows; where no row of a step is longer than the rows that are chosen, all are, and nothing is scored.

    A layer with an index calls ``choose``, then ``forward``; a layer without one calls ``forward`` alone, and takes the last choice.

    Args:
        shape: With ``latent`` and ``num_chosen``.
        plain: Attends to all rows.
        attend: To chosen ones.
    """

    def __init__(self, shape: AttentionShape, plain: Attention, attend: AttendChosen) -> None:
        assert shape.latent is not None and shape.num_chosen and not shape.hides_first, shape
        self.needs_host_lengths = plain.needs_host_lengths
        self._shape, self._latent = shape, shape.latent
        self._plain, self._attend = plain, attend
        self._is_choosing = False
        self._slots: Tensor | None = None  # the last choice
        self._counts: Tensor | None = None

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns one whose plain steps expand nothing."""
        plain = self._plain.captured(num_rows, width)
        return None if plain is None else IndexedAttention(self._shape, plain, self._attend)

    def ragged(self) -> Attention | None:
        """Returns None: a layer's choice is no part of the graph of the layer before it."""
        return None

    def plan(self, inputs: ForwardInputs) -> None:
        """Plans the plain attention if it will do: by the bound of the longest row, which in a graph is that of all replays."""
        self._slots = None
        self._is_choosing = inputs.max_kv_len > self._shape.num_chosen
        if not self._is_choosing:
            self._plain.plan(inputs)

    @property
    def is_choosing(self) -> bool:
        """Whether the step's layers must choose."""
        return self._is_choosing

    def choose(self, q: Tensor, weights: Tensor, keys: Tensor, inputs: ForwardInputs) -> None:
        """Chooses the rows of each token by their scores: the best, and of equal ones the first.

        Args:
            q: ``[T, heads, n]``, of the index.
            weights: ``[T, heads]``, of the heads' scores, float32, or float64 for float64.
            keys: ``[slots, n]``, this step's included.
            inputs: Of the step.
        """
        seen = RangeRows(
            pool=keys,
            table=inputs.page_table,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            page_rows=self._shape.page_size,
            most=inputs.max_kv_len,
        )
        ops = compressed_ops_for(q.device)
        self._counts = (inputs.positions + 1).clamp_(max=self._shape.num_chosen)
        self._slots = ops.choose_rows(q, weights, seen, self._shape.num_chosen, q.shape[2] ** -0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends; ``kv`` is a ``LatentKV``."""
        if not self._is_choosing:
            return self._plain.forward(q, k, v, kv, layer, out)
        assert isinstance(kv, LatentKV) and self._slots is not None and self._counts is not None, (
            f"no choice in layer {layer}"
        )
        absorbed = absorb(q, kv.to_keys)
        latents = self._attend(absorbed, kv.k[:, 0], self._slots, self._counts, self._latent.scale, self._latent.rank)
        out = q.new_empty((*q.shape[:2], self._latent.value_dim)) if out is None else out
        torch.bmm(latents.transpose(0, 1), kv.to_values.transpose(1, 2), out=out.transpose(0, 1))
        return out
