"""Chooses tokens: greedy, temperature, top-k, top-p, with random numbers keyed by position.

A draw is the argmax of scaled, filtered logits plus Gumbel noise (Gumbel-max, Gumbel 1954; Maddison et al. 2014).
The noise is a function of (seed, choice, position, vocabulary entry), so a stream does not depend on
the other rows of a batch, on chunking or on restarts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hiserve.kernels.reference import gumbel
from hiserve.sampling.params import SamplingBatch

SAMPLE_STREAM = 0


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the token of each row, int64 ``[S]``; of equal scores the lowest token wins.

    Args:
        logits: ``[S, vocab_size]``, any floating type.
        batch: The rows' parameters.
    """
    return scores(logits, batch).argmax(-1)


def scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns what ``sample`` takes the argmax of: filtered logits over temperature, plus noise.

    A greedy row's scores are its logits, less their maximum when another row needs noise.

    Returns:
        ``[S, vocab_size]``, float32, or float64 for float64 logits; -inf where filtered out.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not batch.has_noise:
        return wide
    temperature = batch.temperature.to(wide.dtype)[:, None]
    is_greedy = temperature == 0
    # Less the maximum, so that a tiny temperature gives -inf for the others and never inf.
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature.masked_fill(is_greedy, 1)
    if batch.has_filter:
        scaled = scaled.masked_fill(scaled < _threshold(scaled, batch), -torch.inf)
    noise = gumbel(batch.seed, batch.choice, batch.position, SAMPLE_STREAM, wide.shape[1]).to(wide.dtype)
    return scaled + noise.masked_fill_(is_greedy, 0)


def _threshold(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the least score each row keeps, ``[S, 1]``: top-k first, then top-p of what top-k left.

    Entries equal to the threshold are all kept, so that the order of equal scores cannot matter.
    """
    size = scaled.shape[1]
    ascending = _sorted_values(scaled)
    top_k = torch.where(batch.top_k > 0, batch.top_k.clamp(max=size), size)
    least = ascending.gather(1, (size - top_k)[:, None])
    probabilities = ascending.masked_fill(ascending < least, -torch.inf).softmax(-1)
    top_p = batch.top_p.to(scaled.dtype)[:, None]
    # Summed from the smallest up: an entry falls if it and all below it weigh at most 1 - top_p.
    num_fallen = (probabilities.cumsum(-1) <= 1 - top_p).sum(-1, keepdim=True).clamp_(max=size - 1)
    return ascending.gather(1, num_fallen)


def _sorted_values(x: Tensor) -> Tensor:
    """Sorts each row, ascending. On CPU by numpy: 8 rows of 4,096 took it 44 µs, and torch 1,430 µs."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(-1).values
