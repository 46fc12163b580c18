"""Rows that an attention reads: those of a prefix, by position, and chosen ones, by slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.row_codecs import load_packed


@dataclass(frozen=True, slots=True, eq=False)
class RangeRows:
    """Rows of a prefix: row v stands for ``ratio`` tokens, from position ``v * ratio`` on.

    A token at position p sees row v if ``v < (p + 1) // ratio`` and, with a window, ``v > p - window``.

    Attributes:
        pool: ``[slots, n]``. Row v of request b lies at ``table[b, v // page_rows] * page_rows + v % page_rows``. Rows that no
            token sees may hold anything, NaN included. Packed, uint8 ``[slots, row_bytes]``.
        table: int32 ``[B, W]``. Entries whose rows no token sees mean nothing.
        token_rows: int64 ``[T]``. Which of the B rows of the batch a token belongs to.
        positions: int64 ``[T]``.
        page_rows: Rows of a page.
        most: Upper bound of the rows that one token sees, known to the host; in a captured graph that of any replay.
        ratio: Tokens of a row.
        window: Only with ratio 1; None is none.
        packed: How ``pool`` holds rows in 8 bits, in pages of ``page_rows``; None is as they are.
    """

    pool: Tensor
    table: Tensor
    token_rows: Tensor
    positions: Tensor
    page_rows: int
    most: int
    ratio: int = 1
    window: int | None = None
    packed: PackedPages | None = None

    @property
    def width(self) -> int:
        """Most rows that one token sees."""
        return self.most if self.window is None else min(self.most, self.window)


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Rows by slot.

    Attributes:
        pool: ``[slots, n]``, or packed.
        slots: int64 ``[T, K]``. -1 is none; a slot that is there twice counts twice.
        packed: As of ``RangeRows``.
    """

    pool: Tensor
    slots: Tensor
    packed: PackedPages | None = None


RowSource: TypeAlias = RangeRows | ChosenRows


def slots_of(source: RowSource, first: int = 0, end: int | None = None) -> Tensor:
    """Returns the slots that tokens ``first`` to ``end`` see, in the order of rows: int64 ``[end - first, K]``; -1 is none."""
    if isinstance(source, ChosenRows):
        return source.slots[first:end]
    positions, token_rows = source.positions[first:end], source.token_rows[first:end]
    ends = ((positions + 1) // source.ratio)[:, None]
    row = torch.arange(source.width, device=positions.device)
    if source.window is not None:
        row = row + (positions[:, None] - source.window + 1).clamp_(min=0)
    is_seen = row < ends
    entry = torch.where(is_seen, row // source.page_rows, 0)
    pages = source.table[token_rows[:, None], entry].long()
    return torch.where(is_seen, pages * source.page_rows + row % source.page_rows, -1)


def rows_at(source: RowSource, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows of slots ``[T, K]``, ``[T, K, n]``; zeros for slot -1."""
    if source.packed is not None:
        return load_packed(source.pool, slots, source.packed).to(dtype)
    return source.pool[slots.clamp(min=0)].to(dtype).masked_fill_((slots < 0)[..., None], 0)


def slots_behind_first(source: RangeRows, kv_lens: Tensor, qo_indptr: Tensor) -> Tensor:
    """Returns the slots of a window without row 0, which may never have been written.

    Args:
        source: With a window; its positions are not read: those of a row's last tokens end at its length.
        kv_lens: int64 ``[B]``.
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.

    Returns:
        As ``slots_of``, of all tokens.
    """
    assert source.window is not None, "only windows hide their first row"
    ends = qo_indptr[1:].long().index_select(0, source.token_rows)
    token = torch.arange(source.token_rows.shape[0], device=kv_lens.device)
    positions = kv_lens.index_select(0, source.token_rows) - ends + token
    slots = slots_of(replace(source, positions=positions))
    slots[:, 0].masked_fill_(positions < source.window, -1)
    return slots
