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
from hiserve.kernels.packed_triton import BLOCK, GROUP, GROUPS, WORDS, unpack_bytes, unpack_pairs
from hiserve.kernels.packed_weights import PackedWeights, Weights, parts_of

MAX_TOKENS = 1
"""Most tokens for which this is faster than products by experts."""

_ELEMENTS_PER_WARP = 256


class _Block(NamedTuple):
    """What a program reads at once of a matrix."""

    columns: int  # of the result
    depth: int  # elements of each, or fewer


# The fastest of seven and of eight on an H200, for experts of GLM-4.7-Flash and of gpt-oss-20b: 20 and 13 us, 37 and 20 us.
_GATE, _DOWN = _Block(2, 1024), _Block(1, 512)
# Of packed matrices, which have a half or a quarter of the bytes: not measured.
_PACKED_GATE, _PACKED_DOWN = _Block(8, 1024), _Block(4, 1024)


def mix_few(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    biases: tuple[Tensor | None, Tensor | None],
    shared: tuple[Weights, Weights] | None,
    activation: Activation,
) -> Tensor:
    """Like ``experts.mix_experts``; ``biases`` are those of ``gate_up`` and of ``down``."""
    (num_tokens, hidden), num_chosen, inner = x.shape, chosen.shape[1], down.shape[2]
    is_packed = isinstance(gate_up, PackedWeights) or isinstance(down, PackedWeights)
    num_turns = num_chosen + (shared is not None)
    activated, out = x.new_empty((num_tokens, num_turns, inner)), torch.empty_like(x)
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    block = _PACKED_GATE if is_packed else _GATE
    _gate_kernel[(triton.cdiv(inner, block.columns), num_turns, num_tokens)](
        x,
        chosen,
        *parts_of(gate_up),
        *parts_of(shared_gate_up),
        biases[0],
        activated,
        inner,
        hidden,
        NUM_CHOSEN=num_chosen,
        ACTIVATION=activation,
        **_sizes(block, hidden),
        **early_launch(x.device),
    )
    block = _PACKED_DOWN if is_packed else _DOWN
    _down_kernel[(triton.cdiv(hidden, block.columns), num_tokens)](
        activated,
        shares,
        chosen,
        *parts_of(down),
        *parts_of(shared_down),
        biases[1],
        out,
        hidden,
        inner,
        NUM_CHOSEN=num_chosen,
        **_sizes(block, inner),
        **early_launch(x.device),
    )
    return out


