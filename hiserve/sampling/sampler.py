"""From logits to tokens and their scores: biases and penalties, then the best token or a draw keyed by position.

A draw is the argmax of scaled, filtered logits plus Gumbel noise (Gumbel-max, Gumbel 1954; Maddison et al. 2014).
The noise is a function of (seed, choice, position, vocabulary entry), so a stream does not depend on
the other rows of a batch, on chunking or on restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.kernels.noise import gumbel, gumbel_at
from hiserve.kernels.sampling import argmax, ascending, likeliest, masked, token_counts
from hiserve.kernels.step_ops import TokenMasks
from hiserve.kernels.step_reference import SAMPLE_STREAM

MAX_FEW = 64  # a top-k up to here needs no sort of the vocabulary
MAX_SCORED = 128  # rows at a time: bounds the copy of logits in float32, 65 MB for a vocabulary of 128,000


@dataclass(frozen=True, slots=True, eq=False)
class Subset:
    """Some rows of a batch. Only they are computed: a row's arithmetic does not depend on the others' parameters.

    ``index`` is int64 ``[n]``, ascending; None for all rows.
    """

    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Returns these rows of ``x``."""
        return x if self.index is None else x.index_select(0, self.index)

    def put(self, x: Tensor, rows: Tensor) -> Tensor:
        """Returns ``x`` with these rows replaced."""
        return rows if self.index is None else x.index_copy(0, self.index, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Rows with logit biases.

    Attributes:
        subset: n of the batch's rows.
        tokens: int64 ``[n, W]``. Padded with token 0.
        values: float64 ``[n, W]``. Added to their logits: 0 for padding, -inf for tokens that may not be chosen.
    """

    subset: Subset
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows with penalties for earlier tokens.

    Attributes:
        subset: n of the batch's rows.
        repetition: float64 ``[n]``; 1 is none.
        presence: float64 ``[n]``; 0 is none.
        frequency: float64 ``[n]``; 0 is none.
        tokens: int64 ``[n, L]``. Each row's tokens; meaningless from ``position`` on.
        num_prompt: int64 ``[n]``. Leading tokens that are the prompt.
        position: int64 ``[n]``. Position of the token to draw; tokens before it are known.
    """

    subset: Subset
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    tokens: Tensor
    num_prompt: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows that draw at random by the same operations.

    Attributes:
        subset: n of the batch's rows.
        temperature: float64 ``[n]``, above 0.
        top_k: int64 ``[n]``; 0 keeps all.
        top_p: float64 ``[n]``, in (0, 1].
        log_min_p: float64 ``[n]``, -inf keeps all; None when no row has a min-p.
        seed: int64 ``[n]``.
        choice: int64 ``[n]``.
        position: int64 ``[n]``. Absolute position of the token to draw.
    """

    subset: Subset
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor | None
    seed: Tensor
    choice: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The subsets of a batch, None where empty. A row that draws is in one of the last three, a greedy one in none."""

    biases: Biases | None = None
    penalties: Penalties | None = None
    free: Draws | None = None  # draws from all tokens
    few: Draws | None = None  # draws with a top-k of at most ``MAX_FEW``
    filtered: Draws | None = None  # draws with another top-k or a top-p
    masks: TokenMasks | None = None  # the tokens that each row may draw; None allows all


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the token of each row, int64 ``[S]``; of equal scores the lowest token wins.

    ``logits`` are ``[S, vocab_size]``, any floating type, unchanged.
    """
    return argmax(scores(logits, batch))


def scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the scores that ``sample`` maximizes: changed logits; of a row that draws scaled, filtered, with noise.

    Returns:
        ``[S, vocab_size]``, float32, or float64 for float64 logits; -inf where filtered out.
    """
    changed = change(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch)
    out = changed
    for draws, noisy in ((batch.free, _free), (batch.few, _few), (batch.filtered, _filtered)):
        if draws is not None:
            out = draws.subset.put(out, noisy(_scaled(draws.subset.take(changed), draws), draws))
    return out


def _scaled(logits: Tensor, draws: Draws) -> Tensor:
    """Logits over temperature, at most 0."""
    # At least the smallest normal number: a temperature may underflow in float32, and 0 / 0 is NaN.
    temperature = draws.temperature.to(logits.dtype).clamp_(min=torch.finfo(logits.dtype).tiny)
    # The maximum is subtracted, so that a tiny temperature gives -inf for the others and never inf.
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _free(scaled: Tensor, draws: Draws) -> Tensor:
    noise = gumbel(draws.seed, draws.choice, draws.position, SAMPLE_STREAM, scaled.shape[1])
    return _above_min_p(scaled, draws) + noise.to(scaled.dtype)


def _filtered(scaled: Tensor, draws: Draws) -> Tensor:
    least = _threshold(ascending(scaled), draws)
    return _free(scaled.masked_fill(scaled < least, -torch.inf), draws)


def _few(scaled: Tensor, draws: Draws) -> Tensor:
    """Like ``_filtered``, with noise only for the ``MAX_FEW`` likeliest tokens; ties beyond these are dropped."""
    tokens = likeliest(scaled.to(torch.float32), min(MAX_FEW, scaled.shape[1]))
    values = scaled.gather(1, tokens)
    values = values.masked_fill(values < _threshold(ascending(values), draws), -torch.inf)
    noise = gumbel_at(draws.seed, draws.choice, draws.position, SAMPLE_STREAM, tokens)
    noisy = _above_min_p(values, draws) + noise.to(scaled.dtype)
    return torch.full_like(scaled, -torch.inf).scatter_(1, tokens, noisy)


def _threshold(ordered: Tensor, draws: Draws) -> Tensor:
    """Returns the least value each row keeps, ``[n, 1]``: top-k first, then top-p of the remaining values.

    Values equal to the threshold are all kept, so that the order of equal values cannot matter. ``ordered`` is
    ``[n, size]``, ascending.
    """
    size = ordered.shape[1]
    num_cut = torch.where(draws.top_k > 0, size - draws.top_k, 0)
    is_cut = torch.arange(size, device=ordered.device) < num_cut[:, None]
    probabilities = aligned(ordered.masked_fill(is_cut, -torch.inf)).softmax(-1)
    # Summed from the smallest: a value is dropped if it and all smaller ones have at most 1 - top_p.
    mass = probabilities.cumsum(-1, dtype=torch.float64)[:, :size]
    num_fallen = (mass <= 1 - draws.top_p[:, None]).sum(-1, keepdim=True).clamp_(max=size - 1)
    return ordered.gather(1, num_fallen)


def _above_min_p(scaled: Tensor, draws: Draws) -> Tensor:
    """Keeps values at least ``min_p`` times as likely as the likeliest token, whose score is 0."""
    if draws.log_min_p is None:
        return scaled
    return scaled.masked_fill(scaled < draws.log_min_p.to(scaled.dtype)[:, None], -torch.inf)


def change(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the logits, ``[S, vocab_size]``, after biases, penalties, then masks; the argument is unchanged.

    A token that may not be chosen yet has a bias of -inf, which no penalty changes, so the order of
    the two does not matter for it.
    """
    if batch.biases is not None:
        subset = batch.biases.subset
        logits = subset.put(logits, _biased(subset.take(logits), batch.biases))
    if batch.penalties is not None:
        subset = batch.penalties.subset
        logits = subset.put(logits, _penalised(subset.take(logits), batch.penalties))
    return logits if batch.masks is None else masked(logits, batch.masks.entries, batch.masks.words)


def _biased(logits: Tensor, biases: Biases) -> Tensor:
    return logits.scatter_add(1, biases.tokens, biases.values.to(logits.dtype))


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and output; frequency and presence over the output."""
    size = logits.shape[1]
    repetition, presence, frequency = (
        column.to(logits.dtype)[:, None] for column in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    # Neither 0 nor infinite, though a penalty may underflow in float32: 0 times -inf is NaN.
    limits = torch.finfo(logits.dtype)
    repetition = repetition.clamp(min=limits.tiny)
    is_known = token_counts(penalties.tokens, None, penalties.position, size) > 0
    less = torch.where(logits > 0, (logits / repetition).clamp_(max=limits.max), logits * repetition)
    logits = torch.where(is_known, less, logits)
    in_output = token_counts(penalties.tokens, penalties.num_prompt, penalties.position, size)
    return logits - frequency * in_output - presence * (in_output > 0)


def pack_scores(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Returns the scores of N tokens as ``core.plan.Scores.unpack`` reads them, int32 ``[N, 1 + 2 * num_top]``.

    Args:
        logits: ``[N, vocab_size]``, any floating type, before every bias, penalty, temperature and filter.
        tokens: int64 ``[N]``. The token to score of each row.
        num_top: Likeliest tokens to add, at most ``vocab_size``; of equal float32 log-probabilities the lower token
            comes first.
    """
    parts = zip(torch.split(logits, MAX_SCORED), torch.split(tokens, MAX_SCORED), strict=True)
    return torch.cat([_pack(part, chosen[:, None], num_top) for part, chosen in parts])


def _pack(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = aligned(wide).log_softmax(-1)[:, : wide.shape[1]].to(torch.float32)
    words = [logprobs.gather(1, tokens).view(torch.int32)]
    if num_top:
        top = likeliest(logprobs, num_top)
        words += [top.to(torch.int32), logprobs.gather(1, top).view(torch.int32)]
    return torch.cat(words, 1)


def aligned(logits: Tensor) -> Tensor:
    """Returns rows of float32 or float64 that begin at multiples of 16 bytes, if need be with entries of -inf at their ends.

    Otherwise torch's softmax of long rows on CUDA begins each row's sum at the next such multiple, so that its order would depend on
    the place of the row in the batch.
    """
    return F.pad(logits, (0, -logits.shape[1] % 4), value=-torch.inf) if logits.shape[1] % 4 else logits
