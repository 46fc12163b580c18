"""Appends the tokens that steps emit to their rows, and reports them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason
from hiserve.engine.draft_counts import DraftCounts
from hiserve.engine.rows import RowState
from hiserve.engine.stop_tokens import StopTokens
from hiserve.engine.updates import RequestUpdates

Int64Array = NDArray[np.int64]


class RowOutput:
    """What results give to rows.

    Args:
        rows: The planner's rows.
        stop_tokens: Says what ends a reply.
        draft_counts: Is told what was verified.

    Attributes:
        num_generated: Tokens appended until now.
    """

    def __init__(self, rows: RowState, stop_tokens: StopTokens, draft_counts: DraftCounts) -> None:
        self._rows = rows
        self._stop_tokens = stop_tokens
        self._draft_counts = draft_counts
        self.num_generated = 0

    def append(
        self, rows: Int64Array, num_draft: Int32Array, counts: Int32Array, tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Corrects upper bounds and appends tokens up to a stop.

        Args:
            rows: int64 ``[S]``.
            num_draft: int32 ``[S]``. Drafts the step verified.
            counts: int32 ``[S]``. Accepted drafts + 1.
            tokens: int32 ``[S, 1 + max draft]``.

        Returns:
            int32 ``[S]`` how many tokens were appended to each row, int32 ``[S]`` the ``FinishReason`` of each, and
            int32 ``[sum]`` the tokens.
        """
        state = self._rows
        most = num_draft + 1
        state.pending[rows] -= most
        rejected = most - counts
        if rejected.any():
            assert (counts >= 1).all() and (rejected >= 0).all(), f"rows {rows} emitted {counts} of at most {most}"
            state.computed[rows] -= rejected
            state.settled[rows] -= rejected
        known = state.known[rows]
        room = state.limit[rows] - known
        counts, stops = self._stop_tokens.cut(rows, np.minimum(counts, room), tokens)
        width = np.arange(tokens.shape[1])
        is_new = width < counts[:, None]
        places = (rows * state.tokens.shape[1] + known)[:, None] + width
        tokens = tokens[is_new]
        state.tokens.reshape(-1)[places[is_new]] = tokens
        state.known[rows] = known + counts
        finishes = np.where(counts == room, int(FinishReason.LENGTH), 0)
        finishes[stops] = int(FinishReason.STOP)
        self.num_generated += int(counts.sum())
        self._draft_counts.verified(rows, num_draft, counts)
        return counts, finishes, tokens

    def tell(
        self,
        updates: RequestUpdates,
        rows: Int64Array,
        counts: Int32Array,
        finishes: Int32Array,
        tokens: Int32Array,
        scores: dict[int, bytes],
    ) -> None:
        """Reports the rows that have new tokens, then those that have but scores of their prompts."""
        state = self._rows
        if scores:
            others = np.array(sorted(scores.keys() - set(rows.tolist())), dtype=np.int64)
            rows, nothing = np.concatenate((rows, others)), np.zeros(others.size, dtype=np.int32)
            counts, finishes = np.concatenate((counts, nothing)), np.concatenate((finishes, nothing))
        uids, cached, drafts = state.uid[rows].tolist(), state.take_cached(rows), self._draft_counts.take(rows)
        updates.add_tokens(uids, counts.tolist(), finishes.tolist(), cached, drafts, tokens)
        if scores:
            updates.add_scores([scores.get(row, b"") for row in rows.tolist()])
