"""The rows and steps of an engine for ``/debug/rows`` and ``/debug/steps``."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

import numpy as np

from hiserve.core.plan import BatchPlan, Int64Array, StepResult
from hiserve.core.usage import SOURCES
from hiserve.engine.rows import RowState
from hiserve.ipc.watching import LEASE_S, MAX_STEPS, RowFacts, StepRecord


class StepLog:
    """Records the steps of an engine until its lease ends: the last ``MAX_STEPS``.

    Args:
        mask_s: Seconds that draws have waited for masks so far.
    """

    def __init__(self, mask_s: float) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._mask_s = mask_s
        self._end_s = 0.0

    def renew(self, now_s: float) -> None:
        """Begins the lease anew."""
        self._end_s = now_s + LEASE_S

    def is_over(self, now_s: float) -> bool:
        """Whether the lease has ended."""
        return now_s > self._end_s

    def add(
        self,
        plan: BatchPlan,
        result: StepResult,
        times_s: tuple[float, float],
        decision: tuple[str, str],
        mask_s: float,
    ) -> None:
        """Records a step.

        Args:
            plan: The step.
            result: Its result.
            times_s: Its begin and its end.
            decision: The gate's decision, and the reason.
            mask_s: As the argument of the class, after its masks and before those of the next step.
        """
        counts, drafted = result.counts, plan.num_draft[plan.samples] > 0
        emitted = counts if counts.size else np.zeros(drafted.size, dtype=np.int32)
        is_prefill = plan.num_new - plan.num_draft > 1
        record = StepRecord(
            step=plan.step_id,
            begin_s=times_s[0],
            end_s=times_s[1],
            num_rows=plan.rows.size,
            num_tokens=plan.num_tokens,
            num_prefill=int(plan.num_new[is_prefill].sum()),
            num_emitted=int(emitted.sum()),
            num_drafts=int(plan.num_draft.sum()),
            num_accepted=int(np.maximum(emitted[drafted] - 1, 0).sum()),
            decision=decision[0],
            reason=decision[1],
            mask_s=mask_s - self._mask_s,
            num_copies=len(plan.copies),
            fault="" if result.fault is None else result.fault.kind,
        )
        self._mask_s = mask_s
        self._records.append(record)

    def since(self, time_s: float) -> list[StepRecord]:
        """Returns the steps that ended later, oldest first."""
        return list(takewhile(lambda record: record.end_s > time_s, reversed(self._records)))[::-1]


def row_facts(rows: RowState, runnable: Int64Array) -> list[RowFacts]:
    """Returns the rows in use, earliest admission first; those that are not ``runnable`` wait for a load."""
    can_run = set(runnable.tolist())
    return [_facts(rows, row, is_loading=row not in can_run) for row in rows.active.tolist()]


def _facts(rows: RowState, row: int, *, is_loading: bool) -> RowFacts:
    request, known = rows.request(row), int(rows.known[row])
    cached = None if request.facts is None else request.facts.cached
    is_decoding = known - int(rows.settled[row]) <= 1
    return RowFacts(
        row=row,
        uid=request.uid,
        state="load" if is_loading else "decode" if is_decoding else "prefill",
        num_prompt=request.num_prompt,
        num_cached=None if cached is None else cached.num_tokens,
        source=SOURCES[int(rows.source[row])],
        num_computed=int(rows.settled[row]),
        num_generated=known - request.num_prompt,
        num_left=int(rows.limit[row]) - known,
        num_pages=int(rows.tables.num_pages[row]),
        num_window_pages=0 if rows.windows is None else rows.windows.num_held(row),
        priority=request.priority,
        has_grammar=request.sampling.grammar is not None,
        num_drafts=int(rows.draft_use[row, 1]),
        num_accepted=int(rows.draft_use[row, 2:].sum()),
    )
