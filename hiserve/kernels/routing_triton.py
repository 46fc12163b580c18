"""Choices of experts in one launch of Triton each; ``kernels.routing`` has their twins."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import routing
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.routing import ExpertGroups

_SPARE = tl.constexpr(routing.SPARE)
_LINEAR = tl.constexpr(20.0)  # above, softplus is its argument


def route_in_groups(
    logits: Tensor, groups: ExpertGroups, num_per_token: int, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    """Like ``routing.route_in_groups``; of equal scores the first. float64 and odd numbers of experts use the twin."""
    num_tokens, num_experts = logits.shape
    is_odd = any(number & (number - 1) for number in (num_experts, groups.num_groups))
    if is_odd or logits.dtype != torch.float32:
        return routing.route_in_groups(logits, groups, num_per_token, is_normalized)
    assert logits.is_contiguous(), f"rows {logits.stride()} apart"
    shares, chosen = _new_choice(logits, num_per_token)
    _route_in_groups[(num_tokens,)](
        logits, groups.bias, shares, chosen, groups.scale,
        NUM_EXPERTS=num_experts, NUM_GROUPS=groups.num_groups, NUM_CHOSEN_GROUPS=groups.num_chosen,
        NUM_CHOSEN=num_per_token, BLOCK_CHOSEN=triton.next_power_of_2(num_per_token), IS_NORMALIZED=is_normalized,
        num_warps=1, **early_launch(logits.device),
    )  # fmt: skip
    return shares, chosen


@triton.jit(do_not_specialize=["scale"])
def _route_in_groups(  # type: ignore[no-untyped-def]
    logits, bias, shares, chosen, scale,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, BLOCK_CHOSEN: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program routes one token. For any logits, NaN included, experts are in range and differ."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, NUM_EXPERTS)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * NUM_EXPERTS + expert)))
    score = tl.where(score == score, score, 0.0)  # NaN compares with nothing
    left = score + tl.load(bias + expert)
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        left = _best_groups(left, NUM_GROUPS, NUM_EXPERTS // NUM_GROUPS, NUM_CHOSEN_GROUPS)
    place = tl.arange(0, BLOCK_CHOSEN)
    share, number = _best(left, score, expert, place, NUM_CHOSEN)
    if IS_NORMALIZED:
        share = share / (tl.sum(share, 0) + _SPARE)
    target = token * NUM_CHOSEN + place
    tl.store(shares + target, share * scale, mask=place < NUM_CHOSEN)
    tl.store(chosen + target, number.to(tl.int64), mask=place < NUM_CHOSEN)


@triton.jit
def _best_groups(  # type: ignore[no-untyped-def]
    scores,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    """Returns the scores, -inf outside of the groups whose two best have the largest sums."""
    by_group = tl.reshape(scores, [GROUPS, SIZE])
    first = tl.argmax(by_group, 1)
    second = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], -float("inf"), by_group)
    left = tl.max(by_group, 1) + tl.max(second, 1)
    group = tl.arange(0, GROUPS)
    is_in = group < 0
    for _ in range(NUM_CHOSEN):
        is_best = group == tl.argmax(left, 0)
        is_in = is_in | is_best
        left = tl.where(is_best, -float("inf"), left)
    return tl.reshape(tl.where(is_in[:, None], by_group, -float("inf")), [GROUPS * SIZE])


def route_by_root(
    logits: Tensor,
    num_per_token: int,
    scale: float,
    *,
    bias: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Like ``routing.route_by_root``; of equal scores the first. float64 uses the twin."""
    num_tokens, num_experts = logits.shape
    if logits.dtype != torch.float32:
        return routing.route_by_root(logits, num_per_token, scale, bias=bias, given=given)
    table, rows = (None, None) if given is None else given
    assert logits.is_contiguous() and (table is None or table.is_contiguous()), f"rows {logits.stride()} apart"
    assert bias is not None or table is not None, "neither a bias nor experts"
    shares, numbers = _new_choice(logits, num_per_token)
    _route_by_root[(num_tokens,)](
        logits, bias, table, rows, shares, numbers, scale,
        NUM_EXPERTS=num_experts, BLOCK_EXPERTS=triton.next_power_of_2(num_experts), NUM_CHOSEN=num_per_token,
        BLOCK_CHOSEN=triton.next_power_of_2(num_per_token), num_warps=1, **early_launch(logits.device),
    )  # fmt: skip
    return shares, numbers


@triton.jit
def _root(logit):  # type: ignore[no-untyped-def]
    """The root of softplus; 0 of NaN."""
    small = tl.exp(tl.minimum(logit, _LINEAR))
    more = 1.0 + small
    rounded = more - 1.0  # W. Kahan's logarithm of 1 + x, exact for small x
    soft = tl.where(rounded == 0.0, small, tl.log(more) * (small / tl.where(rounded == 0.0, 1.0, rounded)))
    found = tl.sqrt(tl.where(logit > _LINEAR, logit, soft))
    return tl.where(logit == logit, found, 0.0)


@triton.jit(do_not_specialize=["scale"])
def _route_by_root(  # type: ignore[no-untyped-def]
    logits, bias, table, rows, shares, numbers, scale,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program routes one token. For any logits, NaN included, experts are in range, and those it chooses differ."""
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_CHOSEN)
    is_expert, is_place = expert < NUM_EXPERTS, place < NUM_CHOSEN
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    if table is None:
        score = _root(tl.load(logits + token * NUM_EXPERTS + expert, mask=is_expert, other=0.0))
        left = tl.where(is_expert, score + tl.load(bias + expert, mask=is_expert, other=0.0), -float("inf"))
        share, number = _best(left, score, expert, place, NUM_CHOSEN)
    else:
        chosen = table + tl.load(rows + token).to(tl.int64) * NUM_CHOSEN
        number = tl.load(chosen + place, mask=is_place, other=0).to(tl.int32)
        share = _root(tl.load(logits + token * NUM_EXPERTS + number, mask=is_place, other=0.0))
        share = tl.where(is_place, share, 0.0)
    share = share / (tl.sum(share, 0) + _SPARE) * scale
    target = token * NUM_CHOSEN + place
    tl.store(shares + target, share, mask=is_place)
    tl.store(numbers + target, number.to(tl.int64), mask=is_place)


def _new_choice(logits: Tensor, num_per_token: int) -> tuple[Tensor, Tensor]:
    """Returns memory for shares and numbers of experts, ``[T, num_per_token]``."""
    shape = (logits.shape[0], num_per_token)
    shares = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return shares, torch.empty(shape, dtype=torch.int64, device=logits.device)


@triton.jit
def _best(left, score, expert, place, NUM_CHOSEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns, for each place, the score and the number of the expert with the next largest entry of ``left``."""
    share = tl.full(place.shape, 0.0, tl.float32)
    number = tl.full(place.shape, 0, tl.int32)
    for turn in range(NUM_CHOSEN):
        best = tl.argmax(left, 0)
        is_best = expert == best
        share = tl.where(place == turn, tl.sum(tl.where(is_best, score, 0.0), 0), share)
        number = tl.where(place == turn, best, number)
        left = tl.where(is_best, -float("inf"), left)
    return share, number
