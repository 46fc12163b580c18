"""The gated delta rule chunk by chunk: what does not depend on the state before a chunk, for all chunks at once.

Within a chunk the changes u of the state solve ``(I + L) U = B`` with a strictly lower triangular L (the WY form of Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484, with decay arXiv:2412.06464). The
inverse is made block by block, from pairs of blocks of twice the size: sums of powers of L would cancel where keys are alike.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.core.step_memory import DELTA_CHUNK
from hiserve.kernels.delta_inputs import VARYING, MadeInputs, ends_of, entry_of, span_of
from hiserve.kernels.launch import await_previous, early_launch, start_next

_CHUNK = DELTA_CHUNK  # a power of 2, 16 at least
_NUM_WARPS = 4
_MAX_REGISTERS: int | None = 168  # of a thread: three programs of a multiprocessor
_LEAST_BLOCK = tl.constexpr(16)  # rows of a block that is inverted by products of its own
_PRECISION = tl.constexpr("tf32")  # of products in float32: 10 bits, three more than bfloat16 has


class SolvedChunks(NamedTuple):
    """Of each token and value head, by its place in the made inputs, in the type of these.

    Attributes:
        keys: ``[entries, num_value_heads, key_dim]``. The change of a token is its value, less this times the state before its chunk.
        values: ``[entries, num_value_heads, value_dim]``.
        reads: ``[entries, num_value_heads, chunk]``. Shares of the changes of its chunk in what it reads.
    """

    keys: Tensor
    values: Tensor
    reads: Tensor


def solve_chunks(made: MadeInputs, rows: StateRows, indptr: Tensor, *, num_tokens: int, width: int) -> SolvedChunks:
    """Solves the chunks of some rows.

    Args:
        made: Inputs of 16 bits, packed.
        rows: The rows.
        indptr: int32 ``[len(rows) + 1]``. Their new tokens.
        num_tokens: Those of the batch.
        width: Most new tokens of one row.
    """
    sizes, num_entries = made.sizes, made.heads.shape[0]
    keys, values, reads = (
        made.heads.new_empty((num_entries, sizes.num_value_heads, size))
        for size in (sizes.key_dim, sizes.value_dim, _CHUNK)
    )
    # A snapshot, and the end of the certain tokens, end chunks before they are full.
    most = triton.cdiv(sizes.ring - sizes.taps + 1 + width, _CHUNK) + 2
    _solve_chunks[(sizes.num_value_heads, most, rows.rows.shape[0])](
        made.heads, made.factors, rows.starts, rows.state_lens, rows.state_ends, rows.snap_at, rows.snap_slots, indptr,
        keys, values, reads, num_tokens, made.room,
        SIZES=sizes, CHUNK=_CHUNK, num_warps=_NUM_WARPS, maxnreg=_MAX_REGISTERS, **early_launch(made.heads.device),
    )  # fmt: skip
    return SolvedChunks(keys, values, reads)


@triton.jit
def chunk_of(number, state_len, boundary, state_end, end, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns first and end of a chunk of a row: the state is stored at ends of chunks alone."""
    boundary = tl.where(boundary <= end, boundary, state_len)
    first = tl.cdiv(boundary - state_len, CHUNK)
    second = first + tl.cdiv(state_end - boundary, CHUNK)
    low = tl.where(number < second, boundary + (number - first) * CHUNK, state_end + (number - second) * CHUNK)
    low = tl.where(number < first, state_len + number * CHUNK, low)
    limit = tl.where(number < first, boundary, tl.where(number < second, state_end, end))
    return low, tl.minimum(low + CHUNK, limit)


