"""Products of rows with the weights of their experts, in Triton: a program reads one expert's weights for a block of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.launch import await_previous, early_launch


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a program of a product by experts."""

    rows: int  # pairs of a token and an expert
    columns: int  # rows of the expert's weights
    depth: int  # elements of a row at a time, of 2 bytes; half as many of 4
    warps: int  # of 32 threads
    stages: int  # loads in flight


# Ascending rows.
Tiles = tuple[tuple[Tile, Tile], ...]

# Of the product with gate and up, which has two sums for each column, and of the other; ascending rows of the first.
# The fastest on an H200: of eleven for experts of Qwen3-30B-A3B, the tallest of nine for those of DeepSeek-V4 and Qwen3.5;
# for gpt-oss three stages of the wide one were 2 % faster.
_LOW = Tile(rows=16, columns=32, depth=128, warps=4, stages=4)
_MIDDLE = Tile(rows=64, columns=64, depth=64, warps=4, stages=4)
_TALL = Tile(rows=128, columns=128, depth=64, warps=8, stages=4)
TILES: Tiles = ((_LOW, _LOW), (_MIDDLE, _MIDDLE), (_TALL, replace(_TALL, columns=256)))
# Those whose matrix instructions add alike: of 64 rows, 16 elements after 16 elements.
EXACT_TILES: Tiles = TILES[1:]


def tiles_for(tiles: Tiles, num_pairs: int, num_experts: int) -> tuple[Tile, Tile]:
    """Returns the tallest tiles of which an expert's share of the pairs fills half, or else the lowest."""
    filled = [each for each in tiles if 2 * num_pairs >= each[0].rows * num_experts]
    return filled[-1] if filled else tiles[0]


