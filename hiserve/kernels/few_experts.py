"""A mixture of experts for a token alone: each program reads rows of the weights of its own experts, without an order.

Pairs of a token and an expert share no weights here, so that nothing is gained by ordering them. Two launches, not four.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.launch import await_previous, early_launch, start_next

MAX_TOKENS = 1
"""Most tokens for which this is faster than products by experts."""

_ELEMENTS_PER_WARP = 256


class _Block(NamedTuple):
    """What a program reads at once of a matrix."""

    columns: int  # of the result
    depth: int  # elements of each, or fewer


# The fastest of seven and of eight on an H200, for experts of GLM-4.7-Flash and of gpt-oss-20b: 20 and 13 us, 37 and 20 us.
_GATE, _DOWN = _Block(2, 1024), _Block(1, 512)


def mix_few(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    shared: tuple[Tensor, Tensor] | None,
    activation: Activation,
) -> Tensor:
    """Like ``experts.mix_experts``; ``biases`` are those of ``gate_up`` and of ``down``."""
    (num_tokens, hidden), num_chosen, inner = x.shape, chosen.shape[1], down.shape[2]
    num_turns = num_chosen + (shared is not None)
    activated, out = x.new_empty((num_tokens, num_turns, inner)), torch.empty_like(x)
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    _gate_kernel[(triton.cdiv(inner, _GATE.columns), num_turns, num_tokens)](
        x, chosen, gate_up, shared_gate_up, biases[0], activated, inner, hidden,
        NUM_CHOSEN=num_chosen, ACTIVATION=activation, **_sizes(_GATE, hidden), **early_launch(x.device),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, _DOWN.columns), num_tokens)](
        activated, shares, chosen, down, shared_down, biases[1], out, hidden, inner,
        NUM_CHOSEN=num_chosen, **_sizes(_DOWN, inner), **early_launch(x.device),
    )  # fmt: skip
    return out


def _sizes(block: _Block, depth: int) -> dict[str, int]:
    depth = min(block.depth, triton.next_power_of_2(depth))
    return {"COLUMNS": block.columns, "DEPTH": depth, "num_warps": max(1, depth // _ELEMENTS_PER_WARP)}


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    x, chosen, gate_up, shared, bias, out, num_columns, depth,
    NUM_CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes some activated columns of one pair; the pair after a token's own is that of ``shared``."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    turn, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    expert = tl.load(chosen + token * NUM_CHOSEN + turn, mask=turn < NUM_CHOSEN, other=0)
    matrix = gate_up + expert * 2 * num_columns * depth
    if shared is not None:
        matrix = tl.where(turn < NUM_CHOSEN, matrix, shared)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    source, up_rows = x + token * depth, num_columns.to(tl.int64) * depth
    total = _products(source, matrix, column, is_column, depth, COLUMNS, DEPTH)
    total_up = _products(source, matrix + up_rows, column, is_column, depth, COLUMNS, DEPTH)
    if bias is not None:
        biases = bias + expert * 2 * num_columns + column
        total += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)
        total_up += tl.load(biases + num_columns, mask=is_column, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    made = activate(total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    target = out + (token * tl.num_programs(1) + turn) * num_columns + column
    tl.store(target, made.to(dtype), mask=is_column)


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    activated, shares, chosen, down, shared, bias, out, num_columns, depth,
    NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program sums some columns of one token over its experts, the likeliest first and ``shared`` last."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    num_turns: tl.constexpr = NUM_CHOSEN + (shared is not None)
    source = activated + token * num_turns * depth
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([COLUMNS], tl.float32)
    for turn in range(NUM_CHOSEN):
        expert = tl.load(chosen + token * NUM_CHOSEN + turn)
        matrix = down + expert * num_columns * depth
        made = _products(source + turn * depth, matrix, column, is_column, depth, COLUMNS, DEPTH)
        if bias is not None:
            made += tl.load(bias + expert * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
        total += made.to(dtype).to(tl.float32) * tl.load(shares + token * NUM_CHOSEN + turn)
    if shared is not None:
        last = source + NUM_CHOSEN * depth
        total += _products(last, shared, column, is_column, depth, COLUMNS, DEPTH).to(dtype).to(tl.float32)
    tl.store(out + token * num_columns + column, total.to(dtype), mask=is_column)


@triton.jit
def _products(source, matrix, column, is_column, depth, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the products of a row and some rows of a matrix, float32 ``[COLUMNS]``."""
    element = tl.arange(0, DEPTH)
    rows = matrix + column.to(tl.int64)[:, None] * depth + element[None, :]
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = element < depth - first
        values = tl.load(source + first + element, mask=is_element, other=0.0).to(tl.float32)
        weights = tl.load(rows + first, mask=is_column[:, None] & is_element[None, :], other=0.0)
        totals += weights.to(tl.float32) * values[None, :]
    return tl.sum(totals, 1)
