"""Changes logits before a token is chosen: biases, penalties, tokens that may not be chosen yet."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.kernels.sampling import token_counts
from hiserve.sampling.batch import Biases, Penalties, SamplingBatch


def change(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the logits after biases, then penalties; the argument stays as it is.

    A token that may not be chosen yet has a bias of -inf, which no penalty changes, so the order of
    the two does not matter to it.

    Args:
        logits: ``[S, vocab_size]``, float32 or float64.
        batch: The rows' parameters.
    """
    if batch.biases is not None:
        subset = batch.biases.subset
        logits = subset.put(logits, _biased(subset.take(logits), batch.biases))
    if batch.penalties is not None:
        subset = batch.penalties.subset
        logits = subset.put(logits, _penalised(subset.take(logits), batch.penalties))
    return logits


def _biased(logits: Tensor, biases: Biases) -> Tensor:
    return logits.scatter_add(1, biases.tokens, biases.values.to(logits.dtype))


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and output; frequency and presence over the output."""
    size = logits.shape[1]
    repetition, presence, frequency = (
        column.to(logits.dtype)[:, None] for column in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    # Never 0 nor infinite, though a penalty may vanish in float32: 0 times -inf would be no number.
    limits = torch.finfo(logits.dtype)
    repetition = repetition.clamp(min=limits.tiny)
    is_known = token_counts(penalties.tokens, None, penalties.position, size) > 0
    less = torch.where(logits > 0, (logits / repetition).clamp_(max=limits.max), logits * repetition)
    logits = torch.where(is_known, less, logits)
    in_output = token_counts(penalties.tokens, penalties.num_prompt, penalties.position, size)
    return logits - frequency * in_output - presence * (in_output > 0)
