"""Which program attends over which keys of which row, decided on the device from the lengths that stand there.

Rows that are long for their batch are split into parts, so that no program works much longer than the others. How many
parts there are, and so what is launched, depends on shapes alone: what a graph records suits every batch. What rows
are split into depends on no row of one block of keys: rows that pad a batch change nothing in the others' results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_QUERIES = 64
_BLOCK = tl.constexpr(128)
_FIELDS = tl.constexpr(4)


class Tile(NamedTuple):
    """How the keys of a row are taken.

    Attributes:
        num_keys: Keys of a block, a power of two, at least 16.
        num_warps: Warps of a program.
        num_stages: Blocks whose loads are under way at once.
    """

    num_keys: int
    num_warps: int
    num_stages: int


class Rows(NamedTuple):
    """Adjacent rows of a step.

    Attributes:
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        kv_lens: int64 ``[B]``. Tokens a row attends over, its own included; at least 1.
        page_table: int32 ``[B, W]``. Entries past ``kv_lens`` may hold anything.
        max_q_len: Upper bound of the tokens of one row, 1 to 64.
        max_kv_len: Upper bound of ``kv_lens``.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    max_q_len: int
    max_kv_len: int


class Schedule(NamedTuple):
    """Parts of rows, each of which one program attends over for each KV head. It holds while the lengths stand.

    Attributes:
        parts: int32 ``[B + num_extra, 4]``: row, first key, end, whether the row has other parts; zeros behind the last.
            Rows with many blocks of keys come first, the parts of a row are adjacent.
        split: int32 ``[num_extra, 4]``: row, the first of its parts, how many; zeros where there is no such row.
        num_extra: Most parts beyond one for each row, at least 1.
        window: A token at position p sees positions above ``p - window``; None is all.
        hides_first: Nobody sees position 0.
        tile: How keys are taken.
    """

    parts: Tensor
    split: Tensor
    num_extra: int
    window: int | None
    hides_first: bool
    tile: Tile


