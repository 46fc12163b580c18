"""News that a slow peer has not taken yet, merged per request so that memory stays bounded."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from hiserve.core.cache_usage import CacheUse
from hiserve.core.draft_use import DraftUse
from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.ipc.messages import Tokens

UNREPORTED = -1


@dataclass(slots=True)
class _Merged:
    finish: int = 0
    cached: CacheUse | None = None
    drafts: DraftUse | None = None
    queue_s: float = UNREPORTED
    tokens: array[int] = field(default_factory=lambda: array("i"))
    scores: bytearray = field(default_factory=bytearray)


class Coalescer:
    """Holds at most one row per request, whatever the number of reports added.

    Its size is bounded by the live requests, and the tokens and scores they may still have to tell.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Merged] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, news: Tokens, tokens: Int32Array, scores: bytes) -> None:
        """Merges a report.

        Tokens and scores are appended, finish and ``drafts`` are the latest, ``cached`` and ``queue_s`` the first known.

        Args:
            news: Columns, and the arrays that come beside them:
            tokens: int32 ``[sum(counts)]``.
            scores: ``4 * sum(score_words)`` bytes.
        """
        at = score_at = 0
        columns = (news.uids, news.counts, news.finishes, news.cached, news.drafts, news.score_words, news.queue_s)
        for uid, count, finish, cached, drafts, words, queue_s in zip(*columns, strict=True):
            row = self._rows.setdefault(uid, _Merged())
            row.tokens.frombytes(tokens[at : at + count].tobytes())
            row.scores += scores[score_at : score_at + WORD_BYTES * words]
            row.finish = finish
            if row.cached is None:
                row.cached = cached
            row.drafts = drafts or row.drafts
            if row.queue_s == UNREPORTED:
                row.queue_s = queue_s
            at += count
            score_at += WORD_BYTES * words

    def take(self) -> tuple[Tokens, Int32Array, bytes]:
        """Returns everything held, in order of first arrival, and forgets it."""
        rows, self._rows = self._rows, {}
        news = Tokens(
            uids=list(rows),
            counts=[len(row.tokens) for row in rows.values()],
            finishes=[row.finish for row in rows.values()],
            cached=[row.cached for row in rows.values()],
            drafts=[row.drafts for row in rows.values()],
            score_words=[len(row.scores) // WORD_BYTES for row in rows.values()],
            queue_s=[row.queue_s for row in rows.values()],
        )
        parts = [np.frombuffer(row.tokens, dtype=np.int32) for row in rows.values() if row.tokens]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        return news, tokens, b"".join(row.scores for row in rows.values())
