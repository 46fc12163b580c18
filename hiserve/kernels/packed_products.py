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
from hiserve.kernels.packed_triton import BLOCK, GROUP, GROUPS, WORDS, unpack_bytes, unpack_group
from hiserve.kernels.packed_weights import PackedWeights, Weights, parts_of

# Tiles of the product with gate and up and of the other, ascending rows. Chosen by registers alone; ``depth`` is not theirs to choose.
_LOW = Tile(rows=16, columns=64, depth=BLOCK.value, warps=4, stages=4)
_MIDDLE = Tile(rows=64, columns=64, depth=BLOCK.value, warps=4, stages=3)
_TALL = Tile(rows=128, columns=128, depth=BLOCK.value, warps=8, stages=3)
PACKED_TILES = ((_LOW, _LOW), (_MIDDLE, _MIDDLE), (_TALL, _TALL))


def multiply_packed(
    source: Tensor,
    weight: PackedWeights,
    shared: Weights | None,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    out: Tensor,
    chosen: Tensor,
    activation: Activation | None,
    tile: Tile,
) -> None:
    """Like ``expert_products.multiply``; ``shared`` may be packed otherwise, or not at all. Of types of 16 bits."""
    num_pairs, num_all = order.shape[0], ends.shape[0]
    max_blocks = min(num_pairs, num_pairs // tile.rows + num_all)
    codes, scales, kind = parts_of(weight)
    shared_codes, shared_scales, shared_kind = parts_of(shared)
    assert BLOCK.value % tile.columns == 0, f"{tile.columns} columns have several scales"
    _packed_kernel[(max_blocks * triton.cdiv(out.shape[1], tile.columns),)](
        source,
        codes,
        scales,
        shared_codes,
        shared_scales,
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
        KIND=kind,
        SHARED_KIND=shared_kind,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        IS_EVEN=source.shape[1] % BLOCK.value == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["num_per_token", "num_experts", "num_chosen"])  # type: ignore[untyped-decorator]
def _packed_kernel(  # type: ignore[no-untyped-def]
    source,
    codes,
    scales,
    shared_codes,
    shared_scales,
    bias,
    order,
    ends,
    out,
    num_experts,
    num_chosen,
    num_columns,
    depth,
    num_per_token,
    EXPERTS: tl.constexpr,  # noqa: N803
    ACTIVATION: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    SHARED_KIND: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_EVEN: tl.constexpr,  # noqa: N803
):
    """Each program multiplies a block of an expert's rows with a block of its weights; as ``expert_products``' kernel.

    What lies behind the last column is read in place of nothing and stored nowhere.
    """
    IS_GATED: tl.constexpr = ACTIVATION is not None  # noqa: N806
    NUM_SUMS: tl.constexpr = 2 if IS_GATED else 1  # noqa: N806
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    expert, start, end, num_blocks = find_block(ends, num_experts, tl.program_id(0) // num_tiles, EXPERTS, ROWS)
    if tl.program_id(0) // num_tiles >= num_blocks:
        return
    column = tl.program_id(0) % num_tiles * COLUMNS + tl.arange(0, COLUMNS)
    row = start + tl.arange(0, ROWS)
    pair = tl.load(order + tl.minimum(row, end - 1))
    read = pair // num_per_token if IS_GATED else tl.minimum(row, end - 1)
    if shared_codes is not None and IS_GATED:
        read = tl.where(pair < num_chosen, read, pair - num_chosen)
    rows, is_row = source + read.to(tl.int64) * depth, row < end
    is_shared = expert == num_experts - 1  # if there is one
    if shared_codes is not None:
        expert = tl.where(is_shared, 0, expert)  # the first of its own tensors
        if KIND == SHARED_KIND:
            codes = tl.where(is_shared, shared_codes, codes)
            scales = tl.where(is_shared, shared_scales, scales)
    if shared_codes is not None and KIND != SHARED_KIND and is_shared:
        total, total_up = packed_sums(
            rows, is_row, shared_codes, shared_scales, expert, column, num_columns, depth, NUM_SUMS, SHARED_KIND, IS_EVEN
        )  # fmt: skip
    else:
        total, total_up = packed_sums(
            rows, is_row, codes, scales, expert, column, num_columns, depth, NUM_SUMS, KIND, IS_EVEN
        )
    dtype: tl.constexpr = out.dtype.element_ty
    is_column = column < num_columns
    if bias is not None:
        biases = bias + expert.to(tl.int64) * NUM_SUMS * num_columns + column
        total += _column(biases, is_column)
        total_up += _column(biases + num_columns, is_column & IS_GATED)
    if IS_GATED:
        total = activate(total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    target = out + (row if IS_GATED else pair).to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(dtype).T, mask=is_row[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def packed_sums(  # type: ignore[no-untyped-def]
    rows,
    is_row,
    codes,
    scales,
    expert,
    column,
    num_columns,
    depth,
    NUM_SUMS: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    IS_EVEN: tl.constexpr,  # noqa: N803
):
    """Returns the products of rows with the first matrix of an expert, and with the second one, float32 ``[COLUMNS, ROWS]``.

    Nothing is read of rows of a block of few that are none: that would be as much as its weights are.
    """
    ROWS: tl.constexpr = rows.shape[0]  # noqa: N806
    COLUMNS: tl.constexpr = column.shape[0]  # noqa: N806
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    total_up = tl.zeros([COLUMNS, ROWS], tl.float32)
    dtype: tl.constexpr = rows.dtype.element_ty
    num_blocks = tl.cdiv(depth, BLOCK)
    matrix_row = expert.to(tl.int64) * NUM_SUMS * num_columns + column % num_columns
    if KIND == "e2m1":
        words = codes + matrix_row[:, None] * (num_blocks * WORDS) + tl.arange(0, WORDS)[None, :]
        factors = scales + matrix_row * num_blocks
        words_up = words + num_columns.to(tl.int64) * num_blocks * WORDS
        factors_up = factors + num_columns * num_blocks
        for block in range(num_blocks):
            packed, factor = tl.load(words + block * WORDS), tl.load(factors + block)
            if NUM_SUMS == 2:
                packed_up, factor_up = tl.load(words_up + block * WORDS), tl.load(factors_up + block)
            for group in tl.static_range(GROUPS):
                values = _values(rows, is_row, block * BLOCK + group * GROUP, depth, GROUP, IS_EVEN)
                total = tl.dot(unpack_group(packed, factor, group, dtype), values, total)
                if NUM_SUMS == 2:
                    total_up = tl.dot(unpack_group(packed_up, factor_up, group, dtype), values, total_up)
    else:
        # Plain ones have twice the bytes: all stages must fit into the shared memory.
        STEP: tl.constexpr = BLOCK if KIND == "e4m3" else BLOCK // 2  # noqa: N806
        element = tl.arange(0, STEP)
        numbers = codes + matrix_row[:, None] * depth + element[None, :]
        numbers_up = numbers + num_columns.to(tl.int64) * depth
        num_scales = tl.cdiv(num_columns, BLOCK) * num_blocks
        # All columns of a program have the same scales.
        scale_row = tl.min(column, 0) // BLOCK
        for first in range(0, depth, STEP):
            values = _values(rows, is_row, first, depth, STEP, IS_EVEN)
            is_element = (element < depth - first)[None, :]
            factor = 1.0
            factor_up = 1.0
            if KIND == "e4m3":
                place = scales + expert * NUM_SUMS * num_scales + scale_row * num_blocks + first // BLOCK
                factor = tl.load(place)
                if NUM_SUMS == 2:
                    factor_up = tl.load(place + num_scales)
            total = tl.dot(_numbers(numbers + first, factor, is_element, dtype, KIND, IS_EVEN), values, total)
            if NUM_SUMS == 2:
                up = _numbers(numbers_up + first, factor_up, is_element, dtype, KIND, IS_EVEN)
                total_up = tl.dot(up, values, total_up)
    return total, total_up


@triton.jit
def _column(values, mask):  # type: ignore[no-untyped-def]
    return tl.load(values, mask=mask, other=0.0).to(tl.float32)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _values(rows, is_row, first, depth, COUNT: tl.constexpr, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns elements of rows, ``[COUNT, ROWS]``; zeros behind their end."""
    element = first + tl.arange(0, COUNT)
    is_there = is_row[None, :] if IS_EVEN else is_row[None, :] & (element < depth)[:, None]
    return tl.load(rows[None, :] + element[:, None], mask=is_there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(places, factor, is_element, DTYPE: tl.constexpr, KIND: tl.constexpr, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns elements of matrices in 8 bits or in a type of 16."""
    numbers = tl.load(places) if IS_EVEN else tl.load(places, mask=is_element, other=0)
    return unpack_bytes(numbers, factor, DTYPE) if KIND == "e4m3" else numbers
