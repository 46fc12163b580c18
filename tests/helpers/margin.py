"""The margin rule: what "the same tokens" means where arithmetic rounds with the shape of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON_FACTOR = 8
MAX_SHARE = 0.005


@dataclass(frozen=True)
class Margin:
    """How far emitted tokens lie from the reference's best.

    Attributes:
        epsilon: What is allowed: 8 times the largest logit difference between two batch shapes.
        worst: Largest shortfall of an emitted token's score.
        num_needed: Positions where the emitted token is not the reference's best.
        num_positions: All positions.
    """

    epsilon: float
    worst: float
    num_needed: int
    num_positions: int

    @property
    def is_kept(self) -> bool:
        """Every token is within epsilon, and at most 0.5 % of them need it."""
        return self.worst <= self.epsilon and self.num_needed <= MAX_SHARE * self.num_positions


def shape_difference(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    """Largest difference between logits of the same tokens, computed in two batch shapes."""
    return max((one[row].float().cpu() - other[row].float().cpu()).abs().max().item() for row in one)


def margin(reference: Tensor, tokens: Tensor, difference: float) -> Margin:
    """Measures emitted tokens against the reference's scores.

    Args:
        reference: float32 ``[n, vocab_size]``. Scores of the teacher-forced sequence.
        tokens: int64 ``[n]``. Emitted at those positions.
        difference: As ``shape_difference`` gives it.
    """
    shortfall = reference.amax(-1) - reference.gather(1, tokens[:, None])[:, 0]
    return Margin(
        epsilon=EPSILON_FACTOR * difference,
        worst=shortfall.max().item(),
        num_needed=int((shortfall > 0).sum()),
        num_positions=len(tokens),
    )


def join(margins: list[Margin]) -> Margin:
    """One verdict over several rows."""
    return Margin(
        epsilon=margins[0].epsilon,
        worst=max(each.worst for each in margins),
        num_needed=sum(each.num_needed for each in margins),
        num_positions=sum(each.num_positions for each in margins),
    )


def teacher_forced(prompt: list[int], tokens: list[int]) -> list[int]:
    """What the reference reads: all but the last emitted token."""
    return [*prompt, *tokens[:-1]]


def as_tensor(tokens: list[int]) -> Tensor:
    """Emitted tokens, as ``margin`` takes them."""
    return torch.tensor(tokens, dtype=torch.int64)
