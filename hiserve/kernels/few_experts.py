"""A mixture of experts for a token alone: each program reads rows of the weights of its own experts, without an order.

Pairs of a token and an expert share no weights here, so that nothing is gained by ordering them. Two launches, not four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.skinny_linear import columns_of, results_of

MAX_TOKENS = 1
"""Most tokens for which this is faster than products by experts."""

# Of the product with gate and up: columns of a program, half of them ups, and elements of each at once. Of the other: elements of one
# column of each expert at once. The fastest of six and of six on an H200, or within 4 %, for experts of Qwen3.5-35B-A3B, GLM-4.7-Flash and
# gpt-oss-20b.
_GATE_COLUMNS, _GATE_DEPTH, _DOWN_DEPTH = 4, 1024, 512
_GATE_ELEMENTS_PER_WARP, _DOWN_ELEMENTS_PER_WARP = 2048, 4096


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
    depth = min(_GATE_DEPTH, triton.next_power_of_2(hidden))
    _gate_kernel[(triton.cdiv(inner, _GATE_COLUMNS // 2), num_turns, num_tokens)](
        x, chosen, gate_up, shared_gate_up, biases[0], activated, inner, hidden,
        NUM_CHOSEN=num_chosen, ACTIVATION=activation, COLUMNS=_GATE_COLUMNS, DEPTH=depth,
        num_warps=max(1, _GATE_COLUMNS * depth // _GATE_ELEMENTS_PER_WARP), **early_launch(x.device),
    )  # fmt: skip
    depth, turns = min(_DOWN_DEPTH, triton.next_power_of_2(inner)), triton.next_power_of_2(num_turns)
    _down_kernel[(hidden, num_tokens)](
        activated, shares, chosen, down, shared_down, biases[1], out, hidden, inner,
        NUM_CHOSEN=num_chosen, NUM_SHARES=shares.shape[1], NUM_TURNS=num_turns, TURNS=turns, DEPTH=depth,
        num_warps=max(1, turns * depth // _DOWN_ELEMENTS_PER_WARP), **early_launch(x.device),
    )  # fmt: skip
    return out


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
    column, place = columns_of(num_columns, COLUMNS, ACTIVATION)
    is_column, element = column < num_columns, tl.arange(0, DEPTH)
    rows = matrix + place.to(tl.int64)[:, None] * depth + element[None, :]
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = element < depth - first
        values = tl.load(x + token * depth + first + element, mask=is_element, other=0.0).to(tl.float32)
        weights = tl.load(rows + first, mask=is_column[:, None] & is_element[None, :], other=0.0)
        totals += weights.to(tl.float32) * values[None, :]
    total = tl.sum(totals, 1)
    if bias is not None:
        total += tl.load(bias + expert * 2 * num_columns + place, mask=is_column, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    column, made = results_of(column, total[:, None], dtype, COLUMNS, ACTIVATION)
    target = out + (token * tl.num_programs(1) + turn) * num_columns + column[:, None]
    tl.store(target, made.to(dtype), mask=(column < num_columns)[:, None])


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    activated, shares, chosen, down, shared, bias, out, num_columns, depth,
    NUM_CHOSEN: tl.constexpr, NUM_SHARES: tl.constexpr, NUM_TURNS: tl.constexpr, TURNS: tl.constexpr,
    DEPTH: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program sums one column of one token over its experts, whose weights it asks for at once; ``shared`` is the last."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    column, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    turn, element = tl.arange(0, TURNS), tl.arange(0, DEPTH)
    is_chosen, is_turn = turn < NUM_CHOSEN, turn < NUM_TURNS
    expert = tl.load(chosen + token * NUM_CHOSEN + turn, mask=is_chosen, other=0)
    share = tl.load(shares + token * NUM_SHARES + turn, mask=turn < NUM_SHARES, other=1.0)
    rows = down + (expert * num_columns + column) * depth
    if shared is not None:
        rows = tl.where(is_chosen, rows, shared + column.to(tl.int64) * depth)
    source = activated + (token * NUM_TURNS + turn) * depth
    made = tl.zeros([TURNS], tl.float32)
    for first in range(0, depth, DEPTH):
        is_part = is_turn[:, None] & (element < depth - first)[None, :]
        values = tl.load(source[:, None] + first + element[None, :], mask=is_part, other=0.0).to(tl.float32)
        weights = tl.load(rows[:, None] + first + element[None, :], mask=is_part, other=0.0).to(tl.float32)
        made += tl.sum(weights * values, 1)
    if bias is not None:
        made += tl.load(bias + expert * num_columns + column, mask=is_chosen, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.sum(tl.where(is_turn, made.to(dtype).to(tl.float32) * share, 0.0), 0)
    tl.store(out + token * num_columns + column, total.to(dtype))
