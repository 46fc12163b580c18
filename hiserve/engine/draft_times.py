"""What a worker measured at start, in the form in which it is handed on."""

from __future__ import annotations

import numpy as np

from hiserve.core.startup_measurements import DraftTimes
from hiserve.spec.adaptive import StepCosts


def pack(costs: StepCosts) -> DraftTimes:
    """Returns costs that travel."""
    return DraftTimes(
        rows=costs.rows.tolist(),
        tiers=costs.tiers.tolist(),
        verify=costs.verify.tolist(),
        follow=costs.follow.tolist(),
        draft=costs.draft.tolist(),
        verify_token=float(costs.verify_token),
        draft_token=float(costs.draft_token),
        times_own_drafts=bool(costs.times_own_drafts),
    )


def unpack(times: DraftTimes) -> StepCosts:
    """Returns costs that were handed on."""
    return StepCosts(
        rows=np.array(times.rows, dtype=np.int64),
        tiers=np.array(times.tiers, dtype=np.int64),
        verify=np.array(times.verify, dtype=np.float64),
        follow=np.array(times.follow, dtype=np.float64),
        draft=np.array(times.draft, dtype=np.float64),
        verify_token=times.verify_token,
        draft_token=times.draft_token,
        times_own_drafts=times.times_own_drafts,
    )
