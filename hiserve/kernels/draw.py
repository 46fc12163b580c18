"""Chooses tokens in Triton: the best of each row of logits, or of logits with Gumbel noise.

A row is split into parts so that a single row keeps the device busy; a second launch joins the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import FreeDraws, TokenMasks
from hiserve.kernels.step_reference import SAMPLE_STREAM

_PLAIN_BLOCK = 4096
_NOISY_BLOCK = 1024
_NUM_WARPS = 8
_MAX_PROGRAMS = 1024  # about as many as a large device runs at once


def greedy(logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
    """Returns the largest allowed entry of each row of ``[S, vocab_size]``, int64 ``[S]``; of equal ones the lowest."""
    values, entries = best_of_parts(logits, masks)
    return _join(values, entries, logits.shape[1])


def draw_free(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    is_drawn: Tensor | None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Draws from all allowed tokens, in three launches: maximum, noise, join. See ``StepOps``."""
    maxima, _ = best_of_parts(logits, masks)
    draws = FreeDraws(temperature, seed, choice, position, is_drawn)
    return _join(*drawn_of_parts(logits, maxima, draws, masks), logits.shape[1])


def mask_columns(masks: TokenMasks | None, first: int = 0) -> tuple[Tensor | None, Tensor | None, int]:
    """Returns the masks of entries from ``first`` on, as kernels take them: entries, words, words of one mask."""
    return (None, None, 0) if masks is None else (masks.entries, masks.words[:, first // 32 :], masks.words.shape[1])


def best_of_parts(logits: Tensor, masks: TokenMasks | None, first: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the largest allowed value of each part of each row, ``[S, num_parts]``, and its place in the row; ``first`` is that of the row's first entry in the vocabulary."""
    values, entries, num_blocks = _new_parts(logits, _PLAIN_BLOCK)
    _find_best[(values.shape[1], values.shape[0])](
        logits, *mask_columns(masks, first), values, entries, logits.stride(0), logits.shape[1], num_blocks,
        BLOCK=_PLAIN_BLOCK, num_warps=_NUM_WARPS, **early_launch(logits.device),
    )  # fmt: skip
    return values, entries


def drawn_of_parts(
    logits: Tensor, maxima: Tensor, draws: FreeDraws, masks: TokenMasks | None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Like ``best_of_parts``, which gave the ``maxima``, with noise in rows that draw."""
    size = logits.shape[1]
    values, entries, num_blocks = _new_parts(logits, _NOISY_BLOCK)
    _find_drawn[(values.shape[1], values.shape[0])](
        logits, maxima, *draws, *mask_columns(masks, first), values, entries,
        logits.stride(0), size, first, num_blocks, maxima.shape[1],
        TINY=torch.finfo(values.dtype).tiny, STREAM=SAMPLE_STREAM, MAX_PARTS=max_parts(size), BLOCK=_NOISY_BLOCK,
        num_warps=_NOISY_BLOCK // 256, **early_launch(logits.device),
    )  # fmt: skip
    return values, entries


def _new_parts(logits: Tensor, block: int) -> tuple[Tensor, Tensor, int]:
    """Returns memory for the best value and entry of each part, ``[S, num_parts]``, and the blocks of a part."""
    assert logits.stride(1) == 1, f"logits {logits.stride()} apart"
    num_rows, size = logits.shape
    num_blocks = max(1, triton.cdiv(num_rows * triton.cdiv(size, block), _MAX_PROGRAMS))
    shape = (num_rows, triton.cdiv(size, num_blocks * block))
    values = torch.empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return values, torch.empty(shape, dtype=torch.int32, device=logits.device), num_blocks


def max_parts(size: int) -> int:
    """Bound on the parts of a row, independent of the number of rows: each bound compiles a variant."""
    parts: int = triton.next_power_of_2(triton.cdiv(size, _NOISY_BLOCK))
    return parts


def _join(values: Tensor, entries: Tensor, size: int) -> Tensor:
    num_rows, num_parts = values.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _join_parts[(num_rows,)](
        values, entries, tokens, num_parts, MAX_PARTS=max_parts(size), num_warps=4, **early_launch(values.device)
    )
    return tokens


@triton.jit(do_not_specialize=["mask_of", "num_words", "num_blocks"])
def _find_best(  # type: ignore[no-untyped-def]
    logits, mask_of, words, num_words, values, entries, row_stride, size, num_blocks,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the best entry of one part of a row."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    first = part * num_blocks
    best = tl.full([BLOCK], -float("inf"), values.dtype.element_ty)
    where = first * BLOCK + tl.arange(0, BLOCK)
    for block in range(first, tl.minimum(first + num_blocks, tl.cdiv(size, BLOCK))):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + entry, mask=entry < size, other=-float("inf"))
        x = allowed(x.to(values.dtype.element_ty), row, entry, size, mask_of, words, num_words)
        best, where = _better(best, where, x, entry)
    _store_part(best, where, values, entries, row * tl.num_programs(0) + part, size)


@triton.jit(
    do_not_specialize=[
        "temperature",
        "seed",
        "choice",
        "position",
        "is_drawn",
        "mask_of",
        "num_words",
        "num_blocks",
        "num_maxima",
    ]
)
def _find_drawn(  # type: ignore[no-untyped-def]
    logits, maxima, temperature, seed, choice, position, is_drawn, mask_of, words, num_words, values, entries,
    row_stride, size, first_entry, num_blocks, num_maxima,
    TINY: tl.constexpr, STREAM: tl.constexpr, MAX_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the best entry of one part of a row, noise added if the row draws."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = tl.arange(0, MAX_PARTS)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    maximum = tl.max(tl.load(maxima + row * num_maxima + number, mask=number < num_maxima, other=-float("inf")), 0)
    divisor = tl.maximum(tl.load(temperature + row).to(values.dtype.element_ty), TINY)
    draws = True
    if is_drawn is not None:
        draws = tl.load(is_drawn + row) != 0
    first = part * num_blocks
    best = tl.full([BLOCK], -float("inf"), values.dtype.element_ty)
    where = first * BLOCK + tl.arange(0, BLOCK)
    for block in range(first, tl.minimum(first + num_blocks, tl.cdiv(size, BLOCK))):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + entry, mask=entry < size, other=-float("inf")).to(
            values.dtype.element_ty
        )
        x = allowed(x, row, entry, size, mask_of, words, num_words)
        if draws:
            noise = noise_words(
                tl.load(seed + row), tl.load(choice + row), tl.load(position + row), STREAM, block, BLOCK, first_entry
            )
            x = divide(x - maximum, divisor) + gumbel(noise).to(values.dtype.element_ty)
        best, where = _better(best, where, x, entry)
    _store_part(best, where, values, entries, row * tl.num_programs(0) + part, size)


@triton.jit(do_not_specialize=["num_parts"])
def _join_parts(values, entries, tokens, num_parts, MAX_PARTS: tl.constexpr, IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program finds the best part of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MAX_PARTS)
    mask = part < num_parts
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    value = tl.load(values + row * num_parts + part, mask=mask, other=-float("inf"))
    entry = tl.load(entries + row * num_parts + part, mask=mask, other=2**31 - 1)
    is_best = value == tl.max(value, 0)
    tl.store(tokens + row, tl.min(tl.where(is_best, entry, 2**31 - 1), 0).to(tl.int64))


@triton.jit
def allowed(x, row, entry, size, mask_of, words, num_words):  # type: ignore[no-untyped-def]
    """Returns the values of some entries of a row, -inf where its mask, if it has one, lacks their bit."""
    if mask_of is not None:
        mask = tl.load(mask_of + row).to(tl.int64)
        if mask >= 0:
            word = tl.load(words + mask * num_words + entry // 32, mask=entry < size, other=0)
            x = tl.where(((word >> (entry % 32)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _better(best, where, x, entry):  # type: ignore[no-untyped-def]
    """Keeps the greater value, the first of equal ones; NaN counts as infinity."""
    x = tl.where(x != x, float("inf"), x)
    is_better = x > best
    return tl.where(is_better, x, best), tl.where(is_better, entry, where)


@triton.jit
def _store_part(best, where, values, entries, place, size):  # type: ignore[no-untyped-def]
    top = tl.max(best, 0)
    tl.store(values + place, top)
    tl.store(entries + place, tl.min(tl.where(best == top, where, size), 0))


@triton.jit
def divide(x, y):  # type: ignore[no-untyped-def]
    """Division with IEEE 754 rounding; ``/`` has it only in float64."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def noise_words(seed, choice, position, stream, block, BLOCK: tl.constexpr, first=0):  # type: ignore[no-untyped-def]
    """One random word for each entry of a block, counted from ``first``, as in ``kernels.noise.gumbel``: four to a counter."""
    counter = (first // 4 + block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, position.to(tl.uint32), choice.to(tl.uint32), stream)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])


@triton.jit
def gumbel(words):  # type: ignore[no-untyped-def]
    uniform = (words.to(tl.float64) + 0.5) * 2.0**-32
    return -tl.log(-tl.log(uniform))
