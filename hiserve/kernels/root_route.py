"""Choice of experts by the roots of softplus in one launch of Triton; ``kernels.routing`` is the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import routing
from hiserve.kernels.launch import await_previous, early_launch, start_next

_SPARE = tl.constexpr(routing.SPARE)
_LINEAR = tl.constexpr(20.0)  # above, softplus is its argument


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
    shares = torch.empty((num_tokens, num_per_token), dtype=torch.float32, device=logits.device)
    numbers = torch.empty((num_tokens, num_per_token), dtype=torch.int64, device=logits.device)
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


@triton.jit(do_not_specialize=["scale"])  # type: ignore[untyped-decorator]
def _route_by_root(  # type: ignore[no-untyped-def]
    logits, bias, table, rows, shares, numbers, scale,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,  # noqa: N803
    BLOCK_CHOSEN: tl.constexpr, IS_EARLY: tl.constexpr  # noqa: N803
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
        share = tl.full([BLOCK_CHOSEN], 0.0, tl.float32)
        number = tl.full([BLOCK_CHOSEN], 0, tl.int32)
        for turn in range(NUM_CHOSEN):
            best = tl.argmax(left, 0)
            is_best = expert == best
            share = tl.where(place == turn, tl.sum(tl.where(is_best, score, 0.0), 0), share)
            number = tl.where(place == turn, best, number)
            left = tl.where(is_best, -float("inf"), left)
    else:
        chosen = table + tl.load(rows + token).to(tl.int64) * NUM_CHOSEN
        number = tl.load(chosen + place, mask=is_place, other=0).to(tl.int32)
        share = _root(tl.load(logits + token * NUM_EXPERTS + number, mask=is_place, other=0.0))
        share = tl.where(is_place, share, 0.0)
    share = share / (tl.sum(share, 0) + _SPARE) * scale
    target = token * NUM_CHOSEN + place
    tl.store(shares + target, share, mask=is_place)
    tl.store(numbers + target, number.to(tl.int64), mask=is_place)
