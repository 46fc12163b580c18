"""Choice of experts among groups, in plain torch: of fixed shape, without a host sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SPARE = 1e-20  # of a sum of shares, which may be 0


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroups:
    """Groups of as many adjacent experts, two at least.

    Attributes:
        bias: float32 or float64 ``[num_experts]``, on the logits' device. Added to the score of an expert for the choice alone.
        num_groups: All groups.
        num_chosen: Groups of a token.
        scale: Factor of the shares.
    """

    bias: Tensor
    num_groups: int
    num_chosen: int
    scale: float


def route_in_groups(
    logits: Tensor, groups: ExpertGroups, num_per_token: int, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    """Chooses the best experts of the best groups of each token (DeepSeek-V3, arXiv:2412.19437).

    Args:
        logits: ``[T, num_experts]``, float32 or float64 as the bias. The score of an expert is their sigmoid; that of a group
            is the sum of its two best, biases included.
        groups: Their sizes, bias and scale.
        num_per_token: Experts to choose, at most those of the chosen groups.
        is_normalized: Scale the shares of the chosen ones to sum to 1, before ``groups.scale``.

    Returns:
        Shares ``[T, num_per_token]``, of the type of the logits, and experts, int64 of the same shape.
    """
    scores = logits.sigmoid()
    sizes = (logits.shape[0], groups.num_groups, logits.shape[1] // groups.num_groups)
    biased = (scores + groups.bias).view(sizes)
    best = biased.topk(2, -1).values.sum(-1).topk(groups.num_chosen, -1).indices
    is_out = torch.ones_like(biased[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    experts = biased.masked_fill(is_out[..., None], -torch.inf).flatten(1).topk(num_per_token, -1).indices
    shares = scores.gather(-1, experts)
    if is_normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + SPARE)
    return shares * groups.scale, experts


def route_by_root(
    logits: Tensor,
    num_per_token: int,
    scale: float,
    *,
    bias: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token by the root of the softplus of their logits (DeepSeek-V4), or takes given ones.

    Args:
        logits: ``[T, num_experts]``, float32 or float64.
        num_per_token: Experts of a token.
        scale: Factor of the shares, which sum to 1 before.
        bias: ``[num_experts]``, of the type of the logits, added for the choice alone; None where experts are given.
        given: int64 ``[N, num_per_token]``, experts, which may be the same, and int32 ``[T]``, the row of each token there.

    Returns:
        Shares ``[T, num_per_token]``, of the type of the logits, and experts, int64 of the same shape.
    """
    scores = F.softplus(logits).sqrt()
    if given is None:
        assert bias is not None, "neither a bias nor experts"
        chosen = (scores + bias).topk(num_per_token, -1).indices
    else:
        table, rows = given
        chosen = table.index_select(0, rows)
    shares = scores.gather(-1, chosen)
    return shares / (shares.sum(-1, keepdim=True) + SPARE) * scale, chosen
