"""Chooses tokens: greedy, or drawn with random numbers keyed by position.

A draw is the argmax of scaled, filtered logits plus Gumbel noise (Gumbel-max, Gumbel 1954; Maddison et al. 2014).
The noise is a function of (seed, choice, position, vocabulary entry), so a stream does not depend on
the other rows of a batch, on chunking or on restarts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.kernels.reference import gumbel
from hiserve.kernels.sampling import argmax, largest
from hiserve.sampling.batch import Draws, Filter, SamplingBatch
from hiserve.sampling.changes import change

SAMPLE_STREAM = 0


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the token of each row, int64 ``[S]``; of equal scores the lowest token wins.

    Args:
        logits: ``[S, vocab_size]``, any floating type. Unchanged.
        batch: The rows' parameters.
    """
    return argmax(scores(logits, batch))


def scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns what ``sample`` takes the argmax of: changed logits; for a row that draws scaled, filtered, plus noise.

    Returns:
        ``[S, vocab_size]``, float32, or float64 for float64 logits; -inf where filtered out.
    """
    changed = change(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch)
    if batch.draws is None:
        return changed
    subset = batch.draws.subset
    return subset.put(changed, _noisy(subset.take(changed), batch.draws))


def _noisy(logits: Tensor, draws: Draws) -> Tensor:
    # At least the smallest normal number: a temperature may vanish in float32, and must not divide 0 by 0.
    temperature = draws.temperature.to(logits.dtype).clamp_(min=torch.finfo(logits.dtype).tiny)
    # Less the maximum, so that a tiny temperature gives -inf for the others and never inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    kept = scaled
    for each in draws.filters:
        mine = each.subset.take(scaled)
        kept = each.subset.put(kept, mine.masked_fill(mine < _threshold(mine, each), -torch.inf))
    if draws.log_min_p is not None:
        kept = kept.masked_fill(kept < draws.log_min_p.to(kept.dtype)[:, None], -torch.inf)
    noise = gumbel(draws.seed, draws.choice, draws.position, SAMPLE_STREAM, logits.shape[1])
    return kept + noise.to(kept.dtype)


def _threshold(scaled: Tensor, filter_: Filter) -> Tensor:
    """Returns the least score each row keeps, ``[n, 1]``: top-k first, then top-p of what top-k left.

    Entries equal to the threshold are all kept, so that the order of equal scores cannot matter.
    """
    ascending = largest(scaled, filter_.max_kept or scaled.shape[1])
    size = ascending.shape[1]
    num_cut = torch.where(filter_.top_k > 0, size - filter_.top_k, 0)
    is_cut = torch.arange(size, device=scaled.device) < num_cut[:, None]
    probabilities = ascending.masked_fill(is_cut, -torch.inf).softmax(-1)
    # Summed from the smallest up: an entry falls if it and all below it weigh at most 1 - top_p.
    mass = probabilities.cumsum(-1, dtype=torch.float64)
    num_fallen = (mass <= 1 - filter_.top_p[:, None]).sum(-1, keepdim=True).clamp_(max=size - 1)
    return ascending.gather(1, num_fallen)
