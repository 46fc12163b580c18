"""A mixture of experts as Triton kernels: fixed shapes and four launches for any routing, two for a token alone.

Each pair of a token and one of its experts is a row of work. Rows are ordered by expert, so that a program reads
one expert's weights for a block of rows; an expert that computes every token comes last, with as many rows as tokens.
Only the device knows the number of blocks of each expert, so programs are launched for the worst case, and those
without a block end at once. There are no atomic additions: results are bitwise reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.kernels import reference
from hiserve.kernels.activate import activate
from hiserve.kernels.few_experts import MAX_TOKENS, mix_few
from hiserve.kernels.launch import await_previous, early_launch, start_next

_SCANS = ((1024, 4), (8192, 8))  # pairs at a time and warps: for few pairs, for many
_SUM_BLOCK = 512


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile of a program of a product by experts."""

    rows: int  # pairs of a token and an expert
    columns: int  # rows of the expert's weights
    depth: int  # elements of a row at a time
    warps: int  # of 32 threads
    stages: int  # loads in flight


# Of the product with gate and up, which has two sums for each column, and of the other; ascending rows of the first.
# The fastest of eleven on an H200, for experts of Qwen3-30B-A3B.
_TILES = (
    (
        _Tile(rows=16, columns=32, depth=128, warps=4, stages=4),
        _Tile(rows=16, columns=32, depth=128, warps=4, stages=4),
    ),
    (_Tile(rows=64, columns=64, depth=64, warps=4, stages=4), _Tile(rows=64, columns=64, depth=64, warps=4, stages=4)),
    (
        _Tile(rows=128, columns=128, depth=64, warps=8, stages=3),
        _Tile(rows=128, columns=128, depth=64, warps=8, stages=3),
    ),
)


