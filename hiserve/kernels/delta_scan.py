"""The states of prompts by the gated delta rule, one chunk after the other."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.delta import DeltaPools
from hiserve.kernels.delta_chunks import SolvedChunks, chunk_of
from hiserve.kernels.delta_inputs import VARYING, MadeInputs, ends_of, entry_of, load_state, span_of, store_nothing
from hiserve.kernels.delta_rings import store_inputs
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next

_NUM_WARPS = 4


class ScanTile(NamedTuple):
    """Values of a program, and chunks in shared memory at once: of two, the second is asked for when the first is done."""

    num_values: int
    num_stages: int


# Of rows whose programs are no more than multiprocessors, each of which has room for one; and of more. On an H200 a row of 8,192 tokens with
# the heads of Qwen3.5-35B-A3B takes 270 us in the first, 427 in the second, eight rows of 1,024 take 304 and 249.
_FEW, _MANY = ScanTile(32, 3), ScanTile(64, 2)


def scan_chunks(
    made: MadeInputs,
    solved: SolvedChunks,
    mixed: Tensor,
    gates: Tensor,
    pools: DeltaPools,
    rows: StateRows,
    indptr: Tensor,
    out: Tensor,
    until: int,
) -> None:
    """Like ``delta_step.advance``, for sums in float32; outputs depend on chunks in their last digits."""
    sizes, num_rows = made.sizes, rows.rows.shape[0]
    num_programs = num_rows * sizes.num_value_heads * triton.cdiv(sizes.value_dim, _FEW.num_values)
    tile = _FEW if num_programs <= num_processors(mixed.device) else _MANY
    block = min(tile.num_values, sizes.value_dim)
    _scan_chunks[(sizes.num_value_heads * (sizes.value_dim // block), num_rows)](
        made.heads, made.factors, *solved, mixed, gates, pools.ring, pools.state, pools.snap_ring, pools.snap_state,
        rows.rows, rows.starts, rows.state_lens, rows.state_ends, rows.snap_at, rows.snap_slots, indptr, out,
        mixed.stride(0), gates.stride(0), mixed.shape[0], made.room, until,
        SIZES=sizes, BLOCK=block, CHUNK=solved.reads.shape[2], num_warps=_NUM_WARPS, num_stages=tile.num_stages,
        **early_launch(mixed.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _scan_chunks(  # type: ignore[no-untyped-def]
    heads, factors, keys, values, reads, mixed, gates, ring, state, snap_ring, snap_state, rows, starts, state_lens,
    state_ends, snap_at, snap_slots, indptr, out, mixed_stride, gates_stride, num_tokens, room, until,
    SIZES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program advances some columns of one head's state over the tokens of one row."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    num_blocks: tl.constexpr = SIZES.value_dim // BLOCK
    head, number = tl.program_id(0) // num_blocks, tl.program_id(1)
    begin, start, state_len, end = span_of(number, indptr, starts, state_lens)
    key, value = tl.arange(0, SIZES.key_dim), tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    store_nothing(out, indptr, until, head, value, SIZES)
    if start < end:
        row, slot, first = tl.load(rows + number), tl.load(snap_slots + number), begin.to(tl.int64) - start
        state_end, boundary = ends_of(number, state_len, end, slot, state_ends, snap_at)
        size: tl.constexpr = SIZES.num_value_heads * SIZES.key_dim * SIZES.value_dim
        part = (head * SIZES.key_dim + key)[:, None] * SIZES.value_dim + value[None, :]
        total = load_state(state + row * size + part, state_len > 0, key, tl.float32)
        split = tl.where(boundary <= end, boundary, state_len)
        most = tl.cdiv(split - state_len, CHUNK) + tl.cdiv(state_end - split, CHUNK)
        for turn in range(most + tl.cdiv(end - state_end, CHUNK)):
            low, high = chunk_of(turn, state_len, boundary, state_end, end, CHUNK)
            t = low + tl.arange(0, CHUNK)
            entry, is_live = entry_of(t, start, begin, number, num_tokens, room, SIZES), t < high
            total, read = _advance(
                total, heads, factors, keys, values, reads, entry, is_live, head, value, SIZES, CHUNK
            )
            target = out + ((first + t) * SIZES.num_value_heads + head)[:, None] * SIZES.value_dim + value[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=(is_live & (t >= start))[:, None])
            if high == state_end:
                tl.store(state + row * size + part, total.to(state.dtype.element_ty))
            if high == boundary:
                tl.store(snap_state + slot * size + part, total.to(state.dtype.element_ty))
        given = (mixed, gates, mixed_stride, gates_stride, first)
        store_inputs(ring, row, snap_ring, slot, boundary, given, start, end, SIZES, BLOCK)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    total, heads, factors, keys, values, reads, entry, is_live, head, value,
    SIZES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Returns the state after a chunk, and what its tokens read; tokens that are not live change nothing.

    The state is float32; products take it, and changes, in the type of the inputs.
    """
    place, key = (entry * SIZES.num_value_heads + head)[:, None], tl.arange(0, SIZES.key_dim)
    is_token = is_live[:, None]
    made = tl.load(keys + place * SIZES.key_dim + key, mask=is_token, other=0.0)
    change = tl.load(values + place * SIZES.value_dim + value, mask=is_token, other=0.0).to(tl.float32)
    share = tl.load(reads + place * CHUNK + tl.arange(0, CHUNK), mask=is_token, other=0.0)
    group: tl.constexpr = SIZES.num_value_heads // SIZES.num_key_heads
    q_place = heads + entry[:, None] * SIZES.num_channels + (head // group * SIZES.key_dim + key)
    q = tl.load(q_place, mask=is_token, other=0.0)
    k = tl.load(q_place + SIZES.num_key_heads * SIZES.key_dim, mask=is_token, other=0.0)
    factor = factors + entry * (2 * SIZES.num_value_heads) + SIZES.num_value_heads + head
    decay = tl.load(factor, mask=is_live, other=0.0)
    faded, last, narrow = tl.cumsum(decay, 0)[:, None], tl.sum(decay, 0), total.to(made.dtype)
    change -= tl.dot(made, narrow, input_precision="ieee")
    read = tl.dot(q, narrow, input_precision="ieee") * tl.exp(faded)
    read = tl.dot(share, change.to(made.dtype), read, input_precision="ieee")
    change = (change * tl.exp(last - faded)).to(made.dtype)
    return tl.dot(tl.trans(k), change, total * tl.exp(last), input_precision="ieee"), read
