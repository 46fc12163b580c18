"""What the worker has to say, kept and merged while the scheduler is too slow to listen."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from hiserve.core.plan import Int32Array
from hiserve.engine.updates import RequestUpdates
from hiserve.ipc.channel import PollingChannel
from hiserve.ipc.coalesce import UNREPORTED, Coalescer
from hiserve.ipc.codec import Frames, encode, split_digests
from hiserve.ipc.messages import CacheFlushed, CacheInspected, Ready, StepReport, Tokens, WorkerStats


class ReportSender:
    """Sends at once what the scheduler takes at once; never blocks.

    While the scheduler is slow, reports are merged per request, so that memory is bounded by
    the requests the worker holds, and page digests by the pages of its cache.

    Args:
        channel: To the scheduler.
        incarnation: Stamped on every report.
    """

    def __init__(self, channel: PollingChannel, incarnation: int) -> None:
        self._channel = channel
        self._incarnation = incarnation
        self._answers: deque[Frames] = deque()
        self._late = Coalescer()
        self._late_failed: list[tuple[int, str, str]] = []
        self._late_pages: Counter[bytes] = Counter()  # by digest: tiers that gained the page less those that lost it
        self._late_stats: WorkerStats | None = None

    @property
    def is_pending(self) -> bool:
        """Whether something waits for the scheduler."""
        return bool(self._answers) or self._late_stats is not None

    def answer(self, message: Ready | CacheFlushed | CacheInspected) -> None:
        """Sends a message of which there are few."""
        self._answers.append(encode(message))
        self.flush()

    def report(self, updates: RequestUpdates, stats: WorkerStats) -> None:
        """Sends a report, or merges it with those that wait."""
        if not self.is_pending and self._channel.is_writable:
            self._send(
                updates, updates.tokens, updates.scores, updates.failed, stats, updates.published, updates.removed
            )
            return
        news = Tokens(
            uids=updates.uids,
            counts=updates.counts,
            finishes=updates.finishes,
            cached=updates.cached,
            drafts=updates.drafts,
            score_words=updates.score_words,
            queue_s=[UNREPORTED] * len(updates.uids),
        )
        self._late.add(news, updates.tokens, updates.scores)
        self._late_failed += updates.failed
        self._count_pages(split_digests(updates.published), 1)
        self._count_pages(split_digests(updates.removed), -1)
        self._late_stats = stats

    def _count_pages(self, digests: Iterable[bytes], change: int) -> None:
        """Counts what tiers gained or lost; a page of which nothing is left to tell leaves no entry."""
        for digest in digests:
            count = self._late_pages[digest] + change
            if count:
                self._late_pages[digest] = count
            else:
                del self._late_pages[digest]

    def flush(self) -> None:
        """Sends what waits, as far as the scheduler takes it."""
        while self._answers and self._channel.try_send(self._answers[0]):
            self._answers.popleft()
        if self._late_stats is not None and not self._answers and self._channel.is_writable:
            news, tokens, scores = self._late.take()
            pages, self._late_pages = self._late_pages, Counter()
            published, removed = b"".join(pages.elements()), b"".join((-pages).elements())
            self._send(news, tokens, scores, self._late_failed, self._late_stats, published, removed)
            self._late_failed, self._late_stats = [], None

    def _send(
        self,
        news: RequestUpdates | Tokens,
        tokens: Int32Array,
        scores: bytes,
        failed: list[tuple[int, str, str]],
        stats: WorkerStats,
        published: bytes,
        removed: bytes,
    ) -> None:
        message = StepReport(
            incarnation=self._incarnation,
            uids=news.uids,
            counts=news.counts,
            finishes=news.finishes,
            cached=news.cached,
            drafts=news.drafts,
            score_words=news.score_words,
            failed=failed,
            stats=stats,
        )
        # It was writable a moment ago; if it is not, the scheduler is gone and so are we, soon.
        self._channel.try_send(encode(message, tokens, scores, published, removed))
