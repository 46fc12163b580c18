"""Packed experts for a token alone: each program reads columns of its own experts, in two launches, as ``kernels.few_experts`` does.

Its products are those of matrix instructions, of which one column in eight is used: what bounds them is the upcast, which comes cheapest there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.packed_products import packed_sums
from hiserve.kernels.packed_triton import BLOCK
from hiserve.kernels.packed_weights import Weights, parts_of

ROWS = 8  # the fewest columns of an instruction
# Columns of a program, warps and loads in flight, of both launches: not measured.
_GATE = {"COLUMNS": 64, "num_warps": 4, "num_stages": 5}
_DOWN = {"COLUMNS": 32, "num_warps": 2, "num_stages": 5}


def mix_few_packed(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    biases: tuple[Tensor | None, Tensor | None],
    shared: tuple[Weights, Weights] | None,
    activation: Activation,
) -> Tensor:
    """Like ``few_experts.mix_few``."""
    (num_tokens, hidden), num_chosen, inner = x.shape, chosen.shape[1], down.shape[2]
    num_turns = num_chosen + (shared is not None)
    activated, out = x.new_empty((num_tokens, num_turns, inner)), torch.empty_like(x)
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    _gate_kernel[(triton.cdiv(inner, _GATE["COLUMNS"]), num_turns, num_tokens)](
        x,
        chosen,
        *_parts(gate_up, shared_gate_up),
        biases[0],
        activated,
        inner,
        hidden,
        NUM_CHOSEN=num_chosen,
        ACTIVATION=activation,
        ROWS=ROWS,
        IS_EVEN=hidden % BLOCK.value == 0,
        **_GATE,
        **early_launch(x.device),
    )
    _down_kernel[(triton.cdiv(hidden, _DOWN["COLUMNS"]), num_tokens)](
        activated,
        shares,
        chosen,
        *_parts(down, shared_down),
        biases[1],
        out,
        hidden,
        inner,
        NUM_CHOSEN=num_chosen,
        ROWS=ROWS,
        IS_EVEN=inner % BLOCK.value == 0,
        **_DOWN,
        **early_launch(x.device),
    )
    return out


def _parts(weights: Weights, shared: Weights | None) -> tuple[Any, ...]:
    return *parts_of(weights), *parts_of(shared)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    x,
    chosen,
    codes,
    scales,
    KIND: tl.constexpr,  # noqa: N803
    shared_codes,
    shared_scales,
    SHARED_KIND: tl.constexpr,  # noqa: N803
    bias,
    out,
    num_columns,
    depth,
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ACTIVATION: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_EVEN: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes some activated columns of one pair; the pair after a token's own is that of the shared expert."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    turn, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    expert = tl.load(chosen + token * NUM_CHOSEN + turn, mask=turn < NUM_CHOSEN, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    rows, is_row = x + token * depth + row * 0, row < 1
    if shared_codes is not None and turn == NUM_CHOSEN:
        total, total_up = packed_sums(
            rows, is_row, shared_codes, shared_scales, expert, column, num_columns, depth, 2, SHARED_KIND, IS_EVEN
        )
    else:
        total, total_up = packed_sums(rows, is_row, codes, scales, expert, column, num_columns, depth, 2, KIND, IS_EVEN)
    gate, up, is_column = tl.sum(total, 1), tl.sum(total_up, 1), column < num_columns  # of other rows all are 0
    if bias is not None:
        biases = bias + expert * 2 * num_columns + column
        gate += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(biases + num_columns, mask=is_column, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    made = activate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    target = out + (token * tl.num_programs(1) + turn) * num_columns + column
    tl.store(target, made.to(dtype), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    activated,
    shares,
    chosen,
    codes,
    scales,
    KIND: tl.constexpr,  # noqa: N803
    shared_codes,
    shared_scales,
    SHARED_KIND: tl.constexpr,  # noqa: N803
    bias,
    out,
    num_columns,
    depth,
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_EVEN: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program sums some columns of one token over its experts, the likeliest first and the shared one last."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    num_turns: tl.constexpr = NUM_CHOSEN + (shared_codes is not None)
    row = tl.arange(0, ROWS)
    rows, is_row = activated + token * num_turns * depth + row * 0, row < 1
    dtype: tl.constexpr = out.dtype.element_ty
    whole = tl.zeros([COLUMNS], tl.float32)
    for turn in range(NUM_CHOSEN):
        expert = tl.load(chosen + token * NUM_CHOSEN + turn)
        total, _ = packed_sums(
            rows + turn * depth, is_row, codes, scales, expert, column, num_columns, depth, 1, KIND, IS_EVEN
        )
        made = tl.sum(total, 1)
        if bias is not None:
            made += tl.load(bias + expert * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
        whole += made.to(dtype).to(tl.float32) * tl.load(shares + token * NUM_CHOSEN + turn)
    if shared_codes is not None:
        last, first = rows + NUM_CHOSEN * depth, token * 0
        total, _ = packed_sums(
            last, is_row, shared_codes, shared_scales, first, column, num_columns, depth, 1, SHARED_KIND, IS_EVEN
        )
        whole += tl.sum(total, 1).to(dtype).to(tl.float32)
    tl.store(out + token * num_columns + column, whole.to(dtype), mask=is_column)
