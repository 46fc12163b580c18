"""A mixture of experts as Triton kernels: fixed shapes and four launches for any routing, two for a token alone, or three of packed weights.

Each pair of a token and one of its experts is a row of work. Rows are ordered by expert, so that a program reads
one expert's weights for a block of rows; an expert that computes every token comes last, with as many rows as tokens.
Only the device knows the number of blocks of each expert, so programs are launched for the worst case, and those
without a block end at once. There are no atomic additions: results are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.core.row_shapes import PACKED_CAPABILITY
from hiserve.kernels import reference
from hiserve.kernels.expert_products import EXACT_TILES, TILES, Tiles, multiply, tiles_for
from hiserve.kernels.few_experts import MAX_TOKENS, mix_few
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.packed_products import ALONE_TILES, PACKED_TILES, multiply_packed
from hiserve.kernels.packed_weights import PackedWeights, Weights, plain

_SCANS = ((1024, 4), (8192, 8))  # pairs at a time and warps: for few pairs, for many
_SUM_BLOCK = 512


def route(
    logits: Tensor, num_per_token: int, is_normalized: bool, gated: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Like ``reference.route``; of equally likely experts the first ones."""
    if logits.dtype == torch.float64:
        return reference.route(logits, num_per_token, is_normalized, gated)
    x, gate = (None, None) if gated is None else gated
    assert logits.is_contiguous() and (x is None or x.is_contiguous()), f"rows {logits.stride()} apart"
    num_tokens, num_experts = logits.shape
    num_shares, size = num_per_token + (gate is not None), 1 if gate is None else gate.shape[0]
    shares = torch.empty((num_tokens, num_shares), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_tokens, num_per_token), dtype=torch.int64, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits, x, gate, shares, chosen,
        NUM_EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts), NUM_CHOSEN=num_per_token,
        BLOCK_CHOSEN=triton.next_power_of_2(num_per_token), SIZE=size, BLOCK_SIZE=triton.next_power_of_2(size),
        IS_NORMALIZED=is_normalized, num_warps=1, **early_launch(logits.device),
    )  # fmt: skip
    return shares, chosen


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, x, gate, shares, chosen,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_NORMALIZED: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program routes one token. For any logits, NaN included, experts are in range and differ."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    if gate is not None:
        element = tl.arange(0, BLOCK_SIZE)
        weights = tl.load(gate + element, mask=element < SIZE, other=0.0).to(tl.float32)
        values = tl.load(x + token * SIZE + element, mask=element < SIZE, other=0.0).to(tl.float32)
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
    NUM_SHARES: tl.constexpr = NUM_CHOSEN + (gate is not None)
    tl.store(shares + token * NUM_SHARES + place, share, mask=place < NUM_CHOSEN)
    tl.store(chosen + token * NUM_CHOSEN + place, number.to(tl.int64), mask=place < NUM_CHOSEN)
    if gate is not None:  # rounded as other products of the tokens
        opened = tl.sum(values * weights, 0).to(x.dtype.element_ty).to(tl.float32)
        tl.store(shares + token * NUM_SHARES + NUM_CHOSEN, 1.0 / (1.0 + tl.exp(-opened)))


def mix_experts(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = SILU,
    shared: tuple[Weights, Weights] | None = None,
) -> Tensor:
    """Like ``reference.mix_experts``, but only its own experts compute a token. float64 uses the reference."""
    if _lacks_e4m3(x.device):
        gate_up, down, *both = (_without_e4m3(each, x.dtype) for each in (gate_up, down, *(shared or ())))
        shared = (both[0], both[1]) if both else None
    is_packed = any(isinstance(each, PackedWeights) for each in (gate_up, down, *(shared or ())))
    if x.dtype == torch.float64 or (is_packed and x.dtype == torch.float32):
        return reference.mix_experts(x, shares, chosen, gate_up, down, gate_up_bias, down_bias, activation, shared)
    weights = (x, shares, gate_up, down, *(shared or ()))
    assert all(each.is_contiguous() for each in weights), f"gaps in one of {[tuple(each.shape) for each in weights]}"
    assert all(bias is None or bias.is_contiguous() for bias in (gate_up_bias, down_bias))
    assert shared is None or (gate_up_bias is None and shared[1].shape == down.shape[1:]), "another shape"
    if 1 <= x.shape[0] <= MAX_TOKENS and not is_packed:
        few: Callable[..., Tensor] = mix_few  # of weights that are not packed
        return few(x, shares, chosen, gate_up, down, (gate_up_bias, down_bias), shared, activation)
    tiles = PACKED_TILES if is_packed else TILES
    return _mix_by_expert(
        x, shares, chosen, gate_up, down, (gate_up_bias, down_bias), activation, shared, tiles, is_packed=is_packed
    )


