"""The gated delta rule token by token: a program keeps some columns of a head's state in registers.

The state is read once and written once, whatever is replayed or drafted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.delta import DeltaPools
from hiserve.kernels.delta_inputs import VARYING, MadeInputs, ends_of, entry_of, load_state, span_of, store_nothing
from hiserve.kernels.delta_rings import store_inputs
from hiserve.kernels.launch import await_previous, early_launch, start_next

_BLOCK_VALUES = 32  # 16 KiB of a float32 state with keys of 128 elements
_NUM_WARPS = 1  # sums over keys stay in a warp


def advance(
    made: MadeInputs,
    mixed: Tensor,
    gates: Tensor,
    pools: DeltaPools,
    rows: StateRows,
    indptr: Tensor,
    out: Tensor,
    until: int,
) -> None:
    """Advances some rows as ``delta.delta`` does.

    Args:
        made: Their inputs.
        mixed: What these were made of.
        gates: Likewise.
        pools: Likewise; changed.
        rows: Likewise.
        indptr: Likewise.
        out: ``[T, num_value_heads, value_dim]``, contiguous; the tokens of these rows are written.
        until: Those behind them become 0 up to here.
    """
    sizes = made.sizes
    block = min(_BLOCK_VALUES, sizes.value_dim)
    _advance[(sizes.num_value_heads * (sizes.value_dim // block), rows.rows.shape[0])](
        made.heads, made.factors, mixed, gates, pools.ring, pools.state, pools.snap_ring, pools.snap_state, rows.rows,
        rows.starts, rows.state_lens, rows.state_ends, rows.snap_at, rows.snap_slots, indptr, out, mixed.stride(0),
        gates.stride(0), mixed.shape[0], made.room, until,
        SIZES=sizes, BLOCK=block, num_warps=_NUM_WARPS, **early_launch(mixed.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _advance(  # type: ignore[no-untyped-def]
    heads, factors, mixed, gates, ring, state, snap_ring, snap_state, rows, starts, state_lens, state_ends, snap_at,
    snap_slots, indptr, out, mixed_stride, gates_stride, num_tokens, room, until,
    SIZES: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program advances some columns of one head's state over the tokens of one row.

    States are read behind the wait: read before it, 32 rows took 53 us in place of 46 (two runs on H200s).
    """
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    num_blocks: tl.constexpr = SIZES.value_dim // BLOCK
    head, number = tl.program_id(0) // num_blocks, tl.program_id(1)
    key, value = tl.arange(0, SIZES.key_dim), tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    store_nothing(out, indptr, until, head, value, SIZES)
    if start < end:
        row, slot, first = tl.load(rows + number), tl.load(snap_slots + number), begin.to(tl.int64) - start
        size: tl.constexpr = SIZES.num_value_heads * SIZES.key_dim * SIZES.value_dim
        part = (head * SIZES.key_dim + key)[:, None] * SIZES.value_dim + value[None, :]
        total = load_state(state + row * size + part, state_len > 0, key, factors.dtype.element_ty)
        state_end, boundary = ends_of(number, state_len, end, slot, state_ends, snap_at)
        keys: tl.constexpr = SIZES.num_key_heads * SIZES.key_dim
        v_channel = 2 * keys + head * SIZES.value_dim + value
        q_channel = head // (SIZES.num_value_heads // SIZES.num_key_heads) * SIZES.key_dim + key
        for t in range(state_len, end):
            entry = entry_of(t, start, begin, number, num_tokens, room, SIZES)
            mine, factor = heads + entry * SIZES.num_channels, factors + entry * (2 * SIZES.num_value_heads) + head
            k, v = tl.load(mine + keys + q_channel).to(total.dtype), tl.load(mine + v_channel).to(total.dtype)
            total = total * tl.exp(tl.load(factor + SIZES.num_value_heads))
            change = (v - tl.sum(total * k[:, None], 0)) * tl.load(factor)
            total += k[:, None] * change[None, :]
            if t >= start:
                q = tl.load(mine + q_channel).to(total.dtype)
                target = out + ((first + t) * SIZES.num_value_heads + head) * SIZES.value_dim + value
                tl.store(target, tl.sum(total * q[:, None], 0).to(out.dtype.element_ty))
            if t + 1 == state_end:
                tl.store(state + row * size + part, total)
            if t + 1 == boundary:
                tl.store(snap_state + slot * size + part, total)
        given = (mixed, gates, mixed_stride, gates_stride, first)
        store_inputs(ring, row, snap_ring, slot, boundary, given, start, end, SIZES, BLOCK)
