"""A step's tokens and scores, as the requests' updates."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import BatchPlan, BoolArray, Int32Array, Int64Array, StepResult
from hiserve.engine.drafting import Drafting
from hiserve.engine.rows import RowState
from hiserve.ipc.updates import RequestUpdates


def report(
    updates: RequestUpdates,
    state: RowState,
    drafting: Drafting,
    rows: Int64Array,
    counts: Int32Array,
    finishes: Int32Array,
    tokens: Int32Array,
    scores: dict[int, bytes],
) -> None:
    """Adds rows with new tokens to the updates, as ``RowState.append`` returned them, then those with prompt scores alone."""
    if scores:
        others = np.array(sorted(scores.keys() - set(rows.tolist())), dtype=np.int64)
        rows, nothing = np.concatenate((rows, others)), np.zeros(others.size, dtype=np.int32)
        counts, finishes = np.concatenate((counts, nothing)), np.concatenate((finishes, nothing))
    updates.extend(
        state.uid[rows].tolist(),
        counts.tolist(),
        finishes.tolist(),
        tokens,
        [scores.get(row, b"") for row in rows.tolist()] if scores else (),
        facts=state.take_facts(rows),
        drafts=drafting.take(rows),
    )


def pick_scores(
    plan: BatchPlan, result: StepResult, ok: BoolArray, counts: Int32Array, state: RowState
) -> dict[int, bytes]:
    """Returns the new scores of each row that has some, as reports carry them: prompt first.

    Args:
        plan: The step.
        result: Its result.
        ok: bool ``[B]``. Rows of the plan whose result counts.
        counts: int32 ``[S]``. Tokens kept of each sampling row that counts.
        state: The rows; their requests count the reported scores of their prompts.
    """
    packed: dict[int, bytes] = {}
    if result.prompt_scores is not None:
        packed = _pack_prompts(plan, result, ok, state)
    if result.scores is not None:
        width = result.tokens.shape[1]
        places = np.flatnonzero(ok[plan.samples])
        rows = plan.rows[plan.samples][places]
        for i in np.flatnonzero(state.num_top[rows] >= 0).tolist():
            row = int(rows[i])
            scores = result.scores.pack(int(places[i]) * width, int(state.num_top[row]), int(counts[i]))
            packed[row] = packed.get(row, b"") + scores
    return packed


def _pack_prompts(plan: BatchPlan, result: StepResult, ok: BoolArray, state: RowState) -> dict[int, bytes]:
    """Packs scores of prompts; those reported before the request lost its row were computed again, and are left out."""
    assert result.prompt_scores is not None, f"step {plan.step_id} came without scores of its prompts"
    packed: dict[int, bytes] = {}
    ends = np.cumsum(plan.num_scored)
    for i in np.flatnonzero(ok & (plan.num_scored > 0)).tolist():
        row, num_scored = int(plan.rows[i]), int(plan.num_scored[i])
        request = state.request(row)
        num_top = request.sampling.prompt_logprobs
        start = int(plan.max_len[i] - plan.num_new[i])  # exact: nothing was drafted before the prompt ends
        num_reported = request.num_scored - start
        assert num_top is not None, f"request {request.uid} wants no scores of its prompt"
        assert num_reported >= 0, f"request {request.uid}: {request.num_scored} scores were reported, {start} are due"
        if num_reported < num_scored:
            begin = int(ends[i]) - num_scored + num_reported
            packed[row] = result.prompt_scores.pack(begin, num_top, num_scored - num_reported)
            request.num_scored = start + num_scored
    return packed
