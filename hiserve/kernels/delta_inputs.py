"""Inputs of the gated delta rule in one launch of Triton: heads, convolved and normed, and factors of the gates."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels import delta
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights
from hiserve.kernels.launch import await_previous, early_launch, start_next

_NORM_EPS = tl.constexpr(delta.NORM_EPS)
_LINEAR_ABOVE = tl.constexpr(20.0)  # softplus is its argument there, as torch has it
_BLOCK = 4  # tokens of a program, where rows have few
_BLOCK_PACKED = 32
_ELEMENTS_PER_WARP = 512


VARYING = [
    "rows",
    "starts",
    "state_lens",
    "state_ends",
    "snap_at",
    "snap_slots",
    "indptr",
    "num_tokens",
    "room",
    "until",
]
"""Arguments that have other addresses or values for other batches: no variant is compiled for them."""


class DeltaSizes(NamedTuple):
    """Compile-time constants of a layer, besides types.

    Attributes:
        num_channels: Of a token.
        entry_size: Elements of a ring's entry.
        taps: Of the convolution.
        ring: Entries of a row.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_channels: int
    entry_size: int
    taps: int
    ring: int


def sizes_of(weights: DeltaWeights, pools: DeltaPools, shape: DeltaShape) -> DeltaSizes:
    """Returns the constants of a layer."""
    taps, ring = pools.snap_ring.shape[1] + 1, pools.ring.shape[1]
    channels, entry = shape.num_channels, pools.ring.shape[2]
    assert ring >= taps - 1 and weights.conv.shape == (channels, taps), f"{weights.conv.shape}, rings of {ring}"
    dims = shape.key_dim, shape.value_dim
    return DeltaSizes(shape.num_key_heads, shape.num_value_heads, *dims, channels, entry, taps, ring)