def multiply(
    source: Tensor,
    weight: Tensor,
    shared: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    out: Tensor,
    chosen: Tensor,
    activation: Activation | None,
    tile: Tile,
) -> None:
    """Multiplies each pair's row with the weights of its expert.

    Args:
        source: ``[T, d]``, the tokens, with an activation; without, ``[pairs, d]`` in the order of experts.
        weight: ``[E, 2 n, d]``, of gate and up, with an activation; without, ``[E, n, d]``.
        shared: The weights of one more expert, of which every token is a pair behind all others; None if there is none.
        bias: ``[E, 2 n]`` or ``[E, n]``.
        order: int32 ``[pairs]``, ordered by expert.
        ends: int32, the end of each expert's pairs.
        out: ``[pairs, n]``. Receives the results, in the order of experts with an activation, without in that of pairs.
        chosen: int64 ``[T, k]``.
        activation: Of gate and up.
        tile: Of each program.
    """
    num_pairs, num_all, depth = order.shape[0], ends.shape[0], 2 * tile.depth // source.element_size()
    # Every block has a pair, and only an expert's last block may be partly filled.
    max_blocks = min(num_pairs, num_pairs // tile.rows + num_all)
    _product_kernel[(max_blocks * triton.cdiv(out.shape[1], tile.columns),)](
        source,
        weight,
        shared,
        bias,
        order,
        ends,
        out,
        num_all,
        chosen.numel(),
        out.shape[1],
        source.shape[1],
        chosen.shape[1],
        EXPERTS=triton.next_power_of_2(num_all),
        ACTIVATION=activation,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=depth,
        IS_EVEN=source.shape[1] % depth == 0,
        HALVES=tile.rows > 64,  # products of fewer rows than 64 take as long as those of 64
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early_launch(source.device),
    )


@triton.jit(do_not_specialize=["num_per_token", "num_experts", "num_chosen"])
def _product_kernel(  # type: ignore[no-untyped-def]
    source, weight, shared, bias, order, ends, out, num_experts, num_chosen, num_columns, depth, num_per_token,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, IS_EVEN: tl.constexpr, HALVES: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program multiplies a block of an expert's rows with a block of its weights.

    With an activation rows are those of the pairs' tokens, weights are those of gate and up, and results are in the
    order of experts. Without, rows are in the order of experts and results in the order of pairs. The weights of the
    last expert are ``shared``, if given; its pairs, from ``num_chosen`` on, are as many as tokens.
    """
    await_previous(IS_EARLY)
    block = tl.program_id(0) // tl.cdiv(num_columns, COLUMNS)
    expert, start, end, num_blocks = find_block(ends, num_experts, block, EXPERTS, ROWS)
    if block >= num_blocks:
        return
    first_column = tl.program_id(0) % tl.cdiv(num_columns, COLUMNS) * COLUMNS
    if HALVES and end - start <= ROWS // 2:  # of an expert's last block often less than half is filled
        _multiply(
            source, weight, shared, bias, order, out, expert, start, end, first_column, num_experts, num_chosen,
            num_columns, depth, num_per_token, ACTIVATION, ROWS // 2, COLUMNS, DEPTH, IS_EVEN,
        )  # fmt: skip
    else:
        _multiply(
            source, weight, shared, bias, order, out, expert, start, end, first_column, num_experts, num_chosen,
            num_columns, depth, num_per_token, ACTIVATION, ROWS, COLUMNS, DEPTH, IS_EVEN,
        )  # fmt: skip


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    source, weight, shared, bias, order, out, expert, start, end, first_column, num_experts, num_chosen, num_columns,
    depth, num_per_token,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """Multiplies an expert's rows from ``start`` on with some of its columns.

    What lies behind the last row or column is read in place of nothing and stored nowhere, so that loads have no mask;
    of a row's elements, where blocks of them do not fill it, those behind its end are masked.
    """
    IS_GATED: tl.constexpr = ACTIVATION is not None
    row = start + tl.arange(0, ROWS)
    is_row = row < end
    pair = tl.load(order + tl.minimum(row, end - 1))
    element = tl.arange(0, DEPTH)
    read = pair // num_per_token if IS_GATED else tl.minimum(row, end - 1)
    if shared is not None and IS_GATED:
        read = tl.where(pair < num_chosen, read, pair - num_chosen)
    rows = source + read.to(tl.int64)[:, None] * depth + element[None, :]
    matrix_rows = 2 * num_columns if IS_GATED else num_columns
    matrix = weight + expert.to(tl.int64) * matrix_rows * depth
    if shared is not None:
        matrix = tl.where(expert < num_experts - 1, matrix, shared)
    # Gates and their ups are columns of one product: it reads rows from shared memory once for both.
    LANES: tl.constexpr = 2 * COLUMNS if IS_GATED else COLUMNS
    lane = tl.arange(0, LANES)
    place = (first_column + lane % COLUMNS) % num_columns + lane // COLUMNS * num_columns
    columns = matrix + place.to(tl.int64)[None, :] * depth + element[:, None]
    total = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = element < depth - first
        values = _part(rows + first, is_element[None, :], IS_EVEN)
        total = tl.dot(values, _part(columns + first, is_element[:, None], IS_EVEN), total, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        biases = bias + expert.to(tl.int64) * matrix_rows + place
        total += tl.load(biases).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(total.to(dtype).to(tl.float32).reshape(ROWS, 2, COLUMNS).permute(0, 2, 1))
        total = activate(gate, up, dtype, ACTIVATION)
    column = first_column + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    target = out + (row if IS_GATED else pair).to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def find_block(ends, num_experts, block, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the expert of a block of rows, its first row, the end of the expert's rows, and the number of all blocks."""
    expert_of = tl.arange(0, EXPERTS)
    is_expert = expert_of < num_experts
    end_of = tl.load(ends + expert_of, mask=is_expert, other=0)
    start_of = tl.load(ends + expert_of - 1, mask=is_expert & (expert_of > 0), other=0)
    blocks_of = tl.where(is_expert, (end_of - start_of + ROWS - 1) // ROWS, 0)
    last_of = tl.cumsum(blocks_of, 0)
    is_before = last_of <= block
    expert = tl.sum(is_before.to(tl.int32), 0)
    is_mine = expert_of == expert
    nth = block - tl.sum(tl.where(is_before, blocks_of, 0), 0)
    start = tl.sum(tl.where(is_mine, start_of, 0), 0) + nth * ROWS
    return expert, start, tl.sum(tl.where(is_mine, end_of, 0), 0), tl.max(last_of, 0)


@triton.jit
def _part(values, is_element, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(values) if IS_EVEN else tl.load(values, mask=is_element, other=0.0)
