"""The number of drafts after each step, and the counts of verified and accepted ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import MAX_FOLLOWING, BatchPlan, Int32Array
from hiserve.core.usage import SOURCES, DraftStats, DraftUse
from hiserve.engine.rows import RowState
from hiserve.spec.adaptive import DraftController
from hiserve.spec.history import LONGEST, ReplyHistory

_BACK = np.arange(1, LONGEST + 2)


class Drafting:
    """Chooses the number of drafts after each step, and counts verified and accepted drafts; idle without speculation.

    Args:
        num_draft: Most drafts after a step; every step has so many without a controller.
        controller: Chooses one number for all rows of a step.
        history: Of replies, for a proposer that follows continuations.
    """

    def __init__(
        self,
        rows: RowState,
        num_draft: int = 0,
        controller: DraftController | None = None,
        history: ReplyHistory | None = None,
    ) -> None:
        self._rows = rows
        self._num_draft = num_draft
        self._controller = controller
        self._history = history
        self._num_searched = self._num_found = 0  # rows of steps
        self._totals = np.zeros((len(SOURCES), rows.draft_use.shape[1]), dtype=np.int64)
        self._chosen: Counter[int] = Counter()  # planned steps that sample, by drafts after each

    @property
    def is_cold(self) -> bool:
        """Whether the proposer does nothing after the next step."""
        return self._controller is not None and self._controller.is_cold

    def propose(self, rows: NDArray[np.int64], *, is_allowed: bool = True) -> int:
        """Chooses the drafts after a step of sampling rows (int64 ``[S]``); returns how many the proposer makes."""
        state = self._rows
        if not (self._num_draft and rows.size):
            return 0
        allowed = state.max_draft[rows]
        if self._controller is not None and is_allowed and self._controller.stays_cold(allowed):
            state.draft(rows, 0)
            self._chosen[0] += 1
            return 0
        most = self._num_draft if is_allowed else 0
        if self._controller is not None and is_allowed:
            most = self._controller.choose(allowed, self._mean_context(rows))
        num_propose = most if state.draft(rows, most) else 0  # of few widths, for graphs
        self._chosen[num_propose] += 1
        return num_propose

    def continuations(self, rows: NDArray[np.int64], num_propose: int) -> Int32Array | None:
        """Returns ``BatchPlan.continuations`` of sampling rows (int64 ``[S]``) of a step that is counted as planned."""
        if self._history is None or not num_propose or self._history.is_empty:
            return None
        state = self._rows
        known = state.known[rows]
        # A row of fewer tokens begins with repetitions of its first one.
        last = state.tokens[rows[:, None], np.maximum(known[:, None] - _BACK, 0)]
        last[:, LONGEST] = -1
        num_following = min(int(state.pending[rows].max()) + num_propose, MAX_FOLLOWING)
        found = np.empty((rows.size, 2 + num_following), dtype=np.int32)
        found[:, 0] = known
        found[:, 1], found[:, 2:] = self._history.follow(state.tenant[rows].tolist(), last, num_following)
        self._num_searched += rows.size
        self._num_found += int(np.count_nonzero(found[:, 1]))
        return found

    def forget(self) -> None:
        """Forgets all replies."""
        if self._history is not None:
            self._history.clear()

    def to_verify(self, rows: NDArray[np.int64]) -> Int32Array:
        """Returns how many drafts rows (int64 ``[B]``) verify, int32 ``[B]``: their ``drafted``.

        Rows with the same limit, which all have drafts, verify the least number that one of them has. Numbers differ
        where the choice changed while some rows were left out of a step; rows of one width are one graph.
        """
        drafted = self._rows.drafted[rows]
        if not drafted.any():
            return drafted
        most = self._rows.max_draft[rows]
        if (most == most[0]).all() and (least := drafted.min()):
            return np.full_like(drafted, least)
        return drafted

    def record(
        self, plan: BatchPlan, rows: NDArray[np.int64], num_draft: Int32Array, counts: Int32Array, seconds: float | None
    ) -> None:
        """Hands the result of a step to the controller.

        Args:
            plan: Of the step.
            rows: int64 ``[S]``. Those that sampled and whose pages were current.
            num_draft: int32 ``[S]``. Drafts that they verified.
            counts: int32 ``[S]``. Those accepted + 1.
            seconds: Time of the step; None if it computed prompts.
        """
        if self._controller is not None and rows.size and not (plan.is_cold and not num_draft.any()):
            made = plan.num_propose if self._controller.times_own_drafts else int(num_draft.max())
            self._controller.record(num_draft, counts, made, self._mean_context(rows), seconds)

    def verified(self, rows: NDArray[np.int64], num_draft: Int32Array, counts: Int32Array) -> None:
        """Counts the drafts of a step.

        Args:
            rows: int64 ``[S]``, each once.
            num_draft: int32 ``[S]``. Drafts that each verified; those of 0 do not count.
            counts: int32 ``[S]``. Tokens that were appended to each, at least 1.
        """
        did = num_draft.nonzero()[0]
        if not did.size:
            return
        state, rows = self._rows, rows[did]
        positions = np.arange(self._totals.shape[1] - 2)
        new = np.empty((did.size, self._totals.shape[1]), dtype=np.int32)
        new[:, 0] = 1
        new[:, 1] = num_draft[did]
        new[:, 2:] = positions < counts[did, None] - 1
        state.add_draft_use(rows, new)
        np.add.at(self._totals, state.source[rows], new)

    def take(self, rows: NDArray[np.int64]) -> list[DraftUse | None]:
        """Returns all drafts of each row's request (int64 ``[n]``) for its next report; None where they have not changed."""
        news: list[DraftUse | None] = [None] * rows.size
        fresh = self._rows.take_changed_drafts(rows)
        if fresh.size:
            for index, counts in zip(fresh.tolist(), self._rows.draft_use[rows[fresh]].tolist(), strict=True):
                news[index] = _use(counts)
        return news

    def stats(self) -> DraftStats:
        """Returns the counts until now; empty without speculation."""
        if self._totals.shape[1] == 2:
            return DraftStats()
        by_source = dict(zip(SOURCES, map(_use, self._totals.tolist()), strict=True))
        chosen = {str(number): count for number, count in sorted(self._chosen.items())}
        if self._history is None:
            return DraftStats(by_source, chosen)
        found = {"found": self._num_found, "none": self._num_searched - self._num_found}
        return DraftStats(by_source, chosen, found, self._history.num_tokens)

    def _mean_context(self, rows: NDArray[np.int64]) -> float:
        return float(self._rows.known[rows].mean())


def _use(counts: list[int]) -> DraftUse:
    verify_steps, proposed, *accepted = counts
    return DraftUse(verify_steps, proposed, tuple(accepted))
