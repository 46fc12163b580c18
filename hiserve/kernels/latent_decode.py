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

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.few_bits import has_instructions
from hiserve.kernels.latent_rows import page_rows_of
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.packed_latents import add_scores, attend_packed, find_keys

MAX_PARTS = 64
"""Most parts of a row."""

_MIN_PART_KEYS = 64  # one tile: with few rows a launch takes as long as its longest part, some 4 us a tile
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


class Tile(NamedTuple):
    """What a program holds at once."""

    num_queries: int  # heads times tokens; a power of 2, 16 at least
    num_keys: int  # likewise
    num_warps: int
    num_stages: int  # loads of keys in flight


class _Shape(NamedTuple):
    """Compile-time constants besides types."""

    num_heads: int
    rank: int
    rope_dim: int
    page_size: int
    packed_rows: int  # of a page, if they are packed; else 0
    num_queries: int
    num_keys: int
    min_part_keys: int
    hides_first: bool
    has_instructions: bool  # of a GPU, for packed rows


_WIDE_TILE = Tile(16, 16, 4, 2)  # of float32, whose products take no tensor cores
# Ascending queries. The fastest of seven on an H200 at 32 rows of 8,192 tokens: 152 us for 20 heads, 349 us for 128. With 20
# heads, one row of 1,024 and 8,192 tokens takes 10.8 and 23 us with 8 warps, 16 and 30 us with 4; 8 rows of 8,192 take 61 and 63.
_TILES = (Tile(16, 64, 4, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2))
# Of rows that fill the device without parts, as chosen rows of prompts do: where these begin is loaded one step ahead. 2,048 tokens with 128 heads and
# 2,048 rows each take 5.8 ms for 6.7 packed, and 5.0 for 5.2 plain; more stages gain nothing.
_WHOLE_TILE = Tile(64, 64, 8, 3)
# Rows are views of a step's tensors, at any multiple of 4 bytes: no variant is compiled for each place or number.
_VARYING = ["qo_indptr", "kv_lens", "page_table", "num_tokens", "table_stride"]


def tile_for(num_queries: int, dtype: torch.dtype) -> Tile:
    """Returns the least tile that holds the queries of a row, or the largest."""
    if dtype == torch.float32:
        return _WIDE_TILE
    return next((tile for tile in _TILES if num_queries <= tile.num_queries), _TILES[-1])


def choose_num_parts(
    num_rows: int, queries: int, max_kv_len: int, dtype: torch.dtype, *, num_sms: int, room: int
) -> int:
    """Returns how many parts fill the device: of at least 64 keys, and of no more than ``room`` queries in all rows.

    ``queries`` are those of the longest row: its tokens times all heads.
    """
    wanted = 2 * num_sms // max(1, num_rows * -(-queries // tile_for(queries, dtype).num_queries))
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
    packed: PackedPages | None = None,
) -> None:
    """Attends over the pages of some rows. Reads no slot and no table entry that a row does not own.

    Args:
        q: ``[T, num_heads, rank + rope_dim]``, contiguous. float32 or 16 bits.
        pool: ``[num_slots, 1, rank + rope_dim]``, of the same type, or packed; the first ``rank`` elements are the value.
        rank: A power of 2, as is ``rope_dim``; 16 at least.
        rows: The rows; ``T`` may have tokens of others.
        max_q_len: Most tokens of one of them.
        num_parts: Most parts into which the keys of a row are split; the device takes fewer for a short row.
        page_size: Tokens per page of ``rows.page_table``.
        scale: Factor of the scores.
        hides_first: No token sees position 0, whose slot may hold anything.
        out: ``[T, num_heads, rank]``, contiguous; tokens of these rows are written, zeros where one sees no key.
        packed: How ``pool`` holds rows in 8 bits; None is as they are.
    """
    num_tokens, num_heads, width = q.shape
    assert q.is_contiguous() and out.is_contiguous(), (q.stride(), out.stride())
    assert pool.stride(2) == 1 and rows.page_table.stride(1) == 1, (pool.stride(), rows.page_table.stride())
    tile, early = tile_for(max_q_len * num_heads, q.dtype), early_launch(q.device)
    tile = _WHOLE_TILE if tile == _TILES[-1] and num_parts == 1 else tile
    sizes = (tile.num_queries, tile.num_keys, _MIN_PART_KEYS)
    packed_rows = page_rows_of(packed, pool, rank, width - rank)
    assert packed_rows or (pool.dtype == q.dtype and pool.shape[2] == width), (pool.dtype, pool.shape)
    shape = _Shape(
        num_heads, rank, width - rank, page_size, packed_rows, *sizes, hides_first, has_instructions(q.device, q.dtype)
    )
    num_rows = rows.kv_lens.shape[0]
    part_out, part_lse = out, None
    if num_parts > 1:
        part_out = torch.empty((num_parts, num_tokens, num_heads, rank), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_parts, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(max_q_len * num_heads, shape.num_queries), num_rows, num_parts)
    _attend[grid](
        q, pool, *rows, part_out, part_lse, num_tokens, pool.stride(0), rows.page_table.stride(0),
        scale * math.log2(math.e), shape,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **early,
    )  # fmt: skip
    if part_lse is not None:
        _join[(max_q_len * num_heads, num_rows)](
            part_out, part_lse, rows.qo_indptr, rows.kv_lens, out, num_tokens, num_parts, shape,
            PARTS=_NUM_JOINED, **early,
        )  # fmt: skip


