"""Rows that each stand for several tokens, made of the tokens' inputs by a softmax over them, in plain torch.

A row's inputs may have come in several steps. Those of the last tokens are carried along in a ring, by position: a step reads
its own from its activations and older ones from the ring, and then writes its last ones. Refused drafts are written over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.pairs import rotate_pairs
from hiserve.kernels.row_codecs import store_packed
from hiserve.kernels.union_rows import RangeRows


@dataclass(frozen=True, slots=True, eq=False)
class Compression:
    """How rows of ``n`` elements are made of the inputs of tokens.

    Attributes:
        bias: ``[ratio, num_series * n]``, float32, or float64 for float64: added to the scores of a token by its place.
        norm: ``[n]``, of the rows.
        eps: Of that norm.
        num_series: Series of inputs. With 2 a row is made of the second of its own tokens and the first of as many before.
    """

    bias: Tensor
    norm: Tensor
    eps: float
    num_series: int

    @property
    def ratio(self) -> int:
        """Tokens of a row."""
        return self.bias.shape[0]

    @property
    def span(self) -> int:
        """Tokens whose inputs make a row."""
        return self.num_series * self.ratio


class CarriedInputs(NamedTuple):
    """Inputs of one layer: values, then scores, biases included; of the type of the biases. Row and slot 0 belong to no request.

    Attributes:
        rows: ``[R, ring, 2 * num_series * n]``, by permanent row. Those of position p lie at ``p % ring``; ``ring`` is at least
            the span, and room for the drafts of two steps.
        snapshots: ``[S, m, 2 * num_series * n]``: those before a boundary, the oldest first.
    """

    rows: Tensor
    snapshots: Tensor


class StepTokens(NamedTuple):
    """The tokens of a step.

    Attributes:
        starts: int32 ``[B + 1]``. Row b has tokens ``starts[b]`` to ``starts[b + 1]``.
        state: What the rows carry along.
    """

    starts: Tensor
    state: StateRows


def compress(
    values: Tensor,
    scores: Tensor,
    how: Compression,
    carried: CarriedInputs,
    tokens: StepTokens,
    target: RangeRows,
    turns: tuple[Tensor, Tensor],
) -> None:
    """Makes the rows that end with tokens of the step, keeps the last inputs, and stores snapshots.

    Args:
        values: ``[T, num_series * n]``, the type of activations.
        scores: Likewise.
        how: Biases and norm.
        carried: Changed.
        tokens: Which rows have which tokens.
        target: The rows; those that end in this step are normed, rotated by the position of their first token, and written.
            Slot 0 may be, too.
        turns: Cosines and sines, float32 or wider ``[T, m]``, of the first token of the row that ends with each token.
    """
    positions = target.positions
    biased = scores.to(how.bias.dtype) + how.bias[positions % how.ratio]
    inputs = torch.cat((values.to(how.bias.dtype), biased), 1)
    token, rows, is_end = _ends(tokens, how.ratio, inputs.shape[0])
    kept = _Inputs(inputs, carried.rows, tokens)
    found = kept.read(rows, positions[token], how.span)
    made = _weigh(found, positions[token], how)
    wide = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + how.eps)
    normed = (wide.to(how.norm.dtype) * how.norm).to(values.dtype)
    turned = rotate_pairs(normed[:, None], *(each[token] for each in turns))[:, 0]
    place = positions[token] // how.ratio
    pages = target.table[rows, torch.where(is_end, place // target.page_rows, 0)].long()
    slots = torch.where(is_end, pages * target.page_rows + place % target.page_rows, 0)
    if target.packed is None:
        target.pool.index_copy_(0, slots, turned.to(target.pool.dtype))
    else:
        store_packed(target.pool, slots, turned, target.packed)
    _store_snapshots(kept, carried.snapshots, tokens.state)
    _keep(inputs, carried.rows, tokens, positions, target.token_rows)


def _ends(tokens: StepTokens, ratio: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens that end rows, their rows of the batch, and whether they are any: as many as there may be."""
    starts, first = tokens.state.starts, tokens.starts.long()
    num_new = first[1:] - first[:-1]
    before = starts // ratio
    counts = (starts + num_new) // ratio - before
    sums = counts.cumsum(0)
    number = torch.arange(num_tokens // ratio + starts.shape[0], device=starts.device)
    row = torch.searchsorted(sums, number, right=True).clamp_(max=starts.shape[0] - 1)
    is_end = number < sums[-1]
    position = (before[row] + 1 + number - (sums - counts)[row]) * ratio - 1
    token = torch.where(is_end, first[:-1][row] + position - starts[row], 0)
    return token, torch.where(is_end, row, 0), is_end


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Inputs of the step and those carried along."""

    inputs: Tensor
    rows: Tensor
    tokens: StepTokens

    def read(self, row: Tensor, last: Tensor, count: int) -> Tensor:
        """Returns the inputs of so many positions up to ``last`` of rows ``[N]`` of the batch, the oldest first; zeros below 0."""
        starts, first = self.tokens.state.starts[row, None], self.tokens.starts.long()[row, None]
        position = last[:, None] - torch.arange(count - 1, -1, -1, device=last.device)
        token = (first + position - starts).clamp_(0, max(0, self.inputs.shape[0] - 1))
        old = self.rows[self.tokens.state.rows[row, None], position % self.rows.shape[1]]
        found = torch.where((position >= starts)[..., None], self.inputs[token], old)
        return found.masked_fill_((position < 0)[..., None], 0)


def _weigh(found: Tensor, last: Tensor, how: Compression) -> Tensor:
    """Weighs inputs ``[N, span, 2 * num_series * n]``: the softmax of each element over the tokens; returns ``[N, n]``."""
    width = how.norm.shape[0]
    values, scores = found.view(*found.shape[:2], 2, how.num_series, width).unbind(2)
    values, scores = (
        torch.cat([each[:, place * how.ratio : (place + 1) * how.ratio, place] for place in range(how.num_series)], 1)
        for each in (values, scores)
    )
    position = last[:, None] - torch.arange(how.span - 1, -1, -1, device=last.device)
    shares = scores.masked_fill((position < 0)[..., None], -torch.inf).softmax(1)
    return (values * shares).sum(1)


def _store_snapshots(kept: _Inputs, snapshots: Tensor, state: StateRows) -> None:
    """Stores the inputs before each boundary that certain tokens pass; slot 0 takes those of the other rows."""
    if not snapshots.shape[1]:
        return
    takes = (state.state_lens < state.snap_at) & (state.snap_at <= state.state_ends)
    rows = torch.arange(state.rows.shape[0], device=state.rows.device)
    found = kept.read(rows, torch.where(takes, state.snap_at, 0) - 1, snapshots.shape[1])
    snapshots.index_copy_(0, torch.where(takes, state.snap_slots, 0), found.to(snapshots.dtype))


def _keep(inputs: Tensor, rows: Tensor, tokens: StepTokens, positions: Tensor, token_rows: Tensor) -> None:
    """Writes the last inputs of each row into its ring; row 0 takes the others."""
    size, token = rows.shape[1], torch.arange(inputs.shape[0], device=inputs.device)
    ends = tokens.starts.long()[1:][token_rows]
    is_last = (token < ends) & (token >= ends - size)
    row = torch.where(is_last, tokens.state.rows[token_rows], 0)
    rows.view(-1, rows.shape[2]).index_copy_(0, row * size + positions % size, inputs)
