"""Dense projections of few tokens: the weights are read once, at the speed of memory."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next

_MAX_DEPTH = 2048
_MAX_COLUMNS = 4
_ELEMENTS = 4096  # of the weight, that a program holds at once
_ELEMENTS_PER_WARP = 256

_TILE_ROWS = 16
_TILE_COLUMNS = 32
_TILE_DEPTH = 128
_TILE_STAGES = 6
_TILED = ((3072, 4096), (65536, 2**31))  # numbers of columns: above, up to


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As ``reference.linear``, for weights that were in place before the step.

    One row of a 16-bit type has a kernel of its own; 2 to 16 rows have one where its programs fill an H200 once, or many
    times. In graphs of whole layers there, one row took 0.98 (Llama-8B) and 0.60 (Qwen3-0.6B) of cuBLAS' time.
    """
    num_rows, num_columns = x.shape[0], weight.shape[0]
    if x.dtype.itemsize == 2 and num_rows == 1:
        return _row_linear(x, weight, bias)
    if x.dtype.itemsize == 2 and 1 < num_rows <= _TILE_ROWS and _is_tiled(num_columns):
        return _tiled_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_tiled(num_columns: int) -> bool:
    return any(above < num_columns <= limit for above, limit in _TILED)


def _row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    num_columns, depth = weight.shape
    out = x.new_empty((1, num_columns))
    block = min(_MAX_DEPTH, triton.next_power_of_2(depth))
    columns = min(_MAX_COLUMNS, _ELEMENTS // block)
    _row_kernel[(triton.cdiv(num_columns, columns),)](
        x,
        weight,
        bias,
        out,
        num_columns,
        depth,
        COLUMNS=columns,
        DEPTH=block,
        num_warps=max(1, block // _ELEMENTS_PER_WARP),
        **early_launch(x.device),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_columns,
    depth,
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program reads some rows of the weight, which are columns of the result, from one end to the other.

    It is a block ahead with the weight, so that the first is on its way before the kernel that makes ``x`` has ended.
    """
    start_next(IS_EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, DEPTH)
    is_column = column < num_columns
    rows = weight + column.to(tl.int64)[:, None] * depth + element[None, :]
    weights = tl.load(rows, mask=is_column[:, None] & (element < depth)[None, :], other=0.0)
    await_previous(IS_EARLY)
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, depth, DEPTH):
        values = tl.load(x + first + element, mask=element < depth - first, other=0.0).to(tl.float32)
        is_ahead = element < depth - first - DEPTH
        ahead = tl.load(rows + first + DEPTH, mask=is_column[:, None] & is_ahead[None, :], other=0.0)
        totals += weights.to(tl.float32) * values[None, :]
        weights = ahead
    total = tl.sum(totals, 1)
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=is_column)


def _tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launched as ever: where programs begin beside those of the kernel before, some multiprocessors get two, others none."""
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    out = x.new_empty((num_rows, num_columns))
    _tile_kernel[(triton.cdiv(num_columns, _TILE_COLUMNS),)](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_columns,
        depth,
        ROWS=_TILE_ROWS,
        COLUMNS=_TILE_COLUMNS,
        DEPTH=_TILE_DEPTH,
        num_warps=4,
        num_stages=_TILE_STAGES,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    depth,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    """Each program multiplies all rows with some rows of the weight."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, DEPTH)
    is_row, is_column = row < num_rows, column < num_columns
    rows = x + row[:, None] * depth + element[None, :]
    columns = weight + column.to(tl.int64)[None, :] * depth + element[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = element < depth - first
        values = tl.load(rows + first, mask=is_row[:, None] & is_element[None, :], other=0.0)
        weights = tl.load(columns + first, mask=is_column[None, :] & is_element[:, None], other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