def _sizes(block: _Block, depth: int) -> dict[str, int]:
    depth = min(block.depth, max(BLOCK.value, triton.next_power_of_2(depth)))
    return {"COLUMNS": block.columns, "DEPTH": depth, "num_warps": max(1, depth // _ELEMENTS_PER_WARP)}


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
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes some activated columns of one pair; the pair after a token's own is that of the shared expert."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    turn, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # The shared expert is the first of its own tensors.
    expert = tl.load(chosen + token * NUM_CHOSEN + turn, mask=turn < NUM_CHOSEN, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    source = x + token * depth
    if shared_codes is not None and KIND == SHARED_KIND:
        codes = tl.where(turn < NUM_CHOSEN, codes, shared_codes)
        if scales is not None:
            scales = tl.where(turn < NUM_CHOSEN, scales, shared_scales)
    if shared_codes is not None and KIND != SHARED_KIND and turn == NUM_CHOSEN:
        total, total_up = _gate_and_up(
            source, shared_codes, shared_scales, expert, column, num_columns, depth, SHARED_KIND, COLUMNS, DEPTH
        )
    else:
        total, total_up = _gate_and_up(source, codes, scales, expert, column, num_columns, depth, KIND, COLUMNS, DEPTH)
    if bias is not None:
        biases = bias + expert * 2 * num_columns + column
        total += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)
        total_up += tl.load(biases + num_columns, mask=is_column, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    made = activate(total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32), dtype, ACTIVATION)
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
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program sums some columns of one token over its experts, the likeliest first and the shared one last."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    num_turns: tl.constexpr = NUM_CHOSEN + (shared_codes is not None)
    source = activated + token * num_turns * depth
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([COLUMNS], tl.float32)
    for turn in range(NUM_CHOSEN):
        expert = tl.load(chosen + token * NUM_CHOSEN + turn)
        made = _products(source + turn * depth, codes, scales, expert, column, num_columns, depth, KIND, COLUMNS, DEPTH)
        if bias is not None:
            made += tl.load(bias + expert * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
        total += made.to(dtype).to(tl.float32) * tl.load(shares + token * NUM_CHOSEN + turn)
    if shared_codes is not None:
        last, none = source + NUM_CHOSEN * depth, token * 0
        made = _products(
            last, shared_codes, shared_scales, none, column, num_columns, depth, SHARED_KIND, COLUMNS, DEPTH
        )
        total += made.to(dtype).to(tl.float32)
    tl.store(out + token * num_columns + column, total.to(dtype), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_and_up(  # type: ignore[no-untyped-def]
    source,
    codes,
    scales,
    expert,
    column,
    num_columns,
    depth,
    KIND: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    first = 2 * expert
    total = _products(source, codes, scales, first, column, num_columns, depth, KIND, COLUMNS, DEPTH)
    return total, _products(source, codes, scales, first + 1, column, num_columns, depth, KIND, COLUMNS, DEPTH)


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    source,
    codes,
    scales,
    matrix,
    column,
    num_columns,
    depth,
    KIND: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    """Returns the products of a row and some rows of the matrix of a number, float32 ``[COLUMNS]``."""
    if KIND == "e2m1":
        return _products_4(source, codes, scales, matrix, column, num_columns, depth, COLUMNS, DEPTH)
    element = tl.arange(0, DEPTH)
    is_column = column < num_columns
    rows = codes + (matrix * num_columns + column)[:, None] * depth + element[None, :]
    num_blocks = tl.cdiv(depth, BLOCK)
    places = scales
    if KIND == "e4m3":
        places += (matrix * tl.cdiv(num_columns, BLOCK) + column // BLOCK)[:, None] * num_blocks
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, depth, DEPTH):
        is_element = is_column[:, None] & (element < depth - first)[None, :]
        values = tl.load(source + first + element, mask=element < depth - first, other=0.0).to(tl.float32)
        weights = tl.load(rows + first, mask=is_element, other=0)
        if KIND == "e4m3":
            factors = tl.load(places + ((first + element) // BLOCK)[None, :], mask=is_element, other=0.0)
            weights = unpack_bytes(weights, factors, source.dtype.element_ty)
        totals += weights.to(tl.float32) * values[None, :]
    return tl.sum(totals, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _products_4(  # type: ignore[no-untyped-def]
    source,
    codes,
    scales,
    matrix,
    column,
    num_columns,
    depth,
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    """As ``_products``, of numbers of 4 bits: each word has two of four groups."""
    COUNT: tl.constexpr = DEPTH // BLOCK * WORDS  # noqa: N806
    word = tl.arange(0, COUNT)
    is_column = column < num_columns
    num_blocks = tl.cdiv(depth, BLOCK)
    rows = (matrix * num_columns + column)[:, None]
    words, factors = codes + rows * (num_blocks * WORDS), scales + rows * num_blocks
    totals = tl.zeros([COLUMNS, COUNT], tl.float32)
    for first in range(0, num_blocks * WORDS, COUNT):
        number = first + word
        is_there = is_column[:, None] & (number < num_blocks * WORDS)[None, :]
        packed = tl.load(words + number[None, :], mask=is_there, other=0)
        factor = tl.load(factors + (number // WORDS)[None, :], mask=is_there, other=0)
        element = (number // WORDS * BLOCK + number % WORDS * 2)[:, None] + tl.arange(0, 2)[None, :]
        for group in tl.static_range(GROUPS):
            place = element + group * GROUP
            even_value, odd_value = tl.split(tl.load(source + place, mask=place < depth, other=0.0).to(tl.float32))
            even, odd = unpack_pairs(packed, factor, group, source.dtype.element_ty)
            totals += even.to(tl.float32) * even_value[None, :] + odd.to(tl.float32) * odd_value[None, :]
    return tl.sum(totals, 1)