def tile_for(head_dim: int, dtype: torch.dtype) -> Tile:
    """Returns the tile that was fastest, or nearly so, in every batch tried on an H200."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return Tile(num_keys=64 if row_bytes <= 256 else 32, num_warps=4, num_stages=3)


def choose_num_extra(rows: Rows, heads: tuple[int, int], num_sms: int, num_keys: int) -> int:
    """Returns how many parts to make beyond one for each row.

    Three programs fit on a multiprocessor, one and a half nearly take all of its share of the bandwidth. With E parts
    beyond one for each row, B rows alike become more than E parts and at most E + B: so many that the device is busy, and
    too few for a second wave that would leave most of it idle. Measured on an H200.

    Args:
        rows: Of which only numbers are read.
        heads: Query heads; key and value heads.
        num_sms: Multiprocessors of the device.
        num_keys: Keys of a block.
    """
    num_heads, num_kv_heads = heads
    num_programs = num_kv_heads * -(-rows.max_q_len * (num_heads // num_kv_heads) // MAX_QUERIES)
    num_more_blocks = rows.kv_lens.shape[0] * (-(-rows.max_kv_len // num_keys) - 1)
    return max(1, min(3 * num_sms // (2 * num_programs), num_more_blocks))


def schedule(
    rows: Rows, num_extra: int, tile: Tile, *, window: int | None = None, hides_first: bool = False
) -> Schedule:
    """Splits rows, in one fill and one launch for all layers of one window.

    Args:
        rows: Not kept.
        num_extra: Most parts beyond one for each row, at least 1; see ``choose_num_extra``.
        tile: How keys are taken.
        window: A token at position p sees positions above ``p - window``; None is all.
        hides_first: Nobody sees position 0.
    """
    assert num_extra >= 1, f"{num_extra} more parts"
    num_rows = rows.kv_lens.shape[0]
    made = torch.zeros((num_rows + 2 * num_extra, _FIELDS.value), dtype=torch.int32, device=rows.kv_lens.device)
    parts, split = made[:-num_extra], made[-num_extra:]
    _schedule[(num_rows,)](
        rows.qo_indptr, rows.kv_lens, parts, split, num_rows, num_extra, window, tile.num_keys, hides_first
    )
    return Schedule(parts, split, num_extra, window, hides_first, tile)


@triton.jit(do_not_specialize=["num_rows", "num_extra", "window"])  # type: ignore[untyped-decorator]
def _schedule(  # type: ignore[no-untyped-def]
    qo_indptr,
    kv_lens,
    parts,
    split,
    num_rows,
    num_extra,
    window,
    KEYS: tl.constexpr,  # noqa: N803
    HIDES_FIRST: tl.constexpr,  # noqa: N803
):
    """One program: one row. A part has at most a share of the blocks of all rows, not counting one for each row.

    So the parts beyond one for each row are at most ``num_extra``, and so are the rows that have them.
    """
    row = tl.program_id(0)
    num_more = tl.zeros([_BLOCK], tl.int32)
    for start in range(0, num_rows, _BLOCK):
        _, others_blocks, _ = _seen_blocks(
            qo_indptr, kv_lens, start + tl.arange(0, _BLOCK), num_rows, window, KEYS, HIDES_FIRST
        )
        num_more += others_blocks - 1
    share = tl.maximum(tl.cdiv(tl.sum(num_more), num_extra), 1)
    first_block, num_blocks, kv_len = _seen_blocks(qo_indptr, kv_lens, row, num_rows, window, KEYS, HIDES_FIRST)
    rank, place = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32)
    for start in range(0, num_rows, _BLOCK):
        other = start + tl.arange(0, _BLOCK)
        _, others_blocks, _ = _seen_blocks(qo_indptr, kv_lens, other, num_rows, window, KEYS, HIDES_FIRST)
        is_before = (others_blocks > num_blocks) | ((others_blocks == num_blocks) & (other < row))
        rank += is_before.to(tl.int32)
        place += tl.where(is_before, (others_blocks - 1) // share + 1, 0)
    first_part, num_parts = tl.sum(place), (num_blocks - 1) // share + 1
    for start in range(0, num_parts, _BLOCK):
        part = start + tl.arange(0, _BLOCK)
        is_part = part < num_parts
        at = parts + (first_part + part) * _FIELDS
        block, end = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
        tl.store(at, row, is_part)
        tl.store(at + 1, (first_block + block) * KEYS, is_part)
        tl.store(at + 2, tl.minimum((first_block + end) * KEYS, kv_len), is_part)
        tl.store(at + 3, (num_parts > 1).to(tl.int32), is_part)
    if num_parts > 1:
        at = split + tl.sum(rank) * _FIELDS
        tl.store(at, row)
        tl.store(at + 1, first_part)
        tl.store(at + 2, num_parts)


@triton.jit  # type: ignore[untyped-decorator]
def _seen_blocks(  # type: ignore[no-untyped-def]
    qo_indptr,
    kv_lens,
    row,
    num_rows,
    window,
    KEYS: tl.constexpr,  # noqa: N803
    HIDES_FIRST: tl.constexpr,  # noqa: N803
):
    """The first block of keys that any token of a row sees; how many there are from it on, at least 1; the row's length.

    Behind the last row all have one block, which is never before that of a row.
    """
    is_row = row < num_rows
    kv_len = tl.load(kv_lens + row, is_row, other=1).to(tl.int32)
    q_len = tl.load(qo_indptr + row + 1, is_row, other=1) - tl.load(qo_indptr + row, is_row, other=0)
    first = first_seen(kv_len - q_len, window, HIDES_FIRST) // KEYS
    return first, tl.cdiv(kv_len, KEYS) - first, kv_len


@triton.jit  # type: ignore[untyped-decorator]
def first_seen(prefix, window, HIDES_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The first key that any token sees of a row with ``prefix`` tokens before its new ones."""
    first = tl.full((), 1 if HIDES_FIRST else 0, tl.int32)
    if window is not None:
        first = tl.maximum(first, prefix + 1 - window)
    return first
