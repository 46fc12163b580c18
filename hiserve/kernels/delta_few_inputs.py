"""Inputs of the gated delta rule of rows with few tokens, in one launch; it keeps them in rings and snapshots, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.delta_inputs import VARYING, DeltaSizes, convolved, make_factors, normed, sizes_of, span_of
from hiserve.kernels.launch import await_previous, early_launch, start_next

_MIN_TOKENS = 4  # of a program; products of fewer are padded
_NUM_WARPS = 4
_MAX_REGISTERS = 112  # of a thread, at which none is spilled with 8 tokens of 128 elements
_LARGE = 1024  # elements of a program from which on it has more of both


class FewInputs(NamedTuple):
    """What the recurrence reads of the tokens of each row from its state on, in float32.

    Attributes:
        heads: ``[rows, room, C]``: queries, keys and values, convolved; queries and keys are normed, queries scaled.
        factors: ``[rows, room, 2 * num_value_heads]``: the share of a change that is written, and the logarithm of the share of
            the state that is kept.
        pairs: ``[rows, num_key_heads, 2, tokens, tokens]``: products of the keys, and of the queries, of tokens (rows) with the keys
            of tokens.
        sizes: Of the layer.
    """

    heads: Tensor
    factors: Tensor
    pairs: Tensor
    sizes: DeltaSizes


def make_few_inputs(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    pools: DeltaPools,
    rows: StateRows,
    indptr: Tensor,
    shape: DeltaShape,
    *,
    width: int,
) -> FewInputs:
    """Reads the tokens of some rows from their states on, and stores inputs in rings and snapshots; arguments as of ``make_inputs``."""
    num_rows, sizes = rows.rows.shape[0], sizes_of(weights, pools, shape)
    room = sizes.ring - sizes.taps + 1 + width
    tokens = max(_MIN_TOKENS, triton.next_power_of_2(room))
    heads = mixed.new_empty((num_rows, room, sizes.num_channels), dtype=torch.float32)
    factors = mixed.new_empty((num_rows, room, 2 * sizes.num_value_heads), dtype=torch.float32)
    pairs = mixed.new_empty((num_rows, sizes.num_key_heads, 2, tokens, tokens), dtype=torch.float32)
    is_small = tokens * max(sizes.key_dim, sizes.value_dim) <= _LARGE
    _make_few_inputs[(sizes.num_key_heads + sizes.num_value_heads, num_rows)](
        mixed,
        gates,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        pools.ring,
        pools.snap_ring,
        rows.rows,
        rows.starts,
        rows.state_lens,
        rows.state_ends,
        rows.snap_at,
        rows.snap_slots,
        indptr,
        heads,
        factors,
        pairs,
        mixed.stride(0),
        gates.stride(0),
        *weights.conv.stride(),
        room,
        SIZES=sizes,
        TOKENS=tokens,
        BEFORE=triton.next_power_of_2(sizes.taps - 1),
        num_warps=_NUM_WARPS if is_small else 8,
        maxnreg=_MAX_REGISTERS if is_small else None,
        **early_launch(mixed.device),
    )
    return FewInputs(heads, factors, pairs, sizes)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _make_few_inputs(  # type: ignore[no-untyped-def]
    mixed,
    gates,
    conv,
    a_log,
    dt_bias,
    ring,
    snap_ring,
    rows,
    starts,
    state_lens,
    state_ends,
    snap_at,
    snap_slots,
    indptr,
    heads,
    factors,
    pairs,
    mixed_stride,
    gates_stride,
    channel_stride,
    tap_stride,
    room,
    SIZES: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    BEFORE: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes all tokens of a row for one head of queries and keys, or of values; it alone uses these channels."""
    await_previous(IS_EARLY)
    start_next(IS_EARLY)  # The next kernel reads states before its own wait: all that was before this one has ended.
    slab, number = tl.program_id(0), tl.program_id(1)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    if start < end:
        row, slot = tl.load(rows + number), tl.load(snap_slots + number)
        boundary = boundary_of(number, state_len, end, state_ends, snap_at, slot)
        t, first = state_len + tl.arange(0, TOKENS), begin.to(tl.int64) - start
        entry = number.to(tl.int64) * room + tl.arange(0, TOKENS)
        new, old = mixed + first * mixed_stride, ring + row * (SIZES.ring * SIZES.entry_size)
        span = (start, end, boundary, snap_ring + slot * ((SIZES.taps - 1) * SIZES.entry_size))
        target = heads + entry[:, None] * SIZES.num_channels
        if slab < SIZES.num_key_heads:
            pair = pairs + (number.to(tl.int64) * SIZES.num_key_heads + slab) * (2 * TOKENS * TOKENS)
            convolution = (conv, channel_stride, tap_stride, mixed_stride)
            _make_keys(new, old, convolution, slab, t, span, target, pair, SIZES, BEFORE)
        else:
            head = slab - SIZES.num_key_heads
            near, far = gates + first * gates_stride, old + SIZES.num_channels
            place = factors + entry * (2 * SIZES.num_value_heads) + head
            rates = (a_log + head, dt_bias + head)
            _make_gates(near, far, gates_stride, rates, head, t, span, place, SIZES, BEFORE)
            convolution = (conv, channel_stride, tap_stride, mixed_stride)
            _make_values(new, old, convolution, head, t, span, target, SIZES, BEFORE)


