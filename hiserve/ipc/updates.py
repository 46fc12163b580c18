"""The output of requests, from the engine to their readers: as columns in messages, as a ``TokenDelta`` for a reader.

A new fact about requests is a field of ``RequestFacts`` with its rule in ``update``, and a column of
``RequestUpdates``. In the engine, ``Request.note`` adds it to the next report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from hiserve.core.digest import DIGEST_BYTES, split_digests
from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse, DraftUse

UNREPORTED = -1.0
_FINISHES = tuple(FinishReason)  # by number


class RequestFacts(msgspec.Struct, kw_only=True):
    """Facts about one request."""

    cached: CacheUse | None = None  # of the prompt; None before a worker looked, and once reported
    drafts: DraftUse | None = None  # all until now; None when unchanged, and without speculation
    queue_s: float = UNREPORTED  # seconds from acceptance to the first worker; -1 before that, and once reported

    def update(self, later: RequestFacts) -> None:
        """Adds later facts: the latest ``drafts``, the first of the others."""
        if self.cached is None:
            self.cached = later.cached
        if later.drafts is not None:
            self.drafts = later.drafts
        if self.queue_s < 0:
            self.queue_s = later.queue_s


class TokenDelta(RequestFacts):
    """New output of one request."""

    tokens: list[int] = []  # new tokens; may be empty with a finish, with facts, and with scores of the prompt
    finish: FinishReason = FinishReason.RUNNING  # RUNNING until the last delta
    # Of prompt tokens, then of generated ones, as ``core.plan.Scores.pack`` writes them
    scores: bytes | bytearray = b""
    uid: int = 0

    def append(self, later: TokenDelta) -> None:
        """Adds the next delta of the same request."""
        self.update(later)
        self.finish = later.finish
        self.tokens += later.tokens
        if later.scores:
            if not isinstance(self.scores, bytearray):
                self.scores = bytearray(self.scores)
            self.scores += later.scores


class RequestUpdates(msgspec.Struct, array_like=True, tag=True):
    """The changes of one or more steps: a row per request that has output, failures, and pages of the cache.

    Attributes:
        uids: Requests; each occurs once.
        counts: New tokens of each.
        finishes: ``FinishReason`` of each.
        score_words: Words of four bytes in ``scores``, of each.
        cached, drafts, queue_s: As in ``RequestFacts``.
        token_bytes: The tokens of all rows, little-endian int32.
        scores: Those of all rows.
        failed: (uid, code, message) of requests that ended with an error.
        published: Digests of pages that became readable on a tier, 16 bytes each; once for each tier.
        removed: Digests of pages that are no longer readable on a tier; once for each tier.
    """

    uids: list[int] = []
    counts: list[int] = []
    finishes: list[int] = []
    score_words: list[int] = []
    cached: list[CacheUse | None] = []
    drafts: list[DraftUse | None] = []
    queue_s: list[float] = []
    token_bytes: bytes = b""
    scores: bytes = b""
    failed: list[tuple[int, str, str]] = []
    published: bytes = b""
    removed: bytes = b""

    @property
    def tokens(self) -> Int32Array:
        """int32 ``[sum(counts)]``, read-only."""
        return np.frombuffer(self.token_bytes, dtype="<i4")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.uids or self.failed or self.published or self.removed)

    def __iter__(self) -> Iterator[TokenDelta]:
        """Yields the rows."""
        tokens: list[int] = self.tokens.tolist()
        at = score_at = 0
        counted = self.uids, self.counts, self.finishes, self.score_words
        for uid, count, finish, words, cached, drafts, queue_s in zip(
            *counted, self.cached, self.drafts, self.queue_s, strict=True
        ):
            end, score_end = at + count, score_at + WORD_BYTES * words
            yield TokenDelta(
                tokens[at:end],
                _FINISHES[finish],
                self.scores[score_at:score_end],
                uid,
                cached=cached,
                drafts=drafts,
                queue_s=queue_s,
            )
            at, score_at = end, score_end

    def add(self, *deltas: TokenDelta) -> None:
        """Appends a row for each delta."""
        self.extend(
            [delta.uid for delta in deltas],
            [len(delta.tokens) for delta in deltas],
            [int(delta.finish) for delta in deltas],
            np.array([token for delta in deltas for token in delta.tokens], dtype=np.int32),
            [delta.scores for delta in deltas],
            facts=dict(enumerate(deltas)),
        )

    def extend(
        self,
        uids: list[int],
        counts: list[int],
        finishes: list[int],
        tokens: Int32Array,
        scores: Sequence[bytes | bytearray] = (),
        *,
        facts: Mapping[int, RequestFacts],
        drafts: Sequence[DraftUse | None] = (),
    ) -> None:
        """Appends rows given as columns.

        Args:
            uids: Requests.
            counts: New tokens of each.
            finishes: ``FinishReason`` of each.
            tokens: int32 ``[sum(counts)]``.
            scores: Packed scores of each request; empty when none has any.
            facts: New facts, by index into ``uids``.
            drafts: As the attribute; empty if ``facts`` has them.
        """
        start, num_rows = len(self.uids), len(uids)
        self.uids += uids
        self.counts += counts
        self.finishes += finishes
        self.score_words += [len(packed) // WORD_BYTES for packed in scores] if scores else [0] * num_rows
        self.cached += [None] * num_rows
        self.drafts += [None] * num_rows
        self.queue_s += [UNREPORTED] * num_rows
        for index, new in facts.items():
            self.set_facts(start + index, new)
        if drafts:
            self.drafts[start:] = drafts
        self.token_bytes += tokens.astype("<i4", copy=False).tobytes()
        self.scores += b"".join(scores)

    def set_facts(self, index: int, facts: RequestFacts) -> None:
        """Replaces the facts of a row."""
        self.cached[index], self.drafts[index], self.queue_s[index] = facts.cached, facts.drafts, facts.queue_s

    def check(self) -> None:
        """Checks columns that another process wrote.

        Raises:
            ValueError: They contradict each other.
        """
        num_rows, counts, finishes, words = len(self.uids), self.counts, self.finishes, self.score_words
        lengths = [len(column) for column in (counts, finishes, words, self.cached, self.drafts, self.queue_s)]
        if any(length != num_rows for length in lengths):
            raise ValueError(f"columns of {lengths} rows for {num_rows} requests")
        if num_rows and (min(counts) < 0 or min(finishes) < 0 or max(finishes) >= len(_FINISHES) or min(words) < 0):
            raise ValueError(
                f"counts {min(counts)}.., finishes {min(finishes)}..{max(finishes)}, score words {min(words)}.."
            )
        ended = [uid for uid, finish in zip(self.uids, finishes, strict=True) if finish]
        ended += [uid for uid, _, _ in self.failed]
        if len(set(self.uids)) < num_rows or len(set(ended)) < len(ended):
            raise ValueError("a request is named or ended twice")
        if WORD_BYTES * sum(counts) != len(self.token_bytes):
            raise ValueError(f"{sum(counts)} tokens announced, {len(self.token_bytes)} bytes received")
        if WORD_BYTES * sum(words) != len(self.scores):
            raise ValueError(f"{sum(words)} score words announced, {len(self.scores)} bytes received")
        for digests in (self.published, self.removed):
            if len(digests) % DIGEST_BYTES:
                raise ValueError(f"{len(digests)} bytes are no whole number of digests")


class MergedUpdates:
    """Merged updates for a slow receiver.

    Their size is bounded by the output of the live requests, and by the pages of the cache.
    """

    def __init__(self) -> None:
        self._deltas: dict[int, TokenDelta] = {}
        self._failed: list[tuple[int, str, str]] = []
        self._pages: Counter[bytes] = Counter()  # by digest: tiers that gained the page less those that lost it

    def __len__(self) -> int:
        """Returns the number of requests that have output or failed."""
        return len(self._deltas) + len(self._failed)

    def merge(self, updates: RequestUpdates) -> None:
        """Adds the next updates."""
        for delta in updates:
            if (held := self._deltas.setdefault(delta.uid, delta)) is not delta:
                held.append(delta)
        self._failed += updates.failed
        self._count_pages(updates.published, 1)
        self._count_pages(updates.removed, -1)

    def _count_pages(self, digests: bytes, change: int) -> None:
        """Counts tiers that gained or lost pages; a count of 0 is removed."""
        for digest in split_digests(digests):
            count = self._pages[digest] + change
            if count:
                self._pages[digest] = count
            else:
                del self._pages[digest]

    def take(self) -> RequestUpdates:
        """Returns and clears all updates, requests in order of first arrival."""
        deltas, self._deltas = self._deltas, {}
        failed, self._failed = self._failed, []
        pages, self._pages = self._pages, Counter()
        updates = RequestUpdates(
            failed=failed, published=b"".join(pages.elements()), removed=b"".join((-pages).elements())
        )
        updates.add(*deltas.values())
        return updates
