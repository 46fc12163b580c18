"""Attention of absorbed queries over rows that all heads share (DeepSeek-V2, arXiv:2405.04434): key and value in one.

All heads of a token, times the tokens of its row, are the rows of one matrix product, so that shared rows are read once
for up to 64 queries. The keys of each row are split into parts of equal length, by lengths on the device (the split-KV
of FlashDecoding); a second launch joins them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 64
"""Most parts of a row."""

_MAX_QUERIES = 64
_MIN_PART_KEYS = 256  # a shorter part costs more to join than it saves
_NUM_JOINED = 16  # parts that are in registers at once
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))


class LatentRows(NamedTuple):
    """Rows of a batch.

    Attributes:
        qo_indptr: int32 ``[B + 1]``. Tokens of each row, counted from the first of the batch.
        kv_lens: int64 ``[B]``. Tokens a row attends over, its new ones included.
        page_table: int32 ``[B, W]``.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor


class _Shape(NamedTuple):
    """Compile-time constants besides types."""

    num_heads: int
    rank: int
    rope_dim: int
    page_size: int
    num_queries: int
    num_keys: int
    hides_first: bool


def choose_num_parts(num_rows: int, max_q_len: int, num_heads: int, max_kv_len: int, *, num_sms: int, room: int) -> int:
    """Returns how many parts fill the device: of at least 256 keys, and of no more than ``room`` queries in all rows."""
    queries = max_q_len * num_heads
    wanted = 2 * num_sms // max(1, num_rows * -(-queries // _block_queries(queries)))
    return max(1, min(wanted, MAX_PARTS, -(-max_kv_len // _MIN_PART_KEYS), room // (num_rows * queries)))


def decode(
    q: Tensor,
    pool: Tensor,
    rank: int,
    rows: LatentRows,
    *,
    max_q_len: int,
    num_parts: int,
    page_size: int,
    scale: float,
    hides_first: bool,
    out: Tensor,
) -> None:
    """Attends over the pages of some rows. Reads no slot and no table entry that a row does not own.

    Args:
        q: ``[T, num_heads, rank + rope_dim]``, contiguous. float32 or 16 bits.
        pool: ``[num_slots, 1, rank + rope_dim]``, of the same type; the first ``rank`` elements are the value.
        rank: A power of 2, as is ``rope_dim``; 16 at least.
        rows: The rows; ``T`` may have tokens of others.
        max_q_len: Most tokens of one of them.
        num_parts: Into which the keys of each row are split.
        page_size: Tokens per page.
        scale: Factor of the scores.
        hides_first: No token sees position 0, whose slot may hold anything.
        out: ``[T, num_heads, rank]``, contiguous; tokens of these rows are written, zeros where one sees no key.
    """
    num_tokens, num_heads, width = q.shape
    assert q.is_contiguous() and out.is_contiguous(), (q.stride(), out.stride())
    assert pool.stride(2) == 1 and rows.page_table.stride(1) == 1, (pool.stride(), rows.page_table.stride())
    num_queries = _block_queries(max_q_len * num_heads)
    is_wide = q.dtype == torch.float32
    shape = _Shape(
        num_heads=num_heads,
        rank=rank,
        rope_dim=width - rank,
        page_size=page_size,
        num_queries=16 if is_wide else num_queries,
        num_keys=16 if is_wide else 32,
        hides_first=hides_first,
    )
    num_rows = rows.kv_lens.shape[0]
    part_out, part_lse = out, None
    if num_parts > 1:
        part_out = torch.empty((num_parts, num_tokens, num_heads, rank), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_parts, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(max_q_len * num_heads, shape.num_queries), num_rows, num_parts)
    _attend[grid](
        q,
        pool,
        rows.qo_indptr,
        rows.kv_lens,
        rows.page_table,
        part_out,
        part_lse,
        num_tokens,
        pool.stride(0),
        rows.page_table.stride(0),
        scale * math.log2(math.e),
        shape,
        num_warps=4 if shape.num_queries == 16 else 8,
        num_stages=2,
    )
    if part_lse is not None:
        _join[(max_q_len * num_heads, num_rows)](
            part_out, part_lse, rows.qo_indptr, out, num_tokens, num_parts, num_heads, RANK=rank, PARTS=_NUM_JOINED
        )


def _block_queries(num_queries: int) -> int:
    return max(16, min(_MAX_QUERIES, 1 << (num_queries - 1).bit_length()))


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    pool,
    qo_indptr,
    kv_lens,
    page_table,
    out,
    lse,
    num_tokens,
    slot_stride,
    table_stride,
    scale,
    SHAPE: tl.constexpr,  # noqa: N803
):
    """Each program computes some queries of a row over one part of its keys; ``scale`` is for powers of 2."""
    row, part, num_parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    start = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - start
    query = tl.program_id(0) * SHAPE.num_queries + tl.arange(0, SHAPE.num_queries)
    token = query // SHAPE.num_heads
    if tl.program_id(0) * SHAPE.num_queries < q_len * SHAPE.num_heads:
        kv_len = tl.load(kv_lens + row).to(tl.int32)
        last = kv_len - q_len + token  # position of each query, the last that it sees
        share = tl.cdiv(tl.cdiv(kv_len, num_parts), SHAPE.num_keys) * SHAPE.num_keys
        low, is_query = part * share, token < q_len
        block_end = tl.minimum((tl.program_id(0) + 1) * SHAPE.num_queries - 1, q_len * SHAPE.num_heads - 1)
        high = tl.minimum(low + share, kv_len - q_len + block_end // SHAPE.num_heads + 1)
        cell = (start + token).to(tl.int64) * SHAPE.num_heads + query % SHAPE.num_heads
        column, turned = tl.arange(0, SHAPE.rank), SHAPE.rank + tl.arange(0, SHAPE.rope_dim)
        mine = q + cell[:, None] * (SHAPE.rank + SHAPE.rope_dim)
        plain = tl.load(mine + column[None, :], mask=is_query[:, None], other=0.0)
        rotated = tl.load(mine + turned[None, :], mask=is_query[:, None], other=0.0)
        best = tl.full((SHAPE.num_queries,), -float("inf"), tl.float32)
        total = tl.full((SHAPE.num_queries,), 0.0, tl.float32)  # Triton 3.6 has no tl.zeros of such a shape
        summed = tl.full((SHAPE.num_queries, SHAPE.rank), 0.0, tl.float32)
        for first in range(low, high, SHAPE.num_keys):
            key = first + tl.arange(0, SHAPE.num_keys)
            is_key = key < high
            if SHAPE.hides_first:
                is_key = is_key & (key > 0)
            page = tl.load(page_table + row.to(tl.int64) * table_stride + key // SHAPE.page_size, mask=is_key, other=0)
            slot = pool + (page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size)[:, None] * slot_stride
            latents = tl.load(slot + column[None, :], mask=is_key[:, None], other=0.0)
            turns = tl.load(slot + turned[None, :], mask=is_key[:, None], other=0.0)
            scores = tl.dot(plain, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(rotated, tl.trans(turns), scores, input_precision="ieee") * scale
            scores = tl.where(is_key[None, :] & (key[None, :] <= last[:, None]), scores, -float("inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            base = tl.where(better == -float("inf"), 0.0, better)
            shares, kept = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
            total = total * kept + tl.sum(shares, 1)
            summed = tl.dot(shares.to(latents.dtype), latents, summed * kept[:, None], input_precision="ieee")
            best = better
        sees = total > 0.0
        summed = summed / tl.where(sees, total, 1.0)[:, None]
        target = part.to(tl.int64) * num_tokens * SHAPE.num_heads + cell
        values = out + target[:, None] * SHAPE.rank + column[None, :]
        tl.store(values, summed.to(out.dtype.element_ty), mask=is_query[:, None])
        if lse is not None:
            logs = tl.where(sees, best * _LN_2 + tl.log(tl.where(sees, total, 1.0)), -float("inf"))
            tl.store(lse + target, logs, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    part_out,
    part_lse,
    qo_indptr,
    out,
    num_tokens,
    num_parts,
    num_heads,
    RANK: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Each program joins the parts of one query, ``PARTS`` at a time; parts that saw no key have the logarithm -inf."""
    row, number = tl.program_id(1), tl.program_id(0)
    start = tl.load(qo_indptr + row)
    if number < (tl.load(qo_indptr + row + 1) - start) * num_heads:
        cell = start.to(tl.int64) * num_heads + number
        column = tl.arange(0, RANK)
        best = tl.full((), -float("inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        summed = tl.zeros((RANK,), tl.float32)
        for first in range(0, num_parts, PARTS):
            part = first + tl.arange(0, PARTS)
            is_part = part < num_parts
            source = part.to(tl.int64) * num_tokens * num_heads + cell
            logs = tl.load(part_lse + source, mask=is_part, other=-float("inf"))
            better = tl.maximum(best, tl.max(logs, 0))
            base = tl.where(better == -float("inf"), 0.0, better)
            shares, kept = tl.exp2((logs - base) * _LOG2_E), tl.exp2((best - base) * _LOG2_E)
            values = tl.load(part_out + source[:, None] * RANK + column[None, :], mask=is_part[:, None], other=0.0)
            total = total * kept + tl.sum(shares, 0)
            summed = summed * kept + tl.sum(values * shares[:, None], 0)
            best = better
        joined = summed / tl.where(total > 0.0, total, 1.0)
        tl.store(out + cell * RANK + column, joined.to(out.dtype.element_ty))
