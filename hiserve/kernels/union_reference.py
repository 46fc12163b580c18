"""Attention over the union of several sources of rows, and the choice of rows by an index, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hiserve.kernels.chosen_bits import num_words, pack_bits
from hiserve.kernels.pairs import rotate_pairs
from hiserve.kernels.union_rows import RangeRows, RowSource, rows_at, slots_of

_NUM_ELEMENTS = 1 << 23  # of gathered rows in memory at once


def attend(
    q: Tensor,
    sources: Sequence[RowSource],
    sink: Tensor | None,
    scale: float,
    turns: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends by one softmax over all rows of all sources, each of which is key and value, and a sink, which has no value.

    Args:
        q: ``[T, H, n]``.
        sources: Of rows of ``n`` elements, at least one.
        sink: ``[H]``, a score that is not scaled, float32, or float64 for float64; None is none.
        scale: Factor of the scores of rows.
        turns: Cosines and sines, ``[T, m]``, as of ``pairs.rotate_pairs``: values, whose rows are turned by their positions,
            are turned back by their token's. None leaves them.

    Returns:
        ``[T, H, n]``, of the type of ``q``, zeros where a token sees no row; and the natural logarithm of the sum of
        exponentials of the rows' scores, ``[T, H]``, float32 or float64, -inf where it sees none. The sink takes no part in it.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)
    num_rows = max(1, sum(slots_of(each, 0, 0).shape[1] for each in sources))
    step = max(1, _NUM_ELEMENTS // (num_rows * q.shape[2]))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        slots = [slots_of(each, part.start, part.stop) for each in sources]
        rows = torch.cat([rows_at(each, some, wide) for each, some in zip(sources, slots, strict=True)], 1)
        scores = torch.einsum("thn,tkn->thk", q[part].to(wide), rows).mul_(scale)
        scores.masked_fill_((torch.cat(slots, 1) < 0)[:, None], -torch.inf)
        lse = scores.logsumexp(-1) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
        total = lse if sink is None else torch.logaddexp(lse, sink.to(wide))
        shares = scores.sub_(total.masked_fill(total == -torch.inf, 0)[..., None]).exp_()
        values, sums[part] = torch.einsum("thk,tkn->thn", shares, rows), lse
        out[part] = values if turns is None else rotate_pairs(values, *(angles[part] for angles in turns), is_back=True)
    return out, sums


def merge(parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Joins the results of ``attend`` over parts of the rows, none of which had the sink.

    Args:
        parts: Of each part its values and logarithms, at least one part.
        sink: ``[H]``, taken once for all; None is none.

    Returns:
        As ``attend``.
    """
    outs, sums = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    lse = sums.logsumexp(0)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    shares = (sums - total.masked_fill(total == -torch.inf, 0)).exp_()
    return (outs * shares[..., None]).sum(0).to(outs.dtype), lse


def choose_rows(q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
    """Chooses the rows of each token by the scores of an index: the best, and of equal ones the first.

    The score of a row is the weighted sum over heads of what is positive in query times key.

    Args:
        q: ``[T, heads, n]``.
        weights: ``[T, heads]``, float32, or float64 for float64, in which scores are computed.
        keys: Of ``n`` elements.
        most: Rows to choose; where a token sees no more, all are chosen.
        scale: Factor of products of queries and keys, above 0.

    Returns:
        Slots, int64 ``[T, most]``, in the order of rows; -1 is none, and follows all others.
    """
    out = q.new_full((q.shape[0], most), -1, dtype=torch.int64)
    for part in _parts(q, keys):
        slots = slots_of(keys, part.start, part.stop)
        if keys.width > most:
            slots = slots.gather(1, _best(q[part], weights[part], keys, slots, most, scale).sort(-1).values)
        out[part, : slots.shape[1]] = slots
    return out


def choose_bits(q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
    """Like ``choose_rows``, of tokens that see at most ``MAX_SPAN`` times ``most`` rows: int64 ``[T, num_words(keys.width)]``.

    Bit v of a token's words says whether it has chosen row v (``chosen_bits.pack_bits``).
    """
    out = q.new_empty((q.shape[0], num_words(keys.width)), dtype=torch.int64)
    for part in _parts(q, keys):
        slots = slots_of(keys, part.start, part.stop)
        is_chosen = slots >= 0
        if keys.width > most:
            best = _best(q[part], weights[part], keys, slots, most, scale)
            is_chosen &= torch.zeros_like(is_chosen).scatter_(1, best, True)
        out[part] = pack_bits(is_chosen)
    return out


def _parts(q: Tensor, keys: RangeRows) -> list[slice]:
    """Returns slices of tokens whose scores are in memory at once."""
    step = max(1, _NUM_ELEMENTS // max(1, keys.width * max(q.shape[1:])))
    return [slice(first, first + step) for first in range(0, q.shape[0], step)]


def _best(q: Tensor, weights: Tensor, keys: RangeRows, slots: Tensor, most: int, scale: float) -> Tensor:
    """Returns which of the slots are the best, ``[T, most]``, best first."""
    scores = _scores(q, weights, keys, slots, scale)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :most]


def _scores(q: Tensor, weights: Tensor, keys: RangeRows, slots: Tensor, scale: float) -> Tensor:
    """Returns the scores of rows, ``[T, K]``; -inf of those that are none."""
    wide = weights.dtype
    products = torch.einsum("thn,tkn->thk", q.to(wide), rows_at(keys, slots, wide)).mul_(scale).relu_()
    return torch.einsum("thk,th->tk", products, weights).masked_fill_(slots < 0, -torch.inf)
