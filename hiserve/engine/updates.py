"""What a step changed, as the scheduler and the caller of an in-process engine see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hiserve.core.cache_usage import CacheUse
from hiserve.core.draft_use import DraftUse
from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.core.request import FinishReason


@dataclass(slots=True)
class RequestUpdates:
    """News of requests, in columns. An entry per request that has news.

    Attributes:
        uids: Requests.
        counts: New tokens of each.
        finishes: ``FinishReason`` of each.
        cached: What of the prompt came from the cache, with the first news of each; None after that.
        drafts: All drafts of each until now; None where nothing is new, and without speculation.
        score_words: Words of four bytes in ``scores``, of each.
        tokens: int32 ``[sum(counts)]``.
        scores: Of prompt tokens, then of generated ones, as ``core.plan.Scores.pack`` writes them.
        failed: (uid, code, message) of requests that ended with an error.
        published: Digests of pages that became readable on a tier, 16 bytes each; once for each tier.
        removed: Digests of pages that cannot be read on a tier any more, likewise.
    """

    uids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    cached: list[CacheUse | None] = field(default_factory=list)
    drafts: list[DraftUse | None] = field(default_factory=list)
    score_words: list[int] = field(default_factory=list)
    tokens: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    scores: bytes = b""
    failed: list[tuple[int, str, str]] = field(default_factory=list)
    published: bytes = b""
    removed: bytes = b""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.uids or self.failed or self.published or self.removed)

    def add_tokens(
        self,
        uids: list[int],
        counts: list[int],
        finishes: list[int],
        cached: list[CacheUse | None],
        drafts: list[DraftUse | None],
        tokens: Int32Array,
    ) -> None:
        """Reports new tokens; arguments as the attributes."""
        self.uids += uids
        self.counts += counts
        self.finishes += finishes
        self.cached += cached
        self.drafts += drafts
        self.score_words += [0] * len(uids)
        self.tokens = np.concatenate((self.tokens, tokens))

    def add_scores(self, scores: list[bytes]) -> None:
        """Adds the scores of the last ``len(scores)`` requests reported, which had none so far."""
        first = len(self.uids) - len(scores)
        self.score_words[first:] = [len(packed) // WORD_BYTES for packed in scores]
        self.scores += b"".join(scores)

    def add_end(self, uid: int, finish: FinishReason) -> None:
        """Reports that a request ended without new tokens."""
        self.uids.append(uid)
        self.counts.append(0)
        self.finishes.append(int(finish))
        self.cached.append(None)
        self.drafts.append(None)
        self.score_words.append(0)