@triton.jit
def entry_of(t, start, begin, number, num_tokens, room, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where a token lies in the made tensors, of the batch's row ``number``, whose new ones begin at ``begin``."""
    reach: tl.constexpr = SIZES.ring - SIZES.taps + 1
    index = number.to(tl.int64)
    old = tl.where(room > 0, index * room, num_tokens + index * reach)
    new = tl.where(room > 0, old + reach, begin.to(tl.int64))
    return tl.where(t >= start, new, old + reach) + t - start


@triton.jit
def where_all(condition, index):  # type: ignore[no-untyped-def]
    """Returns a mask like ``index``, which is 0 at least, from one condition; the interpreter spreads none of its type."""
    return index < tl.where(condition, 1 << 30, 0)


@triton.jit
def load_state(places, is_there, key, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads columns of a state, ``[key_dim, N]``, in the type of sums; zeros if it is not there."""
    return tl.load(places, mask=where_all(is_there, key)[:, None], other=0.0).to(dtype)


@triton.jit
def span_of(number, indptr, starts, state_lens):  # type: ignore[no-untyped-def]
    """Returns a row's first token in the batch; the position of it, that of its state's end, and the end of the row."""
    begin = tl.load(indptr + number)
    start, state_len = tl.load(starts + number).to(tl.int32), tl.load(state_lens + number).to(tl.int32)
    return begin, start, state_len, start + tl.load(indptr + number + 1) - begin


@triton.jit
def ends_of(number, state_len, end, slot, state_ends, snap_at):  # type: ignore[no-untyped-def]
    """Returns the end of a row's certain tokens, and where its snapshot is taken: behind its end without one."""
    state_end, boundary = tl.load(state_ends + number).to(tl.int32), tl.load(snap_at + number).to(tl.int32)
    state_end = tl.minimum(tl.maximum(state_end, state_len), end)
    return state_end, tl.where((slot > 0) & (boundary > state_len) & (boundary <= state_end), boundary, end + 1)


@triton.jit
def store_nothing(out, indptr, until, head, value, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The programs of the last row store zeros for the tokens behind it, up to ``until``: of a graph they belong to no row."""
    if tl.program_id(1) == tl.num_programs(1) - 1:
        for token in range(tl.load(indptr + tl.num_programs(1)), until):
            first = tl.full((), 0, tl.int64) + token
            target = out + (first * SIZES.num_value_heads + head) * SIZES.value_dim + value
            tl.store(target, tl.zeros_like(value).to(out.dtype.element_ty))


class MadeInputs(NamedTuple):
    """What the recurrence reads of a token.

    Attributes:
        heads: ``[entries, C]``: queries, keys and values, convolved; queries and keys are normed, queries scaled.
        factors: ``[entries, 2 * num_value_heads]``, the type of sums: the share of a change that is written, and the logarithm of
            the share of the state that is kept.
        room: Entries of a row: tokens that it may replay, then new ones. 0: new tokens lie at their indices in the batch, and
            those to replay after all of them.
        sizes: Of the layer.
    """

    heads: Tensor
    factors: Tensor
    room: int
    sizes: DeltaSizes


def make_inputs(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    pools: DeltaPools,
    rows: StateRows,
    indptr: Tensor,
    shape: DeltaShape,
    *,
    width: int,
    dtype: torch.dtype,
    is_packed: bool,
) -> MadeInputs:
    """Reads the tokens of some rows from their states on.

    Args:
        mixed: As of ``delta.delta``; rows may lie apart.
        gates: Likewise.
        weights: Of which channels of a tap should lie together.
        pools: Likewise.
        rows: Some rows of the batch.
        indptr: int32 ``[len(rows) + 1]``. Their new tokens.
        shape: The layer's heads.
        width: Most new tokens of one of them.
        dtype: Of ``heads``.
        is_packed: Whether the memory is for all tokens of the batch, whatever their rows, not for as many of each row.
    """
    (num_tokens, channels), num_rows = mixed.shape, rows.rows.shape[0]
    sizes = sizes_of(weights, pools, shape)
    reach = sizes.ring - sizes.taps + 1
    room = 0 if is_packed else reach + width
    num_entries = num_rows * room + is_packed * (num_tokens + num_rows * reach)
    heads = mixed.new_empty((num_entries, channels), dtype=dtype)
    factors = mixed.new_empty((num_entries, 2 * shape.num_value_heads), dtype=pools.wide)
    block, dim = _BLOCK_PACKED if is_packed else _BLOCK, max(shape.key_dim, shape.value_dim)
    grid = (2 * shape.num_key_heads + shape.num_value_heads, triton.cdiv(reach + width, block), num_rows)
    _make_inputs[grid](
        mixed, gates, weights.conv, weights.a_log, weights.dt_bias, pools.ring, rows.rows, rows.starts, rows.state_lens,
        indptr, heads, factors, mixed.stride(0), gates.stride(0), *weights.conv.stride(), num_tokens, room,
        SIZES=sizes, BLOCK=block, BLOCK_DIM=dim, IS_LONG=is_packed,
        num_warps=max(1, block * dim // _ELEMENTS_PER_WARP), **early_launch(mixed.device),
    )  # fmt: skip
    return MadeInputs(heads, factors, room, sizes)


@triton.jit(do_not_specialize=VARYING)
def _make_inputs(  # type: ignore[no-untyped-def]
    mixed, gates, conv, a_log, dt_bias, ring, rows, starts, state_lens, indptr, heads, factors, mixed_stride,
    gates_stride, channel_stride, tap_stride, num_tokens, room,
    SIZES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_LONG: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes some tokens of a row for one head of queries, keys or values."""
    await_previous(IS_EARLY)
    start_next(IS_EARLY)  # as measured; before the wait it was not timed
    wide: tl.constexpr = factors.dtype.element_ty
    num_key_slabs: tl.constexpr = 2 * SIZES.num_key_heads
    slab, number = tl.program_id(0), tl.program_id(2)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    low = state_len + tl.program_id(1) * BLOCK
    if (start < end) & (low < end):
        is_key, t, column = slab < num_key_slabs, low + tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
        first = tl.where(is_key, slab * SIZES.key_dim, num_key_slabs * SIZES.key_dim)
        channel = first + tl.where(is_key, 0, (slab - num_key_slabs) * SIZES.value_dim) + column
        in_head = (column < tl.where(is_key, SIZES.key_dim, SIZES.value_dim))[None, :]
        own, token = ring + tl.load(rows + number) * (SIZES.ring * SIZES.entry_size), begin.to(tl.int64) - start
        new = mixed + token * mixed_stride
        taps = conv + channel * channel_stride
        if IS_LONG and (low > start + SIZES.taps - 2) & (low + BLOCK <= end):  # most programs of prompts
            total = convolved(
                new, own, taps, tap_stride, mixed_stride, channel, in_head, t, start, end, SIZES, wide, IS_INSIDE=True
            )
        else:
            total = convolved(
                new, own, taps, tap_stride, mixed_stride, channel, in_head, t, start, end, SIZES, wide, IS_INSIDE=False
            )
        if is_key:
            total = normed(total)  # a choice between two factors would have 32 bits
            total = tl.where(slab < SIZES.num_key_heads, total * SIZES.key_dim**-0.5, total)
        entry, is_live = entry_of(t, start, begin, number, num_tokens, room, SIZES), t < end
        target = heads + entry[:, None] * SIZES.num_channels + channel[None, :]
        tl.store(target, total.to(heads.dtype.element_ty), mask=is_live[:, None] & in_head)
        if is_key == 0:
            head = slab - num_key_slabs
            gate = gates + (token + t) * gates_stride + head
            kept = own + t % SIZES.ring * SIZES.entry_size + SIZES.num_channels
            place = factors + entry * (2 * SIZES.num_value_heads) + head
            make_factors(place, gate, kept + head, a_log + head, dt_bias + head, t < start, is_live, SIZES)


@triton.jit
def convolved(  # type: ignore[no-untyped-def]
    new, old, conv, tap_stride, stride, channel, is_channel, t, start, end,
    SIZES: tl.constexpr, wide: tl.constexpr, IS_INSIDE: tl.constexpr
):  # fmt: skip
    """Returns channels of the tokens at positions ``t`` after the convolution and its SiLU, in a wide type.

    ``new`` is where the new input of position 0 would lie, ``old`` the row's ring, ``conv`` the channels' first taps. Where all
    taps read new inputs, those of the ring are left out: instructions bound prompts, not bytes.
    """
    taps: tl.constexpr = SIZES.taps
    total = tl.zeros((t.shape[0], channel.shape[0]), wide)
    for tap in tl.static_range(0, taps):
        ago = taps - 1 - tap
        near = new + ((t - ago).to(tl.int64) * stride)[:, None] + channel[None, :]
        if IS_INSIDE:
            x = tl.load(near, mask=is_channel, other=0.0)
        else:
            is_new, is_old = (t >= start + ago) & (t < end + ago), (t >= ago) & (t < start + ago)
            far = old + ((t - ago) % SIZES.ring * SIZES.entry_size)[:, None] + channel[None, :]
            x = either(near, far, is_new[:, None] & is_channel, is_old[:, None] & is_channel)
        total += x.to(wide) * tl.load(conv[None, :] + tap * tap_stride, mask=is_channel, other=0.0).to(wide)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def normed(x):  # type: ignore[no-untyped-def]
    """Scales rows to a length of 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + _NORM_EPS)[:, None]


@triton.jit
def make_factors(target, new, old, a_log, dt_bias, is_old, is_live, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes the factors of one head from the gates of some tokens, in the step or in the ring."""
    wide: tl.constexpr = target.dtype.element_ty
    is_new = is_live & (is_old == 0)
    write = either(new, old, is_new, is_old)
    decay = either(new + SIZES.num_value_heads, old + SIZES.num_value_heads, is_new, is_old)
    tl.store(target, 1.0 / (1.0 + tl.exp(-write.to(wide))), mask=is_live)
    rate, bias = -tl.exp(tl.load(a_log).to(wide)), tl.load(dt_bias).to(wide)
    tl.store(target + SIZES.num_value_heads, rate * _softplus(decay.to(wide) + bias), mask=is_live)


@triton.jit
def either(new, old, is_new, is_old):  # type: ignore[no-untyped-def]
    """Loads elements of the step or of a ring; zeros of neither."""
    return tl.load(new, mask=is_new, other=0.0) + tl.load(old, mask=is_old, other=0.0)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """Accurate where the exponential is small beside 1, too."""
    grown = tl.exp(tl.minimum(x, _LINEAR_ABOVE))
    near = 1.0 + grown
    log = tl.where(near == 1.0, grown, tl.log(near) * (grown / tl.where(near == 1.0, 1.0, near - 1.0)))
    return tl.where(x > _LINEAR_ABOVE, x, log)
