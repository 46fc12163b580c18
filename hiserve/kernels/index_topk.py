"""The choice of rows by an index, in Triton: scores, then exactly the best; ``union_reference.choose_rows`` is its twin.

One program finds the rows of a token: four passes over its scores find the least score that is chosen, eight bits of its
order at a time, and a fifth collects the rows in their order. The result is the same whatever the launch: nothing is sorted,
and no count depends on a race.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.step_memory import index_tokens
from hiserve.kernels import union_reference
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.union_rows import RangeRows

_NUM_KEYS = 64  # of a tile
_WAVES = 4  # programs that compute scores, for each multiprocessor
_MAX_CHUNK = 16384  # scores in registers at once
_ELEMENTS_PER_WARP = 512
_BINS = tl.constexpr(256)
_SIGN = tl.constexpr(-(1 << 31))


class _Shape(NamedTuple):
    """Compile-time constants."""

    num_heads: int
    block_heads: int
    width: int
    num_keys: int
    page_rows: int
    ratio: int


def choose_rows(q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
    """Like ``union_reference.choose_rows``; float64 uses the twin. Keys have a power of 2 of elements, 16 at least."""
    if weights.dtype == torch.float64:
        return union_reference.choose_rows(q, weights, keys, most, scale)
    num_tokens, num_heads, width = q.shape
    assert keys.window is None and width >= 16 and not width & (width - 1), (keys.window, width)
    assert keys.pool.dtype == q.dtype and keys.pool.stride(1) == keys.table.stride(1) == 1, keys.pool.dtype
    q, weights = q.contiguous(), weights.contiguous()
    slots = torch.empty((num_tokens, most), dtype=torch.int64, device=q.device)
    step = index_tokens(num_tokens, keys.width)
    scores = q.new_empty((step, keys.width), dtype=torch.float32)
    shape = _Shape(num_heads, max(16, triton.next_power_of_2(num_heads)), width, _NUM_KEYS, keys.page_rows, keys.ratio)
    chunk = min(_MAX_CHUNK, max(_BINS.value, triton.next_power_of_2(keys.width)))
    early = early_launch(q.device)
    num_parts = max(1, min(_WAVES * num_processors(q.device) // step, triton.cdiv(keys.width, _NUM_KEYS)))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        places = (keys.positions[part], keys.token_rows[part], keys.table)
        count = min(step, num_tokens - first)
        _score[(count, num_parts)](
            q[part],
            weights[part],
            *places,
            keys.pool,
            scores,
            keys.table.stride(0),
            keys.pool.stride(0),
            keys.width,
            scale,
            shape,
            num_warps=4,
            num_stages=3,
            **early,
        )
        _choose[(count,)](
            scores,
            *places,
            slots[part],
            keys.table.stride(0),
            keys.width,
            most,
            shape,
            CHUNK=chunk,
            num_warps=max(4, min(32, chunk // _ELEMENTS_PER_WARP)),
            **early,
        )
    return slots


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride", "num_rows", "scale"],
    do_not_specialize_on_alignment=["q", "weights", "positions", "token_rows"],
)
def _score(  # type: ignore[no-untyped-def]
    q,
    weights,
    positions,
    token_rows,
    table,
    pool,
    scores,
    table_stride,
    slot_stride,
    num_rows,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes the scores of a token's rows in one part of them: whole tiles, of what the token sees."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token, num_parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    end = (tl.load(positions + token).to(tl.int32) + 1) // SHAPE.ratio
    share = tl.cdiv(tl.cdiv(end, SHAPE.num_keys), num_parts) * SHAPE.num_keys
    low = tl.program_id(1) * share
    if low < end:
        entry = table + tl.load(token_rows + token) * table_stride
        head, column = tl.arange(0, SHAPE.block_heads), tl.arange(0, SHAPE.width)
        is_head = head < SHAPE.num_heads
        mine = q + (token * SHAPE.num_heads + head)[None, :] * SHAPE.width + column[:, None]
        queries = tl.load(mine, mask=is_head[None, :], other=0.0)
        weight = tl.load(weights + token * SHAPE.num_heads + head, mask=is_head, other=0.0).to(tl.float32)
        for first in range(low, tl.minimum(low + share, end), SHAPE.num_keys):
            row = first + tl.arange(0, SHAPE.num_keys)
            is_row = row < end
            page = tl.load(entry + row // SHAPE.page_rows, mask=is_row, other=0)
            slot = page.to(tl.int64) * SHAPE.page_rows + row % SHAPE.page_rows
            keys = tl.load(pool + slot[:, None] * slot_stride + column[None, :], mask=is_row[:, None], other=0.0)
            products = tl.maximum(tl.dot(keys, queries, input_precision="ieee") * scale, 0.0)
            found = tl.sum(products * weight[None, :], 1)
            tl.store(scores + token * num_rows + row, found, mask=is_row)


@triton.jit
def _order(scores, row, is_row):  # type: ignore[no-untyped-def]
    """Returns numbers in the order of scores, of which 0 and -0 are equal."""
    bits = (tl.load(scores + row, mask=is_row, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_stride", "num_rows"],
    do_not_specialize_on_alignment=["positions", "token_rows", "slots"],
)
def _choose(  # type: ignore[no-untyped-def]
    scores,
    positions,
    token_rows,
    table,
    slots,
    table_stride,
    num_rows,
    most,
    SHAPE: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program chooses the rows of one token. Where it sees no more than ``most``, all are chosen and no score is read."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    end = (tl.load(positions + token).to(tl.int32) + 1) // SHAPE.ratio
    entry, scores = table + tl.load(token_rows + token) * table_stride, scores + token * num_rows
    bins, offset = tl.arange(0, _BINS), tl.arange(0, CHUNK)
    num_scored = tl.where(end > most, end, 0)
    least = tl.full((), 0, tl.uint32)  # the order of the least chosen score, as far as it is known
    left = tl.full((), 0, tl.int32) + most  # rows to choose among those whose order begins like it
    if num_scored > 0:
        for shift in tl.static_range(24, -1, -8):
            counts = tl.full((_BINS,), 0, tl.int32)
            for first in range(0, end, CHUNK):
                is_row = first + offset < end
                order = _order(scores, first + offset, is_row)
                begins = (order >> shift) >> 8  # 0 at first, as ``least``
                next_bits = ((order >> shift) & (_BINS - 1)).to(tl.int32)
                counts += tl.histogram(next_bits, _BINS, mask=is_row & (begins == least))
            not_below = tl.cumsum(counts, 0, reverse=True)
            chosen = tl.max(tl.where(not_below >= left, bins, 0), 0)
            left -= tl.sum(tl.where(bins > chosen, counts, 0), 0)
            least = (least << 8) | chosen.to(tl.uint32)
    target = slots + token * most
    num_chosen = tl.full((), 0, tl.int32)
    num_equal = tl.full((), 0, tl.int32)
    for first in range(0, end, CHUNK):
        row = first + offset
        is_row = row < end
        order = _order(scores, row, row < num_scored)
        is_equal = is_row & (order == least)
        rank = num_equal + tl.cumsum(is_equal.to(tl.int32), 0)
        is_chosen = is_row & ((row >= num_scored) | (order > least) | (is_equal & (rank <= left)))
        place = num_chosen + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        page = tl.load(entry + row // SHAPE.page_rows, mask=is_chosen, other=0)
        tl.store(target + place, page.to(tl.int64) * SHAPE.page_rows + row % SHAPE.page_rows, mask=is_chosen)
        num_equal += tl.sum(is_equal.to(tl.int32), 0)
        num_chosen += tl.sum(is_chosen.to(tl.int32), 0)
    for first in range(0, most, CHUNK):
        place = first + offset
        nothing = tl.full((CHUNK,), -1, tl.int64)
        tl.store(target + place, nothing, mask=(place >= num_chosen) & (place < most))
