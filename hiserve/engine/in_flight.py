"""A step whose result is not in."""

from __future__ import annotations

from dataclasses import dataclass

from hiserve.core.plan import BatchPlan, BoolArray, Int64Array
from hiserve.engine.rows import RowState
from hiserve.ipc.lifecycle import StepSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan without a result."""

    plan: BatchPlan
    rows: Int64Array  # ``[B]``: its rows
    # int64 ``[B]``; of these rows when it was made; a row may have another request when the result comes.
    generations: Int64Array

    def is_current(self, state: RowState) -> BoolArray:
        """Returns which rows still have the request of the plan, bool ``[B]``."""
        current: BoolArray = state.generation[self.rows] == self.generations
        return current

    def snapshot(self, state: RowState) -> StepSnapshot:
        """Returns the plan for a crash report, without the requests that have ended."""
        plan = self.plan
        return StepSnapshot(
            step=plan.step_id,
            uids=state.uid[self.rows[self.is_current(state)]].tolist(),
            num_tokens=int(plan.num_new.sum()),
            num_drafts=int(plan.num_draft.sum()),
            waits=list(plan.waits),
            copies=[copy.op for copy in plan.copies],
        )
