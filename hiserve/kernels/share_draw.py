"""Chooses tokens in Triton where each rank of a group has the logits of a share of the vocabulary.

As ``kernels.draw`` does for parts of a row: each rank finds its best entry of each row, and joins those of all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.draw import (
    allowed,
    best_of_parts,
    divide,
    drawn_of_parts,
    gumbel,
    mask_columns,
    max_parts,
    noise_words,
)
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import ENTRY_WORDS, FreeDraws, TokenMasks
from hiserve.kernels.step_reference import SAMPLE_STREAM


def best_entries(logits: Tensor, first: int, draws: FreeDraws | None, masks: TokenMasks | None) -> Tensor:
    """See ``StepOps``; the last of three launches with draws, of two without."""
    maxima, entries = best_of_parts(logits, masks, first)
    values = maxima
    if draws is not None:
        values, entries = drawn_of_parts(logits, maxima, draws, masks, first)
    num_rows, size = logits.shape
    found = torch.empty((num_rows, ENTRY_WORDS), dtype=values.dtype, device=logits.device)
    _, seed, choice, position, _ = (None,) * 5 if draws is None else draws
    _pack_best[(num_rows,)](
        logits, values, entries, maxima, seed, choice, position, *mask_columns(masks, first), found,
        logits.stride(0), size, first, values.shape[1], maxima.shape[1],
        STREAM=SAMPLE_STREAM, MAX_PARTS=max_parts(size), NUM_WORDS=ENTRY_WORDS,
        num_warps=4, **early_launch(logits.device),
    )  # fmt: skip
    return found


def join_entries(entries: Tensor, draws: FreeDraws | None) -> Tensor:
    """See ``StepOps``; one launch."""
    assert entries.is_contiguous(), f"entries {entries.stride()} apart"
    num_ranks, num_rows, _ = entries.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=entries.device)
    temperature, is_drawn = (None, None) if draws is None else (draws.temperature, draws.is_drawn)
    _join_entries[(num_rows,)](
        entries, temperature, is_drawn, tokens, num_ranks,
        TINY=torch.finfo(entries.dtype).tiny, MAX_RANKS=triton.next_power_of_2(num_ranks), NUM_WORDS=ENTRY_WORDS,
        num_warps=1, **early_launch(entries.device),
    )  # fmt: skip
    return tokens


@triton.jit(
    do_not_specialize=["seed", "choice", "position", "mask_of", "num_words", "num_parts", "num_maxima"],
)
def _pack_best(  # type: ignore[no-untyped-def]
    logits, values, entries, maxima, seed, choice, position, mask_of, words, num_words, found,
    row_stride, size, first_entry, num_parts, num_maxima,
    STREAM: tl.constexpr, MAX_PARTS: tl.constexpr, NUM_WORDS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the best part of one row, and what other ranks need to know of its entry."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MAX_PARTS)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    value = tl.load(values + row * num_parts + part, mask=part < num_parts, other=-float("inf"))
    place = tl.load(entries + row * num_parts + part, mask=part < num_parts, other=2**31 - 1)
    entry = tl.min(tl.where(value == tl.max(value, 0), place, 2**31 - 1), 0)
    maximum = tl.max(tl.load(maxima + row * num_maxima + part, mask=part < num_maxima, other=-float("inf")), 0)
    logit = tl.load(logits + row * row_stride + entry).to(found.dtype.element_ty)
    logit = allowed(logit, row, entry, size, mask_of, words, num_words)
    noise = tl.zeros([], found.dtype.element_ty)
    if seed is not None:
        each = noise_words(
            tl.load(seed + row), tl.load(choice + row), tl.load(position + row), STREAM, entry // 4, 4, first_entry
        )
        noise = tl.sum(tl.where(tl.arange(0, 4) == entry % 4, gumbel(each), 0.0), 0).to(found.dtype.element_ty)
    tl.store(found + row * NUM_WORDS, logit)
    tl.store(found + row * NUM_WORDS + 1, noise)
    tl.store(found + row * NUM_WORDS + 2, maximum)
    tl.store(found + row * NUM_WORDS + 3, (first_entry + entry).to(found.dtype.element_ty))


@triton.jit(do_not_specialize=["temperature", "is_drawn"])
def _join_entries(  # type: ignore[no-untyped-def]
    entries, temperature, is_drawn, tokens, num_ranks,
    TINY: tl.constexpr, MAX_RANKS: tl.constexpr, NUM_WORDS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the best of all ranks' entries of one row."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    rank = tl.arange(0, MAX_RANKS)
    mask = rank < num_ranks
    place = entries + (rank * num_rows + row) * NUM_WORDS
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    score = tl.load(place, mask=mask, other=-float("inf"))
    if temperature is not None:
        draws = True
        if is_drawn is not None:
            draws = tl.load(is_drawn + row) != 0
        if draws:
            maximum = tl.max(tl.load(place + 2, mask=mask, other=-float("inf")), 0)
            divisor = tl.maximum(tl.load(temperature + row).to(score.dtype), TINY)
            score = divide(score - maximum, divisor) + tl.load(place + 1, mask=mask, other=0.0)
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(mask, score, -float("inf"))
    token = tl.load(place + 3, mask=mask, other=float("inf"))
    tl.store(tokens + row, tl.min(tl.where(score == tl.max(score, 0), token, float("inf")), 0).to(tl.int64))
