"""Sums of all ranks' rows in Triton, in one launch, where ranks write into each other's memory.

Each rank writes its rows into the inbox of every other one, as words of 8 bytes: 4 of data and the row's count of sums. A word arrives whole, so that
one with the right count has its data: no barrier, and no flag. NCCL's protocol LL and kernels of TensorRT-LLM and FlashInfer work alike.

Each row has two places in turn, by its count. Two suffice: a rank writes the words of count k + 2 after its own kernel of k + 1 has ended, for
which it had the other's words of k + 1, which that one wrote after its kernel of k had ended. So a kernel that is launched early writes behind
``await_previous``, as all do. Counts are on the device: the replay of a graph goes on where the launch before it ended, and another rank may
launch the same sums one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next

MAX_ROWS = 128  # twice the bytes of a sum cross the link: more rows are NCCL's
MAX_WORDS = 4096  # of a row: 8,192 columns of 16 bits
WORD_BYTES = 8

_WORDS_PER_WARP = 256
_MAX_WARPS = 16
_POLLS = 1024  # between two looks at memory of the host, which take as long as some polls


class Inboxes(NamedTuple):
    """The memory of all ranks, as one of them sees it.

    Attributes:
        addresses: int64 ``[size]``. Where each rank's inbox begins, int64 ``[2, size, MAX_ROWS, MAX_WORDS]``: by the parity of the count, the rank that
            writes, and row. At first all zeros.
        counts: int32 ``[MAX_ROWS]``. Sums of each row so far, modulo 2^32: the same on all ranks.
        is_ended: int32 ``[1]``, memory of the host that the device reads. Not 0 if no word comes any more.
        rank: Whose view it is.
    """

    addresses: Tensor
    counts: Tensor
    is_ended: Tensor
    rank: int


def inbox_bytes(size: int) -> int:
    """Returns the bytes of one rank's inbox."""
    return 2 * size * MAX_ROWS * MAX_WORDS * WORD_BYTES


def takes(x: Tensor) -> bool:
    """Whether rows of this shape and type can be summed; there is one at least."""
    num_words = x.shape[1] * x.element_size()
    is_known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and x.shape[0] <= MAX_ROWS and num_words % 4 == 0 and num_words // 4 <= MAX_WORDS


def push_sum(x: Tensor, inboxes: Inboxes) -> None:
    """Replaces ``x``, ``[T, n]``, by the sum of all ranks' ``x``: added in the order of ranks in float32, and rounded. See ``takes``."""
    _push(x, None, None, x, 0.0, inboxes)


def push_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, inboxes: Inboxes) -> None:
    """Adds that sum to ``residual`` in place and writes the norm to ``out``, as ``reference.add_rms_norm``; all are ``[T, n]``. ``x`` stays."""
    assert residual.is_contiguous() and out.is_contiguous(), f"{residual.stride()}, {out.stride()} apart"
    _push(x, residual, weight, out, eps, inboxes)


def _push(x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, eps: float, inboxes: Inboxes) -> None:
    assert takes(x) and x.is_contiguous(), f"{tuple(x.shape)} {x.dtype}, elements {x.stride()} apart"
    words = x.view(torch.int32)
    block = triton.next_power_of_2(words.shape[1])
    _push_kernel[(x.shape[0],)](
        words, residual, weight, out, *inboxes[:3], eps,
        RANK=inboxes.rank, NUM_RANKS=inboxes.addresses.shape[0], NUM_WORDS=words.shape[1], BLOCK=block,
        PER_WORD=4 // x.element_size(), MAX_ROWS=MAX_ROWS, MAX_WORDS=MAX_WORDS, POLLS=_POLLS,
        num_warps=min(_MAX_WARPS, max(1, block // _WORDS_PER_WARP)), **early_launch(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps"])
def _push_kernel(  # type: ignore[no-untyped-def]
    words, residual, weight, out, addresses, counts, is_ended, eps,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr,
    MAX_ROWS: tl.constexpr, MAX_WORDS: tl.constexpr, POLLS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program sends, awaits and adds one row; with a residual it adds and norms too."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    is_word = word < NUM_WORDS
    column = tl.arange(0, BLOCK * PER_WORD)
    is_column = column < NUM_WORDS * PER_WORD
    place = row.to(tl.int64) * (NUM_WORDS * PER_WORD) + column
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    mine = tl.load(words + row.to(tl.int64) * NUM_WORDS + word, mask=is_word, other=0)
    count = tl.load(counts + row) + 1
    parity = count & 1
    stamp = count.to(tl.int64) << 32
    message = stamp | mine.to(tl.uint32, bitcast=True).to(tl.int64)
    for step in tl.static_range(1, NUM_RANKS):
        rank = (RANK + step) % NUM_RANKS  # not all write to one rank first
        theirs = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
        theirs += ((parity * NUM_RANKS + RANK) * MAX_ROWS + row).to(tl.int64) * MAX_WORDS
        tl.store(theirs + word, message, mask=is_word, cache_modifier=".wt")
    if residual is not None:  # while words are under way
        value = tl.load(residual + place, mask=is_column, other=0.0).to(tl.float32)
        weights = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    inbox = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)), 16)
    total = tl.zeros([BLOCK * PER_WORD], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        if rank == RANK:
            bits = mine
        else:
            source = inbox + ((parity * NUM_RANKS + rank) * MAX_ROWS + row).to(tl.int64) * MAX_WORDS + word
            bits = _await_words(source, is_word, count, stamp, is_ended, POLLS)
        total += _elements(bits, dtype, PER_WORD)
    tl.store(counts + row, count)
    narrow = total.to(dtype)
    if residual is not None:
        value = (value + narrow.to(tl.float32)).to(dtype)
        tl.store(residual + place, value, mask=is_column)
        value = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / (NUM_WORDS * PER_WORD) + eps)
        narrow = ((value * scale).to(weight.dtype.element_ty).to(tl.float32) * weights).to(dtype)
    tl.store(out + place, narrow, mask=is_column)


@triton.jit
def _await_words(source, mask, count, stamp, is_ended, POLLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the data of words as soon as all of them have this count, or no word comes any more."""
    words = tl.load(source, mask=mask, other=stamp, volatile=True)
    polls = 0
    waits = tl.max(((words >> 32).to(tl.int32) != count).to(tl.int32), 0)
    while waits != 0:
        words = tl.load(source, mask=mask, other=stamp, volatile=True)
        waits = tl.max(((words >> 32).to(tl.int32) != count).to(tl.int32), 0)
        polls += 1
        ended = tl.load(is_ended, mask=polls % POLLS == 0, other=0, volatile=True)
        waits = tl.where(ended != 0, 0, waits)
    return words.to(tl.int32)


@triton.jit
def _elements(bits, dtype: tl.constexpr, PER_WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the elements of words of 4 bytes, in float32."""
    if PER_WORD == 1:
        elements = bits.to(dtype, bitcast=True)
    else:
        first = bits.to(tl.int16).to(dtype, bitcast=True)
        second = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
        elements = tl.interleave(first, second).to(tl.float32)
    return elements
