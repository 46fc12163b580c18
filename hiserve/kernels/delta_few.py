"""The gated delta rule of rows with few tokens, in types of 16 bits: products with the state first, then all changes at once.

The changes of some tokens depend on the state before them, by one product a token, and on each other, by products of keys that
``delta_few_inputs`` has made. So the state is multiplied once for each key and query and changed once for each token that it
takes; drafts do not change it. A program keeps some columns of a head's state in registers, in float32, as all sums and products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.delta import DeltaPools
from hiserve.kernels.delta_few_inputs import FewInputs, boundary_of
from hiserve.kernels.delta_inputs import VARYING, span_of, store_nothing, where_all
from hiserve.kernels.launch import await_previous, early_launch, start_next

_BLOCK_VALUES = 32  # 16 KiB of a float32 state with keys of 128 elements
_BLOCK_TOKENS = 8  # changes in registers
_NUM_WARPS = 1  # sums over keys stay in a warp
_MAX_REGISTERS = 168  # of a thread: as many programs as fit hold as much of the states as can be


def advance_few(made: FewInputs, pools: DeltaPools, rows: StateRows, indptr: Tensor, out: Tensor, until: int) -> None:
    """Advances some rows as ``delta.delta`` does, except for rings, which are stored.

    Args:
        made: Their inputs, made by the launch before this one.
        pools: Changed.
        rows: The rows.
        indptr: int32 ``[len(rows) + 1]``. Their new tokens.
        out: ``[T, num_value_heads, value_dim]``, contiguous; the tokens of these rows are written.
        until: Those behind them become 0 up to here.
    """
    sizes = made.sizes
    block = min(_BLOCK_VALUES, sizes.value_dim)
    _advance_few[(sizes.num_value_heads * (sizes.value_dim // block), rows.rows.shape[0])](
        made.heads,
        made.factors,
        made.pairs,
        pools.state,
        pools.snap_state,
        rows.rows,
        rows.starts,
        rows.state_lens,
        rows.state_ends,
        rows.snap_at,
        rows.snap_slots,
        indptr,
        out,
        made.heads.shape[1],
        until,
        SIZES=sizes,
        BLOCK=block,
        TOKENS=_BLOCK_TOKENS,
        PAIRS=made.pairs.shape[4],
        num_warps=_NUM_WARPS,
        maxnreg=_MAX_REGISTERS,
        **early_launch(out.device),
    )


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _advance_few(  # type: ignore[no-untyped-def]
    heads,
    factors,
    pairs,
    state,
    snap_state,
    rows,
    starts,
    state_lens,
    state_ends,
    snap_at,
    snap_slots,
    indptr,
    out,
    room,
    until,
    SIZES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program advances some columns of one head's state over the tokens of one row."""
    start_next(IS_EARLY)
    num_blocks: tl.constexpr = SIZES.value_dim // BLOCK
    head, number = tl.program_id(0) // num_blocks, tl.program_id(1)
    key, value = tl.arange(0, SIZES.key_dim), tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    # Read before the wait: whatever wrote them had ended when the launch before, which does not, let this one begin.
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    row = tl.load(rows + number)
    size: tl.constexpr = SIZES.num_value_heads * SIZES.key_dim * SIZES.value_dim
    part = (head * SIZES.key_dim + key)[:, None] * SIZES.value_dim + value[None, :]
    is_there = where_all((state_len > 0) & (start < end), key)[:, None]
    total = tl.load(state + row * size + part, mask=is_there, other=0.0).to(tl.float32)
    await_previous(IS_EARLY)
    store_nothing(out, indptr, until, head, value, SIZES)
    if start < end:
        slot, state_end = tl.load(snap_slots + number), tl.load(state_ends + number).to(tl.int32)
        boundary = boundary_of(number, state_len, end, state_ends, snap_at, slot)
        key_head = head // (SIZES.num_value_heads // SIZES.num_key_heads)
        entry, before = number.to(tl.int64) * room, 2 * SIZES.num_key_heads * SIZES.key_dim
        mine = heads + entry * SIZES.num_channels
        given = (
            mine + key_head * SIZES.key_dim + key,
            mine + before + head * SIZES.value_dim + value,
            factors + entry * (2 * SIZES.num_value_heads) + head,
            pairs + (number.to(tl.int64) * SIZES.num_key_heads + key_head) * (2 * PAIRS * PAIRS),
        )
        target = out + ((begin.to(tl.int64) - start) * SIZES.num_value_heads + head) * SIZES.value_dim + value
        low = state_len
        while low < end:
            high = _end_of(low, end, state_end, boundary, TOKENS)
            first, token = low - state_len, target + low.to(tl.int64) * (SIZES.num_value_heads * SIZES.value_dim)
            changes, faded = _read(total, given, token, first, high - low, start - low, SIZES, BLOCK, TOKENS, PAIRS)
            certain = tl.where(high == end, tl.minimum(end, state_end), high) - low
            total = _change(total, given, changes, faded, first, certain, SIZES, TOKENS)
            if (low < state_end) & (state_end <= high):
                tl.store(state + row * size + part, total.to(state.dtype.element_ty))
            if high == boundary:
                tl.store(snap_state + slot * size + part, total.to(state.dtype.element_ty))
            low = high


