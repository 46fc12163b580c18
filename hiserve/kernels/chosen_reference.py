"""Attention of absorbed queries to chosen rows, and the choice, in plain torch: of fixed shape, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels import union_reference
from hiserve.kernels.union_reference import choose_rows as choose_rows
from hiserve.kernels.union_rows import ChosenRows


def attend_chosen(
    q: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    rank: int,
    packed: PackedPages | None = None,
) -> Tensor:
    """Attends to rows by slot.

    Args:
        q: ``[T, num_heads, n]``, absorbed.
        pool: Rows, ``[num_slots, n]``, or packed.
        slots: int64 ``[T, K]``, of the rows of each token, then anything.
        counts: int64 ``[T]``. How many of these there are, at least 1.
        scale: Factor of the scores.
        rank: Elements of a value, the first of a row.
        packed: How ``pool`` holds rows in 8 bits; None is as they are.

    Returns:
        ``[T, num_heads, rank]``.
    """
    is_there = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
    found, _ = union_reference.attend(q, [ChosenRows(pool, torch.where(is_there, slots, -1), packed)], None, scale)
    return found[..., :rank]
