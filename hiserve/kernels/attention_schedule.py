"""Assigns rows and ranges of keys to programs, on the device, from the lengths that are stored there.

Rows that are long for their batch are split into parts, so that no program works much longer than the others. The most
parts, and so the launch, depend on shapes alone: a captured graph serves every batch. Rows of one block of keys do not
influence how the others are split: where shapes allow as many extra parts, rows that pad a batch leave the other rows'
results unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next

MAX_QUERIES = 64
MAX_JOINED = 16
"""Most parts, beyond one, of a row of several tokens."""
_BLOCK = tl.constexpr(128)
_SHARES = tl.constexpr(32)
FIELDS = tl.constexpr(8)
"""Numbers that describe a part."""


class KeyTile(NamedTuple):
    """Tile of keys.

    Attributes:
        num_keys: Keys of a block, a power of two, at least 16.
        num_warps: Warps of a program.
        num_stages: Blocks whose loads are in flight at once.
        max_registers: Most registers of a thread; None is what the compiler takes.
        num_programs: Programs that a multiprocessor has at once.
    """

    num_keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    num_programs: int = 3


class ScheduledRows(NamedTuple):
    """Adjacent rows of a step.

    Attributes:
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        kv_lens: int64 ``[B]``. Tokens a row attends over, its own included; at least 1.
        page_table: int32 ``[B, W]``. Entries past ``kv_lens`` are arbitrary.
        max_q_len: Upper bound of the tokens of one row, 1 to 64.
        max_kv_len: Upper bound of ``kv_lens``.
        num_nodes_before: As in ``ForwardInputs``.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    max_q_len: int
    max_kv_len: int
    num_nodes_before: int = 0


class Schedule(NamedTuple):
    """Parts of rows; one program attends over each part for each KV head. Valid until the lengths change.

    Attributes:
        parts: int32 ``[B + num_extra, 8]``: row, first key, end, the row's first token, its tokens, its keys before
            those that masks count, the first of its parts, its parts; zeros after the last. Rows with many blocks of keys come first, the
            parts of a row are adjacent.
        counts: int32 ``[2 * num_extra, num_programs]``, zeros. Finished parts, by the first part of a row that is split
            and by program; reset when all are finished.
        num_extra: Most parts beyond one for each row, at least 1. The parts of rows that are split are therefore among
            the first ``2 * num_extra``.
        window: A token at position p sees positions above ``p - window``; None is all.
        hides_first: No token sees position 0.
        tile: Tile of keys.
    """

    parts: Tensor
    counts: Tensor
    num_extra: int
    window: int | None
    hides_first: bool
    tile: KeyTile


def tile_for(head_dim: int, dtype: torch.dtype) -> KeyTile:
    """Returns the tile that was fastest, or nearly so, in every batch tried on an H200; ``dtype`` is that of the pool.

    Where a multiprocessor has room for two programs alone, all have as many; with more room some get three and others one.
    """
    if dtype == torch.uint8:
        if head_dim <= 128:
            return KeyTile(num_keys=128, num_warps=4, num_stages=2, num_programs=2)
        # Widened, elements take the registers of 16 bits: of more than 160 only two programs would fit a multiprocessor.
        return KeyTile(num_keys=32, num_warps=4, num_stages=3, max_registers=160)
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row_bytes == 256:
        return KeyTile(num_keys=64, num_warps=4, num_stages=4, num_programs=2)
    return KeyTile(num_keys=64 if row_bytes < 256 else 32, num_warps=4, num_stages=3)


