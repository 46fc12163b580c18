"""The margin rule over tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.bench.equality import EPSILON_FACTOR, MAX_SHARE, Margin, join

__all__ = [
    "EPSILON_FACTOR",
    "MAX_SHARE",
    "Margin",
    "as_tensor",
    "join",
    "margin",
    "shape_difference",
    "teacher_forced",
]


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


def teacher_forced(prompt: list[int], tokens: list[int]) -> list[int]:
    """What the reference reads: all but the last emitted token."""
    return [*prompt, *tokens[:-1]]


def as_tensor(tokens: list[int]) -> Tensor:
    """Emitted tokens, as ``margin`` takes them."""
    return torch.tensor(tokens, dtype=torch.int64)