@triton.jit  # type: ignore[untyped-decorator]
def _end_of(low, end, state_end, boundary, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the end of the tokens whose changes are made at once: at a snapshot, and before drafts that others follow."""
    limit = tl.where((state_end > low) & (end - low > TOKENS), state_end, end)
    limit = tl.where(boundary > low, tl.minimum(boundary, limit), limit)
    return tl.minimum(low + TOKENS, limit)


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    total,
    given,
    target,
    first,
    count,
    num_old,
    SIZES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
):
    """Stores what ``count`` tokens from entry ``first`` on read, except the ``num_old`` that are replayed.

    Returns:
        The change of each token, ``[TOKENS, BLOCK]``, and the logarithm of the share of the state that is kept up to it, ``[TOKENS]``.
    """
    heads, values, factors, pairs = given
    keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
    index = tl.arange(0, TOKENS)
    changes, faded = tl.zeros((TOKENS, BLOCK), total.dtype), tl.zeros((TOKENS,), total.dtype)
    last = tl.full((), 0.0, total.dtype)
    for token in range(count):
        entry = first + token
        k = tl.load(heads + entry * SIZES.num_channels + keys)
        v = tl.load(values + entry * SIZES.num_channels)
        factor, pair = factors + entry * (2 * SIZES.num_value_heads), pairs + entry * PAIRS + first + index
        last += tl.load(factor + SIZES.num_value_heads)
        # Of the logarithms none is positive: no exponential overflows.
        shrink = tl.exp(tl.where(index < token, last - faded, 0.0))
        share = tl.where(index < token, tl.load(pair, mask=index < token, other=0.0) * shrink, 0.0)
        kept = tl.exp(last)
        change = v - tl.sum(total * k[:, None], 0) * kept - tl.sum(share[:, None] * changes, 0)
        change *= tl.load(factor)
        changes, faded = (
            tl.where((index == token)[:, None], change[None, :], changes),
            tl.where(index == token, last, faded),
        )
        if token >= num_old:
            q = tl.load(heads + entry * SIZES.num_channels)
            share = tl.load(pair + PAIRS * PAIRS, mask=index <= token, other=0.0) * shrink
            read = tl.sum(total * q[:, None], 0) * kept + tl.sum(share[:, None] * changes, 0)
            tl.store(target + token * (SIZES.num_value_heads * SIZES.value_dim), read.to(target.dtype.element_ty))
    return changes, faded


@triton.jit  # type: ignore[untyped-decorator]
def _change(total, given, changes, faded, first, count, SIZES: tl.constexpr, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the state after the first ``count`` of some tokens."""
    index, keys = tl.arange(0, TOKENS), given[0] + SIZES.num_key_heads * SIZES.key_dim
    last = tl.sum(tl.where(index == count - 1, faded, 0.0), 0)
    changes *= tl.exp(tl.where(index < count, last - faded, 0.0))[:, None]
    total *= tl.exp(last)
    for token in range(count):
        change = tl.sum(tl.where((index == token)[:, None], changes, 0.0), 0)
        total += tl.load(keys + (first + token) * SIZES.num_channels)[:, None] * change[None, :]
    return total
