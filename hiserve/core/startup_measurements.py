"""Measurements at the start of a worker. Its successors use them too, so that they run the same steps."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class StepCosts(msgspec.Struct, frozen=True, dict=True):
    """Seconds that the parts of a step take.

    Attributes:
        rows: ``[R]``, ascending. Rows of the measured batches; other numbers cost as the next larger one.
        tiers: ``[C]``, ascending from 0. Numbers of drafts that may be chosen; others cost as the next larger one.
        verify: ``[R][C]``. A step that verifies that many drafts of each row, with few stored tokens.
        follow: ``[R][C]``. The draft forward after that step, which gives the first draft.
        draft: ``[R]``. Each draft of a chain after the first.
        verify_token: Added to a step by each stored token of any row.
        draft_token: Added to each draft forward by each stored token.
        tree_depths: ``[N]``. Levels of the trees that the last N tiers are; the others are chains.
        grow: ``[R][N]``. The growth of a tree after the first forward.
        times_own_drafts: The time of a step includes the drafts made after it, not those made before it.
    """

    rows: list[int]
    tiers: list[int]
    verify: list[list[float]]
    follow: list[list[float]]
    draft: list[float]
    verify_token: float = 0.0
    draft_token: float = 0.0
    tree_depths: list[int] = []
    grow: list[list[float]] = []
    times_own_drafts: bool = False

    @property
    def num_chains(self) -> int:
        """Tiers that are chains, the first ones."""
        return len(self.tiers) - len(self.tree_depths)

    @property
    def max_chain(self) -> int:
        """K, drafts of the longest chain."""
        return self.tiers[self.num_chains - 1]

    def bucket(self, num_rows: int) -> int:
        """Returns the index in R of the measured batch for so many rows, at most the last."""
        return bisect_left(self.rows, num_rows, hi=len(self.rows) - 1)

    def tier(self, num_draft: int) -> int:
        """Returns the index in C of the tier for so many drafts, at most the last."""
        return bisect_left(self.tiers, num_draft, hi=len(self.tiers) - 1)

    def shares(self, bucket: int) -> FloatArray:
        """Returns the added cost of each tier as a share of a step without drafts, float64 ``[C]``."""
        return self.seconds(bucket, 0.0) / self.verify[bucket][0] - 1

    def extend_s(self, bucket: int, num_stored: float) -> FloatArray:
        """Returns the seconds of all drafts but the first, float64 ``[C]``; ``num_stored`` is of all rows."""
        extend_s: FloatArray = self._extend[bucket] + self._num_extends * (self.draft_token * num_stored)
        return extend_s

    def seconds(self, bucket: int, num_stored: float) -> FloatArray:
        """Returns the seconds of making and verifying each tier, float64 ``[C]``."""
        stored = (self.verify_token + self.draft_token) * num_stored
        seconds: FloatArray = self._verify[bucket] + self._follow[bucket] + stored
        return seconds + self.extend_s(bucket, num_stored)

    @cached_property
    def _verify(self) -> FloatArray:
        return np.array(self.verify, np.float64)

    @cached_property
    def _follow(self) -> FloatArray:
        return np.array(self.follow, np.float64)

    @cached_property
    def _num_extends(self) -> FloatArray:
        """Forwards after the first, float64 ``[C]``."""
        depths = [*self.tiers[: self.num_chains], *self.tree_depths]
        return np.array([max(depth - 1, 0) for depth in depths], np.float64)

    @cached_property
    def _extend(self) -> FloatArray:
        """As ``extend_s``, with few stored tokens: float64 ``[R, C]``."""
        seconds = np.multiply.outer(np.array(self.draft, np.float64), self._num_extends)
        if self.tree_depths:
            seconds[:, self.num_chains :] = self.grow
        return seconds


class StartupMeasurements(msgspec.Struct, frozen=True):
    """Measurements that a worker passes to its successors, beside the values of ``Settings``."""

    free_bytes: int = 0  # free memory of the device when the first worker started; 0 if unknown
    draft_costs: StepCosts | None = None  # None if the number of drafts is fixed


NO_MEASUREMENTS = StartupMeasurements()
