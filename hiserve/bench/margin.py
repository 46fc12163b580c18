"""The margin rule: what "the same tokens" means where arithmetic rounds with the shape of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

EPSILON_FACTOR = 8
MAX_SHARE = 0.005


class Margin(msgspec.Struct, frozen=True):
    """How far emitted tokens lie from the reference's best.

    Attributes:
        epsilon: What is allowed: 8 times the largest difference between scores of two batch shapes.
        worst: Largest shortfall of an emitted token's score.
        num_needed: Positions where the emitted token is not the reference's best.
        num_positions: All positions.
    """

    epsilon: float
    worst: float
    num_needed: int
    num_positions: int

    @property
    def is_near(self) -> bool:
        """Every token is within epsilon."""
        return self.worst <= self.epsilon

    @property
    def is_rare(self) -> bool:
        """At most 0.5 % of the positions need it: of few, none may."""
        return self.num_needed <= MAX_SHARE * self.num_positions

    @property
    def is_kept(self) -> bool:
        """Every token is within epsilon, and at most 0.5 % of them need it."""
        return self.is_near and self.is_rare


def join(margins: Sequence[Margin]) -> Margin:
    """One verdict over several rows, of one epsilon."""
    return Margin(
        epsilon=margins[0].epsilon,
        worst=max(each.worst for each in margins),
        num_needed=sum(each.num_needed for each in margins),
        num_positions=sum(each.num_positions for each in margins),
    )
