"""Sends the worker's reports, and merges them while the scheduler is slow."""

from __future__ import annotations

from collections import deque

from hiserve.ipc.channel import PollingChannel
from hiserve.ipc.codec import Frames, encode
from hiserve.ipc.messages import CacheFlushed, CacheInspected, Ready, StepReport, WorkerStats
from hiserve.ipc.updates import MergedUpdates, RequestUpdates


class ReportSender:
    """Sends at once what the scheduler takes at once; never blocks.

    Args:
        channel: To the scheduler.
        incarnation: Stamped on every report.
    """

    def __init__(self, channel: PollingChannel, incarnation: int) -> None:
        self._channel = channel
        self._incarnation = incarnation
        self._answers: deque[Frames] = deque()
        self._late = MergedUpdates()
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
            self._send(updates, stats)
            return
        self._late.merge(updates)
        self._late_stats = stats

    def flush(self) -> None:
        """Sends what waits, as far as the scheduler takes it."""
        while self._answers and self._channel.try_send(self._answers[0]):
            self._answers.popleft()
        if self._late_stats is not None and not self._answers and self._channel.is_writable:
            self._send(self._late.take(), self._late_stats)
            self._late_stats = None

    def _send(self, updates: RequestUpdates, stats: WorkerStats) -> None:
        # It was writable a moment ago; if it is not, the scheduler is gone and so are we, soon.
        self._channel.try_send(encode(StepReport(self._incarnation, updates, stats)))