@triton.jit  # type: ignore[untyped-decorator]
def _make_keys(new, old, convolution, head, t, span, target, pair, SIZES: tl.constexpr, BEFORE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Makes queries and keys of one head, and their products."""
    conv, channel_stride, tap_stride, stride = convolution
    start, end, _, _ = span
    wide: tl.constexpr = target.dtype.element_ty
    keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
    q_channel = head * SIZES.key_dim + tl.arange(0, SIZES.key_dim)
    k_channel, is_channel = keys + q_channel, (q_channel >= 0)[None, :]
    taps = conv + q_channel * channel_stride
    q, q_input = convolved(new, old, taps, tap_stride, stride, q_channel, is_channel, t, start, end, SIZES, wide)
    taps = conv + k_channel * channel_stride
    k, k_input = convolved(new, old, taps, tap_stride, stride, k_channel, is_channel, t, start, end, SIZES, wide)
    q, k = normed(q) * SIZES.key_dim**-0.5, normed(k)
    tl.store(target + q_channel[None, :], q, mask=(t < end)[:, None])
    tl.store(target + k_channel[None, :], k, mask=(t < end)[:, None])
    count: tl.constexpr = t.shape[0]
    index = tl.arange(0, count)
    place = pair + index[:, None] * count + index[None, :]
    tl.store(place, _products(k, k))
    tl.store(place + count * count, _products(q, k))
    _keep(new, old, stride, 0, q_channel, q_input, t, span, SIZES, BEFORE)
    _keep(new, old, stride, 0, k_channel, k_input, t, span, SIZES, BEFORE)


@triton.jit  # type: ignore[untyped-decorator]
def _make_values(new, old, convolution, head, t, span, target, SIZES: tl.constexpr, BEFORE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Makes values of one head."""
    conv, channel_stride, tap_stride, stride = convolution
    start, end, _, _ = span
    wide: tl.constexpr = target.dtype.element_ty
    before: tl.constexpr = 2 * SIZES.num_key_heads * SIZES.key_dim
    channel = before + head * SIZES.value_dim + tl.arange(0, SIZES.value_dim)
    taps, is_channel = conv + channel * channel_stride, (channel >= 0)[None, :]
    v, v_input = convolved(new, old, taps, tap_stride, stride, channel, is_channel, t, start, end, SIZES, wide)
    tl.store(target + channel[None, :], v, mask=(t < end)[:, None])
    _keep(new, old, stride, 0, channel, v_input, t, span, SIZES, BEFORE)


@triton.jit  # type: ignore[untyped-decorator]
def _make_gates(new, old, stride, rates, head, t, span, target, SIZES: tl.constexpr, BEFORE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Makes factors of one head."""
    start, end, _, _ = span
    near, far = new + t.to(tl.int64) * stride + head, old + t % SIZES.ring * SIZES.entry_size + head
    make_factors(target, near, far, rates[0], rates[1], t < start, t < end, SIZES)
    gate, is_new = head + tl.arange(0, 2) * SIZES.num_value_heads, ((t >= start) & (t < end))[:, None]
    given = tl.load(new + (t.to(tl.int64) * stride)[:, None] + gate[None, :], mask=is_new, other=0.0)
    _keep(new, old, stride, SIZES.num_channels, gate, given, t, span, SIZES, BEFORE)


@triton.jit
def _products(x, y):  # type: ignore[no-untyped-def]
    """Returns products of rows of length 1 at most, in float32: of each element's first and next 11 bits, in three products."""
    x_head, y_head = x.to(tl.float16), y.to(tl.float16)
    x_rest, y_rest = (x - x_head.to(x.dtype)).to(tl.float16), (y - y_head.to(y.dtype)).to(tl.float16)
    total = tl.dot(x_rest, tl.trans(y_head))
    return tl.dot(x_head, tl.trans(y_head), tl.dot(x_head, tl.trans(y_rest), total))


@triton.jit
def boundary_of(number, state_len, end, state_ends, snap_at, slot):  # type: ignore[no-untyped-def]
    """Returns where a row's snapshot is taken; behind its end without one."""
    boundary, state_end = tl.load(snap_at + number).to(tl.int32), tl.load(state_ends + number).to(tl.int32)
    return tl.where((slot > 0) & (boundary > state_len) & (boundary <= state_end), boundary, end + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    new,
    old,
    stride,
    offset,
    column,
    x,
    t,
    span,
    SIZES: tl.constexpr,  # noqa: N803
    BEFORE: tl.constexpr,  # noqa: N803
):
    """Stores columns of inputs: those before a boundary, of the step or of the ring, in a snapshot, and then the newest in the ring.

    Args:
        new: Where the new input of position 0 would lie.
        old: The row's ring, from the first of these columns on.
        stride: Between new inputs.
        offset: Of these columns in an input of a snapshot.
        column: Numbers of columns, ``[N]``.
        x: Inputs at positions ``t``, ``[T, N]``; of old ones any.
        t: Positions, ``[T]``.
        span: The first new position, their end, the boundary, and the snapshot.
        SIZES: ``DeltaSizes``.
        BEFORE: Inputs of a snapshot, at least.
    """
    start, end, boundary, snap = span
    if boundary <= end:
        place = tl.arange(0, BEFORE)
        position = boundary - SIZES.taps + 1 + place
        is_wanted = position < boundary
        is_new, is_old = is_wanted & (position >= start), is_wanted & (position >= 0) & (position < start)
        near = tl.load(
            new + (position.to(tl.int64) * stride)[:, None] + column[None, :], mask=is_new[:, None], other=0.0
        )
        entry = position % SIZES.ring * SIZES.entry_size
        far = tl.load(old + entry[:, None] + column[None, :], mask=is_old[:, None], other=0.0)
        kept = snap + offset + (place * SIZES.entry_size)[:, None] + column[None, :]
        tl.store(kept, near + far, mask=is_wanted[:, None])
    tl.debug_barrier()  # what these columns of the ring had has been read
    is_kept = (t >= start) & (t < end) & (t >= end - SIZES.ring)
    tl.store(old + (t % SIZES.ring * SIZES.entry_size)[:, None] + column[None, :], x, mask=is_kept[:, None])
