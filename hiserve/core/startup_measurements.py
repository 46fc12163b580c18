"""Measurements of a worker's start. Its successors take them over, so that they run the same steps."""

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
        rows: ``[R]``, ascending. Rows of the measured batches; others cost as the next larger one.
        tiers: ``[C]``, ascending from 0. Drafts of each row that may be chosen; others cost likewise.
        verify: ``[R][C]``. A step that verifies that many drafts of each row, with few stored tokens.
        follow: ``[R][C]``. The draft forward after that step, which gives the first draft.
        draft: ``[R]``. Each further draft.
        verify_token: Added to a step by each stored token of any row.
        draft_token: Added to each draft forward by it.
        times_own_drafts: A step ends after its own drafts are made, not before.
    """

    rows: list[int]
    tiers: list[int]
    verify: list[list[float]]
    follow: list[list[float]]
    draft: list[float]
    verify_token: float = 0.0
    draft_token: float = 0.0
    times_own_drafts: bool = False

    @property
    def max_draft(self) -> int:
        """K, of the largest tier."""
        return self.tiers[-1]

    def bucket(self, num_rows: int) -> int:
        """Returns the index in R of the batch that stands for so many rows; the last for more than were measured."""
        return bisect_left(self.rows, num_rows, hi=len(self.rows) - 1)

    def tier(self, num_draft: int) -> int:
        """Returns the index in C of the tier that stands for so many drafts."""
        return bisect_left(self.tiers, num_draft, hi=len(self.tiers) - 1)

    def shares(self, bucket: int) -> FloatArray:
        """Returns the cost of the head's part with each tier, as a share of a step without head, float64 ``[C]``."""
        return self.seconds(bucket, 0.0) / self.verify[bucket][0] - 1

    def extend_s(self, bucket: int, num_stored: float) -> FloatArray:
        """Returns the seconds of all drafts but the first, float64 ``[C]``; ``num_stored`` is of all rows."""
        extend_s: FloatArray = self._num_extends * (self.draft[bucket] + self.draft_token * num_stored)
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
        return np.array([max(tier - 1, 0) for tier in self.tiers], np.float64)


class StartupMeasurements(msgspec.Struct, frozen=True):
    """Handed from a worker to its successor. The values of ``auto`` were decided before; the configuration has them."""

    free_bytes: int = 0  # memory of the device that was free when the first worker started; 0 if unknown
    draft_costs: StepCosts | None = None  # costs of drafts; None where their number is not chosen step by step


NO_MEASUREMENTS = StartupMeasurements()