@triton.jit(do_not_specialize=VARYING)
def _solve_chunks(  # type: ignore[no-untyped-def]
    heads, factors, starts, state_lens, state_ends, snap_at, snap_slots, indptr, keys, values, reads, num_tokens, room,
    SIZES: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program solves one chunk of a row for one value head."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    head, number = tl.program_id(0), tl.program_id(2)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    state_end, boundary = ends_of(number, state_len, end, tl.load(snap_slots + number), state_ends, snap_at)
    low, high = chunk_of(tl.program_id(1), state_len, boundary, state_end, end, CHUNK)
    if (start < end) & (low < high):
        index, key, value = tl.arange(0, CHUNK), tl.arange(0, SIZES.key_dim), tl.arange(0, SIZES.value_dim)
        entry = entry_of(low + index, start, begin, number, num_tokens, room, SIZES)
        is_live = (low + index < high)[:, None]
        all_keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
        mine = heads + entry[:, None] * SIZES.num_channels
        q_place = mine + (head // (SIZES.num_value_heads // SIZES.num_key_heads) * SIZES.key_dim + key)
        q, k = tl.load(q_place, mask=is_live, other=0.0), tl.load(q_place + all_keys, mask=is_live, other=0.0)
        factor = factors + entry * (2 * SIZES.num_value_heads) + head
        write = tl.load(factor, mask=low + index < high, other=0.0)
        faded = tl.cumsum(tl.load(factor + SIZES.num_value_heads, mask=low + index < high, other=0.0), 0)
        # Of the logarithms none is positive: no exponential overflows.
        gaps = tl.where(index[:, None] >= index[None, :], faded[:, None] - faded[None, :], -float("inf"))
        shrink = tl.exp(gaps)
        share = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * shrink
        place = entry * SIZES.num_value_heads + head
        tl.store(reads + place[:, None] * CHUNK + index, share.to(reads.dtype.element_ty), mask=is_live)
        alike = tl.dot(k, tl.trans(k), input_precision=_PRECISION) * shrink * write[:, None]
        inverse = _inverse(tl.where(index[:, None] > index[None, :], alike, 0.0), CHUNK)
        # Factors of inputs are those of columns: inputs stay as they were read, and a product rounds once.
        share = (inverse * (write * tl.exp(faded))[None, :]).to(k.dtype)
        made = tl.dot(share, k, input_precision=_PRECISION)
        tl.store(keys + place[:, None] * SIZES.key_dim + key, made.to(keys.dtype.element_ty), mask=is_live)
        v = tl.load(mine + 2 * all_keys + head * SIZES.value_dim + value, mask=is_live, other=0.0)
        made = tl.dot((inverse * write[None, :]).to(v.dtype), v, input_precision=_PRECISION)
        tl.store(values + place[:, None] * SIZES.value_dim + value, made.to(values.dtype.element_ty), mask=is_live)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the inverse of I + L. That of a pair of blocks has ``-D2 L21 D1`` below the inverses D1 and D2 of the two.

    Up to blocks of 16 those on the diagonal alone are multiplied, side by side: each by one warp, which waits for no other.
    """
    NUM: tl.constexpr = CHUNK // _LEAST_BLOCK
    near, block = tl.arange(0, _LEAST_BLOCK), tl.arange(0, NUM)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(is_own, lower.reshape(NUM, _LEAST_BLOCK, NUM, _LEAST_BLOCK), 0.0), 2)
    pair = (near[:, None] ^ near[None, :])[None, :, :]
    made = tl.where(pair == 0, 1.0, tl.where(pair == 1, -own, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where((pair >> level) == 1, own, 0.0)
        made -= tl.dot(tl.dot(made, below, input_precision=_PRECISION), made, input_precision=_PRECISION)
    made = tl.where(is_own, made[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)
    index = tl.arange(0, CHUNK)
    apart = index[:, None] ^ index[None, :]
    for level in tl.static_range(4, 7):
        if (1 << level) < CHUNK:
            below = tl.where((apart >> level) == 1, lower, 0.0)
            made -= tl.dot(tl.dot(made, below, input_precision=_PRECISION), made, input_precision=_PRECISION)
    return made
