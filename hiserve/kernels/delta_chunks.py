"""The gated delta rule chunk by chunk, for prompts: products of matrices in place of a product per token.

Within a chunk the changes u of the state solve ``(I + L) U = B`` with a strictly lower triangular L (the WY form of Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484, with decay arXiv:2412.06464). The
inverse is made block by block, from pairs of blocks of twice the size: sums of powers of L would cancel where keys are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.delta import DeltaPools
from hiserve.kernels.delta_inputs import VARYING, MadeInputs, entry_of, span_of, where_all
from hiserve.kernels.delta_rings import store_inputs
from hiserve.kernels.launch import await_previous, early_launch, start_next

_CHUNK = 32  # tokens
_BLOCK_VALUES = 64
_NUM_WARPS = 4
_PRECISION = tl.constexpr("tf32")  # of products: 10 bits, three more than bfloat16 has


def advance_chunks(
    made: MadeInputs, mixed: Tensor, gates: Tensor, pools: DeltaPools, rows: StateRows, indptr: Tensor, out: Tensor
) -> None:
    """Like ``delta_step.advance``, for inputs of 16 bits and states in float32; outputs depend on chunks in their last digits."""
    sizes = made.sizes
    block = min(_BLOCK_VALUES, sizes.value_dim)
    _advance_chunks[(sizes.num_value_heads * (sizes.value_dim // block), rows.rows.shape[0])](
        made.heads,
        made.factors,
        mixed,
        gates,
        pools.ring,
        pools.state,
        pools.snap_ring,
        pools.snap_state,
        rows.rows,
        rows.starts,
        rows.state_lens,
        rows.state_ends,
        rows.snap_at,
        rows.snap_slots,
        indptr,
        out,
        mixed.stride(0),
        gates.stride(0),
        mixed.shape[0],
        made.room,
        SIZES=sizes,
        BLOCK=block,
        CHUNK=_CHUNK,
        num_warps=_NUM_WARPS,
        **early_launch(mixed.device),
    )


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _advance_chunks(  # type: ignore[no-untyped-def]
    heads,
    factors,
    mixed,
    gates,
    ring,
    state,
    snap_ring,
    snap_state,
    rows,
    starts,
    state_lens,
    state_ends,
    snap_at,
    snap_slots,
    indptr,
    out,
    mixed_stride,
    gates_stride,
    num_tokens,
    room,
    SIZES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program advances some columns of one head's state over the tokens of one row."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    num_blocks: tl.constexpr = SIZES.value_dim // BLOCK
    head, number = tl.program_id(0) // num_blocks, tl.program_id(1)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    if start < end:
        row = tl.load(rows + number)
        state_end, boundary = tl.load(state_ends + number).to(tl.int32), tl.load(snap_at + number).to(tl.int32)
        slot, first = tl.load(snap_slots + number), begin.to(tl.int64) - start
        boundary = tl.where((slot > 0) & (boundary > state_len) & (boundary <= state_end), boundary, end + 1)
        key, value = tl.arange(0, SIZES.key_dim), tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
        size: tl.constexpr = SIZES.num_value_heads * SIZES.key_dim * SIZES.value_dim
        part = (head * SIZES.key_dim + key)[:, None] * SIZES.value_dim + value[None, :]
        total = tl.load(state + row * size + part, mask=where_all(state_len > 0, key)[:, None], other=0.0)
        own, low = ring + row * (SIZES.ring * SIZES.entry_size), state_len
        while low < end:
            # A chunk ends where the state is stored.
            high = tl.minimum(low + CHUNK, tl.minimum(end, tl.where(low < boundary, boundary, end)))
            high = tl.minimum(high, tl.where(low < state_end, state_end, end))
            t = low + tl.arange(0, CHUNK)
            entry = entry_of(t, start, begin, number, num_tokens, room, SIZES)
            total, read = _advance_chunk(total, heads, factors, entry, t < high, head, value, SIZES, CHUNK)
            target = out + ((first + t) * SIZES.num_value_heads + head)[:, None] * SIZES.value_dim + value[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=((t >= start) & (t < high))[:, None])
            if high == state_end:
                tl.store(state + row * size + part, total)
            if high == boundary:
                tl.store(snap_state + slot * size + part, total)
            low = high
        new, gate = mixed + first * mixed_stride, gates + first * gates_stride
        store_inputs(own, snap_ring, slot, boundary, new, gate, start, end, mixed_stride, gates_stride, SIZES, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _advance_chunk(  # type: ignore[no-untyped-def]
    total,
    heads,
    factors,
    entry,
    is_live,
    head,
    value,
    SIZES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Returns the state after a chunk, and its reads ``[CHUNK, BLOCK]``; tokens that are not live change nothing."""
    keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
    mine = heads + entry[:, None] * SIZES.num_channels
    key = mine + (head // (SIZES.num_value_heads // SIZES.num_key_heads) * SIZES.key_dim + tl.arange(0, SIZES.key_dim))
    k = tl.load(key + keys, mask=is_live[:, None], other=0.0)
    q = tl.load(key, mask=is_live[:, None], other=0.0)
    v = tl.load(mine + 2 * keys + head * SIZES.value_dim + value, mask=is_live[:, None], other=0.0).to(tl.float32)
    factor = factors + entry * (2 * SIZES.num_value_heads) + head
    write = tl.load(factor, mask=is_live, other=0.0)
    decay = tl.load(factor + SIZES.num_value_heads, mask=is_live, other=0.0)
    faded, index = tl.cumsum(decay, 0), tl.arange(0, CHUNK)
    is_before = index[:, None] > index[None, :]
    # Of the logarithms none is positive: no exponential overflows.
    shrink = tl.exp(tl.where(index[:, None] >= index[None, :], faded[:, None] - faded[None, :], -float("inf")))
    alike = tl.dot(k, tl.trans(k), input_precision=_PRECISION) * shrink * write[:, None]
    inverse = _inverse(tl.where(is_before, alike, 0.0), CHUNK)
    reads = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * shrink
    k, kept = k.to(tl.float32), tl.exp(faded)[:, None]
    wanted = (v - tl.dot(k, total, input_precision=_PRECISION) * kept) * write[:, None]
    change = tl.dot(inverse, wanted, input_precision=_PRECISION)
    read = tl.dot(q.to(tl.float32), total, input_precision=_PRECISION) * kept
    read = tl.dot(reads, change, read, input_precision=_PRECISION)
    last = tl.sum(decay, 0)
    k = k * tl.exp(last - faded)[:, None]
    return tl.dot(tl.trans(k), change, total * tl.exp(last), input_precision=_PRECISION), read


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(lower, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the inverse of I + L. That of a pair of blocks has ``-D2 L21 D1`` below the inverses D1 and D2 of the two."""
    index = tl.arange(0, CHUNK)
    pair = index[:, None] ^ index[None, :]
    made = tl.where(pair == 0, 1.0, tl.where(pair == 1, -lower, 0.0))
    for level in tl.static_range(1, 7):
        if (1 << level) < CHUNK:
            below = tl.where((pair >> level) == 1, lower, 0.0)
            made -= tl.dot(tl.dot(made, below, input_precision=_PRECISION), made, input_precision=_PRECISION)
    return made
