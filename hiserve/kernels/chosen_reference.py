"""Attention to chosen rows, and the choice, in plain torch; to rows by slot of fixed shape, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels import union_reference
from hiserve.kernels.chosen_bits import ExpandedRows, unpack_bits
from hiserve.kernels.union_reference import choose_bits as choose_bits
from hiserve.kernels.union_reference import choose_rows as choose_rows
from hiserve.kernels.union_rows import ChosenRows

_NUM_SCORES = 1 << 24  # in memory at once


def can_attend_expanded(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether ``attend_expanded`` has heads of so many elements: of any."""
    del key_dim, value_dim, dtype
    return True


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


def attend_expanded(
    q: Tensor, keys: Tensor, values: Tensor, bits: Tensor, rows: ExpandedRows, scale: float, out: Tensor
) -> None:
    """Attends to chosen keys of prompts, which are expanded.

    Args:
        q: ``[T, num_heads, d]``.
        keys: ``[num_keys, num_heads, d]``.
        values: ``[num_keys, num_heads, v]``.
        bits: From ``choose_bits``, of the tokens of these rows among others: token i of a row has chosen key k of it, which is no
            later than the token, if bit k of its words is set. At least one is.
        rows: Where the tokens and keys of rows lie.
        scale: Factor of the scores.
        out: ``[T, num_heads, v]``. Written for the tokens of these rows.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    for token, count, bit, key, prefix in rows.host:
        mine = slice(key, key + prefix + count)
        own_keys, own_values = keys[mine].to(wide), values[mine].to(wide)
        step = max(1, _NUM_SCORES // (q.shape[1] * len(own_keys)))
        for first in range(0, count, step):
            number = min(step, count - first)
            some = slice(token + first, token + first + number)
            is_chosen = unpack_bits(bits[bit + first : bit + first + number], len(own_keys))
            scores = torch.einsum("nhd,mhd->hnm", q[some].to(wide), own_keys).mul_(scale)
            shares = scores.masked_fill_(~is_chosen, -torch.inf).softmax(-1)
            out[some] = torch.einsum("hnm,mhv->nhv", shares, own_values).to(out.dtype)
