"""One life of a worker: its process, what it said, and when it last got on with its work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hiserve.errors import HiserveError
from hiserve.ipc.lifecycle import CrashSnapshot
from hiserve.ipc.messages import Ready, WorkerFacts, WorkerStats
from hiserve.ipc.parent import ChildProcess
from hiserve.scheduler.progress_watch import ProgressWatch

# Weights may come from a slow disk; what a worker takes longer for does not end any more.
MAX_START_S = 3600.0
RECENT_S = 3.0  # a worker that rests says so every second


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker's process. Times are of ``time.monotonic``, which all processes of a machine share.

    Attributes:
        replica: Index from 0.
        number: Of this life, from 1.
        process: The process.
        born_s: When it was started.
        ready_s: When it was ready; 0 before that.
        last_message_s: When it said anything last.
        progress: Since when it has had work and ended no step, and how much of that time was its own.
        fault_s: When it failed, by its own word, or by what was seen last of it; 0 while it lives.
        noticed_s: When that was known here.
        ready: What it said when it was.
        failure: Why it is being replaced.
        snapshot: What it could still tell when it failed.
        stats: Its latest.
    """

    replica: int
    number: int
    process: ChildProcess
    born_s: float = field(default_factory=time.monotonic)
    ready_s: float = 0.0
    last_message_s: float = field(default_factory=time.monotonic)
    progress: ProgressWatch = field(default_factory=lambda: ProgressWatch(time.monotonic()))
    fault_s: float = 0.0
    noticed_s: float = 0.0
    ready: Ready | None = None
    failure: HiserveError | None = None
    snapshot: CrashSnapshot | None = None
    stats: WorkerStats = field(default_factory=WorkerStats)

    def facts(self) -> WorkerFacts:
        """Returns what is known of it."""
        return WorkerFacts(
            replica=self.replica,
            pid=self.process.pid,
            incarnation=self.number,
            startup_s=self.ready.startup_s if self.ready else {},
            num_pages=self.ready.num_pages if self.ready else 0,
            stats=self.stats,
            step_age_s=0.0 if self._is_idle() else self.no_progress_s(time.monotonic()),
        )

    def on_message(self, now_s: float) -> None:
        """It said something."""
        self.last_message_s = now_s

    def on_stats(self, stats: WorkerStats, now_s: float) -> None:
        """It told its stats."""
        if stats.steps != self.stats.steps or not stats.running + stats.waiting:
            self.progress.end(now_s)
        self.stats = stats

    def mark_ready(self, ready: Ready, now_s: float) -> None:
        """It is ready."""
        self.ready, self.ready_s = ready, now_s
        self.progress.end(now_s)
        self.stats = WorkerStats(free_pages=ready.num_pages)

    def no_progress_s(self, now_s: float) -> float:
        """Returns for how long it has had work, and ended no step; a worker that rests is heard of all the time."""
        return max(0.0, now_s - self.progress.since_s) if self.ready else 0.0

    def _is_idle(self) -> bool:
        """Whether it had nothing to do a moment ago, by its own word; what it was given since is news yet to come."""
        return not self.stats.running + self.stats.waiting and self.no_progress_s(time.monotonic()) < RECENT_S

    def mark_failed(self, failure: HiserveError, *, fault_s: float, snapshot: CrashSnapshot | None = None) -> None:
        """Says why it is being replaced; the first word stands."""
        if self.failure is None:
            self.failure, self.snapshot = failure, snapshot
            self.fault_s, self.noticed_s = fault_s, time.monotonic()

    def stuck(self, now_s: float, max_still_s: float) -> str:
        """Returns in which way it is stuck; empty if it is not.

        Args:
            now_s: Now.
            max_still_s: Most of its own time that it may have work and end no step; 0 is no limit.
        """
        if self.ready is None:
            age_s = now_s - self.born_s
            return f"was not ready after {age_s:.0f} s" if age_s > MAX_START_S else ""
        own_s, num_requests = self.progress.own_s, self.stats.running + self.stats.waiting
        if not max_still_s or own_s <= (max_still_s if num_requests else max(max_still_s, RECENT_S)):
            return ""
        times = f"{self.no_progress_s(now_s):.1f} s ({own_s:.1f} s its own, {self.progress.computed_s:.1f} s of them computing)"
        return f"ended no step for {times}; by its last word it had {num_requests} requests"
