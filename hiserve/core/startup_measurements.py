"""What a worker found out when it started, for those that come after it: they run what it ran."""

from __future__ import annotations

import msgspec


class DraftTimes(msgspec.Struct, frozen=True):
    """Seconds that the parts of a step take; fields as in ``spec.adaptive.StepCosts``, in lists."""

    rows: list[int]
    tiers: list[int]
    verify: list[list[float]]
    follow: list[list[float]]
    draft: list[float]
    verify_token: float
    draft_token: float
    times_own_drafts: bool


class StartupMeasurements(msgspec.Struct, frozen=True):
    """Handed from a worker to its successor. What ``auto`` stands for was decided before, and is in the configuration.

    Attributes:
        free_bytes: Memory of the device that was free when the first worker started; 0 where nobody knows.
        draft_times: What drafts cost; None where their number is not chosen step by step.
    """

    free_bytes: int = 0
    draft_times: DraftTimes | None = None


NO_MEASUREMENTS = StartupMeasurements()
