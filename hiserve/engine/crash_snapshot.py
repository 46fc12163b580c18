"""A step in words that can be told when it has failed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import BatchPlan
from hiserve.engine.rows import RowState
from hiserve.ipc.lifecycle import StepSnapshot


def step_snapshot(
    plan: BatchPlan, rows: NDArray[np.int64], generations: NDArray[np.int64], state: RowState
) -> StepSnapshot:
    """Returns what a plan ordered.

    Args:
        plan: In flight.
        rows: int64 ``[B]``. Its rows.
        generations: int64 ``[B]``. Their generations when it was made; requests that have left are not named.
        state: All rows.
    """
    held = rows[state.generation[rows] == generations]
    return StepSnapshot(
        step=plan.step_id,
        uids=state.uid[held].tolist(),
        num_tokens=int(plan.num_new.sum()),
        num_drafts=int(plan.num_draft.sum()),
        waits=list(plan.waits),
        copies=[copy.op for copy in plan.copies],
    )