@triton.jit
def _part_keys(kv_len, num_parts, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the keys of each part of a row but its last: whole tiles, of no more parts than pay."""
    parts = tl.minimum(num_parts, tl.maximum(kv_len // SHAPE.min_part_keys, 1))
    return tl.cdiv(tl.cdiv(kv_len, parts), SHAPE.num_keys) * SHAPE.num_keys


@triton.jit
def _attend_plain(mine, is_query, last, pool, slot_stride, table, keys, scale, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns of queries the largest score, the sum of exponentials, and that of values, over keys from one on up to another."""
    plain = tl.load(mine + tl.arange(0, SHAPE.rank)[None, :], mask=is_query[:, None], other=0.0)
    turned = SHAPE.rank + tl.arange(0, SHAPE.rope_dim)
    rotated = tl.load(mine + turned[None, :], mask=is_query[:, None], other=0.0)
    best = tl.full((SHAPE.num_queries,), -float("inf"), tl.float32)
    total = tl.full((SHAPE.num_queries,), 0.0, tl.float32)  # Triton 3.6 has no tl.zeros of such a shape
    summed = tl.full((SHAPE.num_queries, SHAPE.rank), 0.0, tl.float32)
    low, high = keys
    for first in range(low, high, SHAPE.num_keys):
        key, slot, is_key = find_keys(first, high, table, SHAPE)
        place = pool + slot[:, None] * slot_stride
        latents = tl.load(place + tl.arange(0, SHAPE.rank)[None, :], mask=is_key[:, None], other=0.0)
        turns = tl.load(place + turned[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(plain, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(turns), scores, input_precision="ieee") * scale
        scores = tl.where(is_key[None, :] & (key[None, :] <= last[:, None]), scores, -float("inf"))
        best, total, shares, kept = add_scores(scores, best, total)
        summed = tl.dot(shares.to(latents.dtype), latents, summed * kept[:, None], input_precision="ieee")
    return best, total, summed


@triton.jit(do_not_specialize=_VARYING)
def _attend(  # type: ignore[no-untyped-def]
    q, pool, qo_indptr, kv_lens, page_table, out, lse, num_tokens, slot_stride, table_stride, scale,
    SHAPE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes some queries of a row over one part of its keys. A part without keys writes nothing, but the first."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row, part, num_parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    start = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - start
    query = tl.program_id(0) * SHAPE.num_queries + tl.arange(0, SHAPE.num_queries)
    token = query // SHAPE.num_heads
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    share = _part_keys(kv_len, num_parts, SHAPE)
    has_queries = tl.program_id(0) * SHAPE.num_queries < q_len * SHAPE.num_heads
    if has_queries & ((part == 0) | (part * share < kv_len)):
        last = kv_len - q_len + token  # position of each query, the last that it sees
        low, is_query = part * share, token < q_len
        block_end = tl.minimum((tl.program_id(0) + 1) * SHAPE.num_queries - 1, q_len * SHAPE.num_heads - 1)
        high = tl.minimum(low + share, kv_len - q_len + block_end // SHAPE.num_heads + 1)
        cell = (start + token).to(tl.int64) * SHAPE.num_heads + query % SHAPE.num_heads
        mine = q + cell[:, None] * (SHAPE.rank + SHAPE.rope_dim)
        table, keys = page_table + row.to(tl.int64) * table_stride, (low, high)
        target = part.to(tl.int64) * num_tokens * SHAPE.num_heads + cell
        if SHAPE.packed_rows:
            best, total, one, two = attend_packed(mine, is_query, last, pool, table, keys, scale, SHAPE)
            _store_values(out, target, total, one, 0, is_query, SHAPE)
            _store_values(out, target, total, two, SHAPE.rank // 2, is_query, SHAPE)
        else:
            best, total, one = _attend_plain(mine, is_query, last, pool, slot_stride, table, keys, scale, SHAPE)
            _store_values(out, target, total, one, 0, is_query, SHAPE)
        if lse is not None:
            logs = best * _LN_2 + tl.log(tl.where(total > 0.0, total, 1.0))
            tl.store(lse + target, tl.where(total > 0.0, logs, -float("inf")), mask=is_query)


@triton.jit
def _store_values(out, target, total, summed, first, is_query, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores columns of values from ``first`` on; zeros where a query saw no key."""
    summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    values = out + target[:, None] * SHAPE.rank + first + tl.arange(0, summed.shape[1])[None, :]
    tl.store(values, summed.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit(do_not_specialize=["qo_indptr", "kv_lens", "num_tokens", "num_parts"])
def _join(  # type: ignore[no-untyped-def]
    part_out, part_lse, qo_indptr, kv_lens, out, num_tokens, num_parts,
    SHAPE: tl.constexpr, PARTS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program joins the parts of one query, ``PARTS`` at a time; parts that saw no key have the logarithm -inf."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row, number = tl.program_id(1), tl.program_id(0)
    start = tl.load(qo_indptr + row)
    if number < (tl.load(qo_indptr + row + 1) - start) * SHAPE.num_heads:
        kv_len = tl.load(kv_lens + row).to(tl.int32)
        num_written = tl.maximum(tl.cdiv(kv_len, _part_keys(kv_len, num_parts, SHAPE)), 1)
        cell = start.to(tl.int64) * SHAPE.num_heads + number
        column = tl.arange(0, SHAPE.rank)
        best = tl.full((), -float("inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        summed = tl.full((SHAPE.rank,), 0.0, tl.float32)
        for first in range(0, num_written, PARTS):
            part = first + tl.arange(0, PARTS)
            is_part = part < num_written
            source = part.to(tl.int64) * num_tokens * SHAPE.num_heads + cell
            logs = tl.load(part_lse + source, mask=is_part, other=-float("inf"))
            better = tl.maximum(best, tl.max(logs, 0))
            base = tl.where(better == -float("inf"), 0.0, better)
            shares, kept = tl.exp2((logs - base) * _LOG2_E), tl.exp2((best - base) * _LOG2_E)
            values = tl.load(
                part_out + source[:, None] * SHAPE.rank + column[None, :], mask=is_part[:, None], other=0.0
            )
            total = total * kept + tl.sum(shares, 0)
            summed = summed * kept + tl.sum(values * shares[:, None], 0)
            best = better
        joined = summed / tl.where(total > 0.0, total, 1.0)
        tl.store(out + cell * SHAPE.rank + column, joined.to(out.dtype.element_ty))
