"""What became of drafts, counted by row and by where the row's prompt came from."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hiserve.core.cache_usage import SOURCES
from hiserve.core.draft_use import DraftStats, DraftUse
from hiserve.core.plan import Int32Array
from hiserve.engine.rows import RowState


class DraftCounts:
    """Counts what verifying steps gave; nothing without speculation.

    Args:
        rows: The planner's rows, which hold the counts of their requests.
    """

    def __init__(self, rows: RowState) -> None:
        self._rows = rows
        self._totals = np.zeros((len(SOURCES), rows.draft_use.shape[1]), dtype=np.int64)
        self._chosen: Counter[int] = Counter()

    def chose(self, num_draft: int) -> None:
        """A step was planned that draws tokens and lets so many drafts follow each."""
        self._chosen[num_draft] += 1

    def verified(self, rows: NDArray[np.int64], num_draft: Int32Array, counts: Int32Array) -> None:
        """Rows verified drafts.

        Args:
            rows: int64 ``[S]``, each once.
            num_draft: int32 ``[S]``. Drafts that each verified; those of 0 do not count.
            counts: int32 ``[S]``. Tokens that were appended to each, at least 1.
        """
        did = np.flatnonzero(num_draft)
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
        """Returns what is to be reported of each row (int64 ``[n]``): all its request's drafts; None where nothing is new."""
        news: list[DraftUse | None] = [None] * rows.size
        fresh = self._rows.take_draft_news(rows)
        if fresh.size:
            for index, counts in zip(fresh.tolist(), self._rows.draft_use[rows[fresh]].tolist(), strict=True):
                news[index] = _use(counts)
        return news

    def stats(self) -> DraftStats:
        """Returns everything as of now; nothing without speculation."""
        if self._totals.shape[1] == 2:
            return DraftStats()
        by_source = dict(zip(SOURCES, map(_use, self._totals.tolist()), strict=True))
        return DraftStats(by_source, {str(number): count for number, count in sorted(self._chosen.items())})


def _use(counts: list[int]) -> DraftUse:
    verify_steps, proposed, *accepted = counts
    return DraftUse(verify_steps, proposed, tuple(accepted))