def route(logits: Tensor, num_per_token: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Like ``reference.route``; of equally likely experts the first ones."""
    if logits.dtype == torch.float64:
        return reference.route(logits, num_per_token, is_normalized)
    assert logits.is_contiguous(), f"rows {logits.stride()} apart"
    num_tokens, num_experts = logits.shape
    shares = torch.empty((num_tokens, num_per_token), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_tokens, num_per_token), dtype=torch.int64, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        shares,
        chosen,
        NUM_EXPERTS=num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
        NUM_CHOSEN=num_per_token,
        BLOCK_CHOSEN=triton.next_power_of_2(num_per_token),
        IS_NORMALIZED=is_normalized,
        num_warps=1,
        **early_launch(logits.device),
    )
    return shares, chosen


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    logits,
    shares,
    chosen,
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    BLOCK_CHOSEN: tl.constexpr,  # noqa: N803
    IS_NORMALIZED: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program routes one token. For any logits, NaN included, experts are in range and differ."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    logit = tl.load(logits + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=-float("inf"))
    weight = tl.exp(logit.to(tl.float32) - tl.max(logit.to(tl.float32), 0))
    left = weight / tl.sum(weight, 0)
    left = tl.where(left == left, left, 0.0)  # NaN compares with nothing
    left = tl.where(expert < NUM_EXPERTS, left, -2.0)
    place = tl.arange(0, BLOCK_CHOSEN)
    share = tl.zeros([BLOCK_CHOSEN], tl.float32)
    number = tl.zeros([BLOCK_CHOSEN], tl.int32)
    for turn in range(NUM_CHOSEN):
        best = tl.argmax(left, 0)
        share = tl.where(place == turn, tl.max(left, 0), share)
        number = tl.where(place == turn, best, number)
        left = tl.where(expert == best, -1.0, left)
    if IS_NORMALIZED:
        share = share / tl.sum(share, 0)
    target = token * NUM_CHOSEN + place
    tl.store(shares + target, share, mask=place < NUM_CHOSEN)
    tl.store(chosen + target, number.to(tl.int64), mask=place < NUM_CHOSEN)


def mix_experts(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = SILU,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Like ``reference.mix_experts``, but only its own experts compute a token. float64 uses the reference."""
    if x.dtype == torch.float64:
        return reference.mix_experts(x, shares, chosen, gate_up, down, gate_up_bias, down_bias, activation, shared)
    weights = (x, gate_up, down, *(shared or ()))
    assert all(each.is_contiguous() for each in weights), [each.stride() for each in weights]
    assert all(bias is None or bias.is_contiguous() for bias in (gate_up_bias, down_bias))
    assert shared is None or (gate_up_bias is None and shared[1].shape == down.shape[1:]), "another shape"
    if 1 <= x.shape[0] <= MAX_TOKENS:
        return mix_few(x, shares, chosen, gate_up, down, (gate_up_bias, down_bias), shared, activation)
    num_experts, num_chosen, num_all = gate_up.shape[0], chosen.numel(), gate_up.shape[0] + (shared is not None)
    num_pairs = num_chosen + (0 if shared is None else x.shape[0])
    order, ends = _group(chosen, num_experts, num_pairs)
    activated, made = (x.new_empty((num_pairs, width)) for width in (down.shape[2], x.shape[1]))
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    products = (
        (x, gate_up, shared_gate_up, gate_up_bias, activated, activation),
        (activated, down, shared_down, down_bias, made, None),
    )
    tiles = _tiles_for(num_chosen, num_experts)
    for (source, weight, also, bias, out, gate), tile in zip(products, tiles, strict=True):
        # Every block has a pair, and only an expert's last block may be partly filled.
        max_blocks = min(num_pairs, num_pairs // tile.rows + num_all)
        _product_kernel[(max_blocks * triton.cdiv(out.shape[1], tile.columns),)](
            source,
            weight,
            also,
            bias,
            order,
            ends,
            out,
            num_all,
            num_chosen,
            out.shape[1],
            source.shape[1],
            chosen.shape[1],
            EXPERTS=triton.next_power_of_2(num_all),
            ACTIVATION=gate,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            IS_EVEN=source.shape[1] % tile.depth == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return _sum(made, shares, has_shared=shared is not None)


def _sum(made: Tensor, shares: Tensor, *, has_shared: bool) -> Tensor:
    """Sums the pairs of each token; those of a shared expert, one for each token behind all others, count whole."""
    (num_tokens, num_chosen), size = shares.shape, made.shape[1]
    out = made.new_empty((num_tokens, size))
    _sum_kernel[(num_tokens * triton.cdiv(size, _SUM_BLOCK),)](
        made,
        shares,
        out,
        num_tokens * num_chosen,
        SIZE=size,
        NUM_CHOSEN=num_chosen,
        HAS_SHARED=has_shared,
        BLOCK=_SUM_BLOCK,
        num_warps=1,
        **early_launch(made.device),
    )
    return out


def _tiles_for(num_pairs: int, num_experts: int) -> tuple[_Tile, _Tile]:
    """Returns the tallest tiles of which an expert's share of the pairs fills half, or else the lowest."""
    filled = [tiles for tiles in _TILES if 2 * num_pairs >= tiles[0].rows * num_experts]
    return filled[-1] if filled else _TILES[0]


def _group(chosen: Tensor, num_experts: int, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Orders pairs by expert, and those of one expert by token.

    Pair p of ``chosen``, int64 ``[T, k]``, is token ``p // k``. Pairs from ``T * k`` on, to ``num_pairs``, are those of
    one more expert.

    Returns:
        int32 ``[num_pairs]``, the pairs in order; int32, the end of each expert's pairs.
    """
    num_all = num_experts + (num_pairs > chosen.numel())
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num_all, dtype=torch.int32, device=chosen.device)
    block, num_warps = _SCANS[num_pairs > 4096]
    _group_kernel[(num_all,)](
        chosen,
        order,
        ends,
        chosen.numel(),
        num_pairs,
        num_experts,
        BLOCK=block,
        num_warps=num_warps,
        **early_launch(chosen.device),
    )
    return order, ends


@triton.jit(do_not_specialize=["num_chosen", "num_pairs", "num_experts"])  # type: ignore[untyped-decorator]
def _group_kernel(  # type: ignore[no-untyped-def]
    chosen,
    order,
    ends,
    num_chosen,
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program finds the pairs of one expert."""
    expert = tl.program_id(0)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    end = 0
    for first in range(0, num_chosen, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        theirs = tl.load(chosen + pair, mask=pair < num_chosen, other=num_experts)
        end += tl.sum((theirs < expert).to(tl.int32), 0)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        theirs = tl.load(chosen + pair, mask=pair < num_chosen, other=num_experts)
        is_mine = (theirs == expert) & (pair < num_pairs)
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(order + end + rank - 1, pair, mask=is_mine)
        end += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(ends + expert, end)


@triton.jit(do_not_specialize=["num_per_token", "num_experts", "num_chosen"])  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    source,
    weight,
    shared,
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
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_EVEN: tl.constexpr,  # noqa: N803
):
    """Each program multiplies a block of an expert's rows with a block of its weights.

    With an activation rows are those of the pairs' tokens, weights are those of gate and up, and results are in the
    order of experts. Without, rows are in the order of experts and results in the order of pairs. The weights of the
    last expert are ``shared``, if given; its pairs, from ``num_chosen`` on, are as many as tokens.

    What lies behind the last row or column is read in place of nothing and stored nowhere, so that loads have no mask;
    of a row's elements, where blocks of them do not fill it, those behind its end are masked.
    """
    IS_GATED: tl.constexpr = ACTIVATION is not None  # noqa: N806
    block = tl.program_id(0) // tl.cdiv(num_columns, COLUMNS)
    expert, start, end, num_blocks = _find_block(ends, num_experts, block, EXPERTS, ROWS)
    if block >= num_blocks:
        return
    row = start + tl.arange(0, ROWS)
    is_row = row < end
    pair = tl.load(order + tl.minimum(row, end - 1))
    column = tl.program_id(0) % tl.cdiv(num_columns, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    element = tl.arange(0, DEPTH)
    read = pair // num_per_token if IS_GATED else tl.minimum(row, end - 1)
    if shared is not None and IS_GATED:
        read = tl.where(pair < num_chosen, read, pair - num_chosen)
    rows = source + read.to(tl.int64)[:, None] * depth + element[None, :]
    matrix_rows = 2 * num_columns if IS_GATED else num_columns
    matrix = weight + expert.to(tl.int64) * matrix_rows * depth
    if shared is not None:
        matrix = tl.where(expert < num_experts - 1, matrix, shared)
    columns = matrix + (column % num_columns).to(tl.int64)[None, :] * depth + element[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = element < depth - first
        values = _part(rows + first, is_element[None, :], IS_EVEN)
        total = tl.dot(values, _part(columns + first, is_element[:, None], IS_EVEN), total, input_precision="ieee")
        if IS_GATED:
            up = _part(columns + num_columns.to(tl.int64) * depth + first, is_element[:, None], IS_EVEN)
            total_up = tl.dot(values, up, total_up, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        biases = bias + expert.to(tl.int64) * matrix_rows + column
        total += _row(biases, is_column)
        total_up += _row(biases + num_columns, is_column & IS_GATED)
    if IS_GATED:
        total = activate(total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    target = out + (row if IS_GATED else pair).to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _find_block(ends, num_experts, block, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
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
def _part(values, is_element, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if IS_EVEN:
        part = tl.load(values)
    else:
        part = tl.load(values, mask=is_element, other=0.0)
    return part


@triton.jit
def _row(values, mask):  # type: ignore[no-untyped-def]
    return tl.load(values, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["first_shared"])  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    made,
    shares,
    out,
    first_shared,
    SIZE: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    HAS_SHARED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program sums a block of one token, its likeliest expert first, and last the one that computes all."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    for turn in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + turn
        value = tl.load(made + pair * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += value * tl.load(shares + pair)
    if HAS_SHARED:
        total += tl.load(made + (first_shared + token) * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
