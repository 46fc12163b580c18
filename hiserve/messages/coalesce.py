"""News that a slow peer has not taken yet, merged per request so that memory stays bounded."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.messages.types import Tokens

UNREPORTED = -1


@dataclass(slots=True)
class _Row:
    finish: int = 0
    cached: int = UNREPORTED
    tokens: array[int] = field(default_factory=lambda: array("i"))


class Coalescer:
    """Holds at most one row per request, whatever the number of reports added.

    Its size is bounded by the live requests and the tokens they may generate.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, news: Tokens, tokens: Int32Array) -> None:
        """Merges a report: tokens are appended, the finish is the latest, ``cached`` the first that is known."""
        start = 0
        for uid, count, finish, cached in zip(news.uids, news.counts, news.finishes, news.cached, strict=True):
            row = self._rows.setdefault(uid, _Row())
            row.tokens.frombytes(tokens[start : start + count].tobytes())
            row.finish = finish
            if row.cached == UNREPORTED:
                row.cached = cached
            start += count

    def take(self) -> tuple[Tokens, Int32Array]:
        """Returns everything held, in order of first arrival, and forgets it."""
        rows, self._rows = self._rows, {}
        news = Tokens(
            uids=list(rows),
            counts=[len(row.tokens) for row in rows.values()],
            finishes=[row.finish for row in rows.values()],
            cached=[row.cached for row in rows.values()],
        )
        parts = [np.frombuffer(row.tokens, dtype=np.int32) for row in rows.values() if row.tokens]
        return news, np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