def mix_experts_exactly(
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
    """Like ``mix_experts`` of 16-bit weights, with sums that do not depend on the other tokens of a call."""
    biases = gate_up_bias, down_bias
    return _mix_by_expert(x, shares, chosen, gate_up, down, biases, activation, shared, EXACT_TILES, is_packed=False)


def _mix_by_expert(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    biases: tuple[Tensor | None, Tensor | None],
    activation: Activation,
    shared: tuple[Weights, Weights] | None,
    tiles: Tiles,
    *,
    is_packed: bool,
) -> Tensor:
    """As ``mix_experts``, in programs of one expert and some of its tokens each."""
    gate_up_bias, down_bias = biases
    num_experts, num_chosen = gate_up.shape[0], chosen.numel()
    num_pairs = num_chosen + (0 if shared is None else x.shape[0])
    is_alone = is_packed and x.shape[0] == 1
    order, ends = (None, None) if is_alone else _group(chosen, num_experts, num_pairs)
    activated, made = (x.new_empty((num_pairs, width)) for width in (down.shape[2], x.shape[1]))
    shared_gate_up, shared_down = (None, None) if shared is None else shared
    product: Any = multiply_packed if is_packed else multiply
    first, second = ALONE_TILES if is_alone else tiles_for(tiles, num_chosen, num_experts)
    product(x, gate_up, shared_gate_up, gate_up_bias, order, ends, activated, chosen, activation, first)
    product(activated, down, shared_down, down_bias, order, ends, made, chosen, None, second)
    return _sum(made, shares, chosen.shape[1], has_shared=shared is not None)


@cache
def _lacks_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < PACKED_CAPABILITY


def _without_e4m3(weights: Weights, dtype: torch.dtype) -> Weights:
    """Unpacks what kernels of an older GPU cannot: in every step, so that this is slow."""
    return plain(weights, dtype) if isinstance(weights, PackedWeights) and weights.kind == "e4m3" else weights


def _sum(made: Tensor, shares: Tensor, num_chosen: int, *, has_shared: bool) -> Tensor:
    """Sums the pairs of each token; those of a shared expert, one for each token behind all others, count whole without a share."""
    (num_tokens, num_shares), size = shares.shape, made.shape[1]
    out = made.new_empty((num_tokens, size))
    _sum_kernel[(num_tokens * triton.cdiv(size, _SUM_BLOCK),)](
        made, shares, out, num_tokens * num_chosen,
        SIZE=size, NUM_CHOSEN=num_chosen, NUM_SHARES=num_shares, HAS_SHARED=has_shared, BLOCK=_SUM_BLOCK, num_warps=1,
        **early_launch(made.device),
    )  # fmt: skip
    return out


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
        chosen, order, ends, chosen.numel(), num_pairs, num_experts,
        BLOCK=block, num_warps=num_warps, **early_launch(chosen.device),
    )  # fmt: skip
    return order, ends


@triton.jit(do_not_specialize=["num_chosen", "num_pairs", "num_experts"])
def _group_kernel(chosen, order, ends, num_chosen, num_pairs, num_experts, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
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


@triton.jit(do_not_specialize=["first_shared"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    made, shares, out, first_shared,
    SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_SHARES: tl.constexpr, HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
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
        total += value * tl.load(shares + token * NUM_SHARES + turn)
    if HAS_SHARED:
        value = tl.load(made + (first_shared + token) * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += value if NUM_SHARES == NUM_CHOSEN else value * tl.load(shares + token * NUM_SHARES + NUM_CHOSEN)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