def choose_num_extra(rows: ScheduledRows, heads: tuple[int, int], num_sms: int, tile: KeyTile) -> int:
    """Returns how many parts to allow beyond one for each row.

    Two programs on a multiprocessor use all of its bandwidth. A batch whose rows do not occupy every multiprocessor once
    gets up to two extra programs on each, if they fit; a larger one, one. Equal rows thus become one wave of
    programs. The parts of a row are joined sequentially, for all its tokens: rows of several tokens have fewer parts.
    Measured on an H200.

    Only shapes of ``rows`` are read. ``heads`` are query heads and KV heads.
    """
    num_rows, num_at_once = rows.kv_lens.shape[0], num_sms // count_programs(rows, heads)
    num_more_blocks = num_rows * (-(-rows.max_kv_len // tile.num_keys) - 1)
    if num_rows > num_at_once:
        num_extra = num_at_once
    elif rows.max_q_len == 1:
        num_extra = min(2 * num_at_once, tile.num_programs * num_at_once - num_rows)
    else:
        num_extra = min(2 * num_at_once - num_rows, MAX_JOINED * num_rows)
    return max(1, min(num_extra, num_more_blocks))


def count_programs(rows: ScheduledRows, heads: tuple[int, int]) -> int:
    """Returns the programs per part: for each KV head, one for each block of queries."""
    num_heads, num_kv_heads = heads
    return num_kv_heads * -(-rows.max_q_len * (num_heads // num_kv_heads) // MAX_QUERIES)


def schedule(
    rows: ScheduledRows,
    heads: tuple[int, int],
    num_extra: int,
    tile: KeyTile,
    *,
    window: int | None = None,
    hides_first: bool = False,
) -> Schedule:
    """Splits rows, in one fill and one launch for all layers of one window.

    ``num_extra`` is at least 1; see ``choose_num_extra``. The other arguments are attributes of the result.
    """
    assert num_extra >= 1, f"{num_extra} more parts"
    num_rows, num_programs = rows.kv_lens.shape[0], count_programs(rows, heads)
    size = (num_rows + num_extra) * FIELDS.value
    made = torch.zeros(size + 2 * num_extra * num_programs, dtype=torch.int32, device=rows.kv_lens.device)
    parts, counts = made[:size].view(-1, FIELDS.value), made[size:].view(-1, num_programs)
    _schedule[(num_rows,)](
        rows.qo_indptr, rows.kv_lens, parts, num_rows, num_extra, rows.num_nodes_before, window, tile.num_keys,
        hides_first,
        **early_launch(made.device),
    )  # fmt: skip
    return Schedule(parts, counts, num_extra, window, hides_first, tile)


@triton.jit(
    do_not_specialize=["num_rows", "num_extra", "num_nodes_before", "window"],
    do_not_specialize_on_alignment=["qo_indptr", "kv_lens"],
)
def _schedule(  # type: ignore[no-untyped-def]
    qo_indptr, kv_lens, parts, num_rows, num_extra, num_nodes_before, window,
    KEYS: tl.constexpr, HIDES_FIRST: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """One program: one row. No part has more blocks than the share, which is the same for all rows."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.program_id(0)
    share = _share(qo_indptr, kv_lens, num_rows, num_extra, num_nodes_before, window, KEYS, HIDES_FIRST)
    first_block, num_blocks, kv_len = _seen_blocks(
        qo_indptr, kv_lens, row, num_rows, num_nodes_before, window, KEYS, HIDES_FIRST
    )
    place = tl.zeros([_BLOCK], tl.int32)
    for start in range(0, num_rows, _BLOCK):
        other = start + tl.arange(0, _BLOCK)
        _, others_blocks, _ = _seen_blocks(
            qo_indptr, kv_lens, other, num_rows, num_nodes_before, window, KEYS, HIDES_FIRST
        )
        is_before = (others_blocks > num_blocks) | ((others_blocks == num_blocks) & (other < row))
        place += tl.where(is_before, (others_blocks - 1) // share + 1, 0)
    first_token = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - first_token
    first_part, num_parts = tl.sum(place), (num_blocks - 1) // share + 1
    for start in range(0, num_parts, _BLOCK):
        part = start + tl.arange(0, _BLOCK)
        is_part = part < num_parts
        at = parts + (first_part + part) * FIELDS
        block, end = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
        tl.store(at, row, is_part)
        tl.store(at + 1, (first_block + block) * KEYS, is_part)
        tl.store(at + 2, tl.minimum((first_block + end) * KEYS, kv_len), is_part)
        tl.store(at + 3, first_token, is_part)
        tl.store(at + 4, q_len, is_part)
        tl.store(at + 5, kv_len - q_len - num_nodes_before, is_part)
        tl.store(at + 6, first_part, is_part)
        tl.store(at + 7, num_parts, is_part)


@triton.jit
def _share(  # type: ignore[no-untyped-def]
    qo_indptr, kv_lens, num_rows, num_extra, num_nodes_before, window,
    KEYS: tl.constexpr, HIDES_FIRST: tl.constexpr
):  # fmt: skip
    """The least number of blocks per part, of 32 candidates, for which the parts fit ``num_extra``.

    With share s, the parts beyond one per row number at most total / s, where total counts the blocks beyond one per
    row. They number more than total / s less one for each row with such blocks. The first bound gives a share that
    suffices, the second a share below which none does; the candidates lie between.
    """
    num_more, num_long = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32)
    for start in range(0, num_rows, _BLOCK):
        row = start + tl.arange(0, _BLOCK)
        _, num_blocks, _ = _seen_blocks(qo_indptr, kv_lens, row, num_rows, num_nodes_before, window, KEYS, HIDES_FIRST)
        num_more += num_blocks - 1
        num_long += (num_blocks > 1).to(tl.int32)
    total = tl.sum(num_more)
    least, most = total // (num_extra + tl.sum(num_long)) + 1, tl.maximum(tl.cdiv(total, num_extra), 1)
    share = least + (most - least) * tl.arange(0, _SHARES) // (_SHARES - 1)
    num_needed = tl.zeros([_SHARES], tl.int32)
    for start in range(0, num_rows, _BLOCK):
        row = start + tl.arange(0, _BLOCK)
        _, num_blocks, _ = _seen_blocks(qo_indptr, kv_lens, row, num_rows, num_nodes_before, window, KEYS, HIDES_FIRST)
        num_needed += tl.sum((num_blocks - 1)[None, :] // share[:, None], 1)
    return tl.min(tl.where(num_needed <= num_extra, share, most))


@triton.jit
def _seen_blocks(  # type: ignore[no-untyped-def]
    qo_indptr, kv_lens, row, num_rows, num_nodes_before, window,
    KEYS: tl.constexpr, HIDES_FIRST: tl.constexpr
):  # fmt: skip
    """The first block of keys that any token of a row sees; the blocks from there, at least 1; the row's length.

    Indices after the last row give one block, which never sorts before a row's.
    """
    is_row = row < num_rows
    kv_len = tl.load(kv_lens + row, is_row, other=1).to(tl.int32)
    q_len = tl.load(qo_indptr + row + 1, is_row, other=1) - tl.load(qo_indptr + row, is_row, other=0)
    first = first_seen(kv_len - q_len - num_nodes_before, window, HIDES_FIRST) // KEYS
    return first, tl.cdiv(kv_len, KEYS) - first, kv_len


@triton.jit
def first_seen(prefix, window, HIDES_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that any token sees, in a row with ``prefix`` tokens before its new ones."""
    first = tl.full((), 1 if HIDES_FIRST else 0, tl.int32)
    if window is not None:
        first = tl.maximum(first, prefix + 1 - window)
    return first
