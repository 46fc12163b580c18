"""Products of rows with packed weights of their experts, in Triton: numbers are upcast in registers, in the tile.

The weight is the left operand, which matrix instructions take from registers; rows, on the right, are read where they were loaded
to. ``kernels.expert_products`` has the products with plain weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.expert_products import Tile, find_block
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.packed_triton import BLOCK, GROUP, GROUPS, WORDS, unpack_bytes, unpack_group
from hiserve.kernels.packed_weights import Weights, parts_of

# Tiles of the product with gate and up, whose columns have two rows of the weight each, and of the other; ascending rows. The lowest ones
# are the fastest of six on an H200 for gpt-oss (32 columns of gate and up were 5 to 7 % faster for DeepSeek-V4), the others were chosen by
# registers alone. ``depth`` is not theirs to choose.
_LOW = Tile(rows=16, columns=64, depth=BLOCK.value, warps=4, stages=4)
_MIDDLE = Tile(rows=64, columns=64, depth=BLOCK.value, warps=4, stages=3)
_TALL = Tile(rows=128, columns=128, depth=BLOCK.value, warps=8, stages=3)
PACKED_TILES = ((_LOW, _LOW), (_MIDDLE, _MIDDLE), (_TALL, _TALL))
# Of a token alone: of seven each on an H200, for experts of DeepSeek-V4; those of 64 columns and more of gate and up took 14 % longer.
ALONE_TILES = (
    Tile(rows=8, columns=32, depth=BLOCK.value, warps=4, stages=3),
    Tile(rows=8, columns=64, depth=BLOCK.value, warps=4, stages=4),
)


def multiply_packed(
    source: Tensor,
    weight: Weights,
    shared: Weights | None,
    bias: Tensor | None,
    order: Tensor | None,
    ends: Tensor | None,
    out: Tensor,
    chosen: Tensor,
    activation: Activation | None,
    tile: Tile,
) -> None:
    """Like ``expert_products.multiply``; ``shared`` may be packed otherwise, or not at all. Of types of 16 bits.

    Pairs of a token alone share no weights: they have no order, and each is a block.
    """
    num_pairs, num_all = out.shape[0], weight.shape[0] + (shared is not None)
    assert order is not None or chosen.shape[0] == 1, f"{chosen.shape[0]} tokens without an order"
    max_blocks = num_pairs if order is None else min(num_pairs, num_pairs // tile.rows + num_all)
    assert BLOCK.value % tile.columns == 0, f"{tile.columns} columns have several scales"
    codes, scales, kind = parts_of(weight)
    shared_codes, shared_scales, shared_kind = parts_of(shared)
    _packed_kernel[(max_blocks * triton.cdiv(out.shape[1], tile.columns),)](
        source, codes, scales, shared_codes, shared_scales, bias, order, ends, out, chosen, num_all, chosen.numel(),
        out.shape[1], source.shape[1], chosen.shape[1],
        EXPERTS=triton.next_power_of_2(num_all), ACTIVATION=activation, KIND=kind, SHARED_KIND=shared_kind,
        ROWS=tile.rows, COLUMNS=tile.columns, IS_EVEN=source.shape[1] % BLOCK.value == 0, num_warps=tile.warps,
        num_stages=tile.stages, **early_launch(source.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_per_token", "num_experts", "num_chosen"])
def _packed_kernel(  # type: ignore[no-untyped-def]
    source, codes, scales, shared_codes, shared_scales, bias, order, ends, out, chosen,
    num_experts, num_chosen, num_columns, depth, num_per_token,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr, SHARED_KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program multiplies a block of an expert's rows with a block of its weights; as ``expert_products``' kernel.

    What lies behind the last column is read in place of nothing and stored nowhere. Of gate and up eight rows each are next to each
    other in the product: a thread has both of a column.
    """
    IS_GATED: tl.constexpr = ACTIVATION is not None
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    await_previous(IS_EARLY)
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    block = tl.program_id(0) // num_tiles
    row = tl.arange(0, ROWS)
    if order is None:
        is_row = row < 1
        expert = tl.load(chosen + block, mask=block < num_chosen, other=num_experts - 1).to(tl.int32)
        pair = row * 0 + block
        row = pair
        read = pair * 0 if IS_GATED else pair
    else:
        expert, start, end, num_blocks = find_block(ends, num_experts, block, EXPERTS, ROWS)
        if block >= num_blocks:
            return
        row += start
        is_row = row < end
        pair = tl.load(order + tl.minimum(row, end - 1))
        read = pair // num_per_token if IS_GATED else tl.minimum(row, end - 1)
        if shared_codes is not None and IS_GATED:
            read = tl.where(pair < num_chosen, read, pair - num_chosen)
    rows = source + read.to(tl.int64) * depth
    first = tl.program_id(0) % num_tiles * COLUMNS
    part, column = _interleaved(tl.arange(0, NUM_PARTS * COLUMNS), first, num_columns, NUM_PARTS)
    is_shared = expert == num_experts - 1  # if there is one
    if shared_codes is not None:
        expert = tl.where(is_shared, 0, expert)  # the first of its own tensors
        if KIND == SHARED_KIND:
            codes = tl.where(is_shared, shared_codes, codes)
            scales = tl.where(is_shared, shared_scales, scales)
    if shared_codes is not None and KIND != SHARED_KIND and is_shared:
        total = packed_sums(
            rows, is_row, shared_codes, shared_scales, expert, part, column, num_columns, depth, NUM_PARTS, SHARED_KIND, IS_EVEN
        )  # fmt: skip
    else:
        total = packed_sums(
            rows, is_row, codes, scales, expert, part, column, num_columns, depth, NUM_PARTS, KIND, IS_EVEN
        )
    start_next(IS_EARLY)
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        biases = bias + (expert.to(tl.int64) * NUM_PARTS + part) * num_columns + column
        total += tl.load(biases).to(tl.float32)[:, None]
    if IS_GATED:
        both = total.to(dtype).to(tl.float32).reshape(COLUMNS // 8, 2, 8, ROWS).permute(0, 2, 3, 1)
        gate, up = tl.split(both)
        total = activate(gate, up, dtype, ACTIVATION).reshape(COLUMNS, ROWS)
    place = first + tl.arange(0, COLUMNS)
    target = out + (row if IS_GATED else pair).to(tl.int64)[:, None] * num_columns + place[None, :]
    tl.store(target, total.to(dtype).T, mask=is_row[:, None] & (place < num_columns)[None, :])


@triton.jit
def _interleaved(row, first, num_columns, NUM_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the part and the column of rows of a tile: eight of gate, then eight of up."""
    return row // 8 % NUM_PARTS, tl.minimum(first + row // (8 * NUM_PARTS) * 8 + row % 8, num_columns - 1)


@triton.jit
def packed_sums(  # type: ignore[no-untyped-def]
    rows, is_row, codes, scales, expert, part, column, num_columns, depth,
    NUM_PARTS: tl.constexpr, KIND: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """Returns the products of rows with some rows of a matrix, float32 ``[N, ROWS]``.

    Nothing is read of rows of a block of few that are none: that would be as much as its weights are.

    Args:
        rows: Pointers ``[ROWS]``.
        is_row: Which of these are rows.
        codes: Of ``PackedWeights``, or plain ones.
        scales: Likewise; None of plain ones.
        expert: Number of the matrix.
        part: Of each row of the matrix, 0 for gate and 1 for up, ``[N]``.
        column: Its place in this part.
        num_columns: Of each part.
        depth: Elements of a row.
        NUM_PARTS: Of a matrix.
        KIND: Of the numbers.
        IS_EVEN: Whether ``depth`` is of whole blocks.
    """
    ROWS: tl.constexpr = rows.shape[0]
    N: tl.constexpr = column.shape[0]
    total = tl.zeros([N, ROWS], tl.float32)
    dtype: tl.constexpr = rows.dtype.element_ty
    num_blocks = tl.cdiv(depth, BLOCK)
    matrix_row = (expert.to(tl.int64) * NUM_PARTS + part) * num_columns + column
    if KIND == "e2m1":
        words = codes + matrix_row[:, None] * (num_blocks * WORDS) + tl.arange(0, WORDS)[None, :]
        factors = scales + matrix_row * num_blocks
        for block in range(num_blocks):
            packed, factor = tl.load(words + block * WORDS), tl.load(factors + block)
            for group in tl.static_range(GROUPS):
                values = _values(rows, is_row, block * BLOCK + group * GROUP, depth, GROUP, IS_EVEN)
                total = tl.dot(unpack_group(packed, factor, group, dtype), values, total)
    else:
        # Plain ones have twice the bytes: all stages must fit into the shared memory.
        STEP: tl.constexpr = BLOCK if KIND == "e4m3" else BLOCK // 2
        element = tl.arange(0, STEP)
        numbers = codes + matrix_row[:, None] * depth + element[None, :]
        if KIND == "e4m3":  # whose columns have the same scales, of each part
            num_scales = tl.cdiv(num_columns, BLOCK) * num_blocks
            gates = scales + expert * NUM_PARTS * num_scales + tl.min(column, 0) // BLOCK * num_blocks
            ups = gates + (NUM_PARTS - 1) * num_scales
            next_gate, next_up = tl.load(gates), tl.load(ups)
        for first in range(0, depth, STEP):
            values = _values(rows, is_row, first, depth, STEP, IS_EVEN)
            is_element = (element < depth - first)[None, :]
            read = tl.load(numbers + first) if IS_EVEN else tl.load(numbers + first, mask=is_element, other=0)
            if KIND == "e4m3":
                factor = tl.where(part == 0, next_gate, next_up)
                following = tl.minimum(first // BLOCK + 1, num_blocks - 1)
                next_gate, next_up = tl.load(gates + following), tl.load(ups + following)
                # Of few rows sums are scaled, which are fewer than numbers; of many these would be too many registers.
                if ROWS <= 16:
                    total += tl.dot(unpack_bytes(read, None, dtype), values) * factor[:, None]
                else:
                    total = tl.dot(unpack_bytes(read, factor[:, None], dtype), values, total)
            else:
                total = tl.dot(read, values, total)
    return total


@triton.jit
def _values(rows, is_row, first, depth, COUNT: tl.constexpr, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns elements of rows, ``[COUNT, ROWS]``; zeros behind their end."""
    element = first + tl.arange(0, COUNT)
    is_there = is_row[None, :] if IS_EVEN else is_row[None, :] & (element < depth)[:, None]
    return tl.load(rows[None, :] + element[:, None], mask=is_there, other=0.0)
