"""One incarnation of a worker: its process, its time without progress, and the recovery by its successor."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hiserve.errors import HiserveError
from hiserve.ipc.child import ChildProcess
from hiserve.ipc.lifecycle import CrashSnapshot, Recovery
from hiserve.ipc.messages import Ready, WorkerFacts, WorkerStats

MAX_START_S = 3600.0  # weights may come from a slow disk
RECENT_S = 3.0  # an idle worker reports every second
COMPUTING_SHARE = 0.25  # of the charged time; a worker with more CPU time was slow, and did not hang
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12  # fields of /proc/PID/stat after the command's name


class CpuUsage(NamedTuple):
    """A process's use of CPUs."""

    cpu_s: float  # CPU time of all its threads until now, in seconds
    wants_cpu: bool  # one of its threads is on a CPU, or waits for one


def usage_of(pid: int, proc: Path = Path("/proc")) -> CpuUsage | None:
    """Reads a process's CPU usage from ``proc``; None if it cannot be read, as for a process that is gone."""
    try:
        fields = _fields(proc / str(pid) / "stat")
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return None
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return CpuUsage(ticks / _CLOCK_TICKS_PER_S, any(map(_wants_cpu, threads)))


def _wants_cpu(thread: Path) -> bool:
    with suppress(OSError):  # it has ended
        return _fields(thread / "stat")[_STATE] == b"R"
    return False


def _fields(stat: Path) -> list[bytes]:
    return stat.read_bytes().rpartition(b")")[2].split()


@dataclass(slots=True)
class ProgressWatch:
    """A worker's time without progress. Times are of ``time.monotonic``.

    A worker that wants a CPU is charged the CPU time it got, because other processes may occupy the CPUs. One that
    sleeps or waits for a device is charged the elapsed time.
    """

    since_s: float  # time at which it last ended a step, or had no work
    sampled_s: float = 0.0  # time of the last sample
    own_s: float = 0.0  # seconds charged since ``since_s``
    computed_s: float = 0.0  # of them, CPU time
    cpu_s: float | None = None  # CPU time of the process at the last sample; None before one

    def end(self, now_s: float) -> None:
        """Records a step, or that there is no work."""
        self.since_s = now_s
        self.own_s = self.computed_s = 0.0

    def extend_deadline(self, seconds: float) -> None:
        """Excludes time in which the calling process was stopped and read no messages."""
        self.since_s += seconds
        self.sampled_s += seconds

    def sample(self, now_s: float, usage: CpuUsage | None) -> None:
        """Charges the time since the last sample or progress; all of it if ``usage`` is None."""
        passed_s = max(0.0, now_s - max(self.sampled_s, self.since_s))
        computed_s = 0.0 if usage is None or self.cpu_s is None else min(passed_s, max(0.0, usage.cpu_s - self.cpu_s))
        is_runnable = usage is not None and self.cpu_s is not None and usage.wants_cpu
        self.own_s += computed_s if is_runnable else passed_s
        self.computed_s += computed_s
        self.sampled_s, self.cpu_s = now_s, None if usage is None else usage.cpu_s

    @property
    def is_computing(self) -> bool:
        """Whether it computed for much of the time, as in a long step; a deadlocked worker does not."""
        return self.computed_s > COMPUTING_SHARE * self.own_s


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker's process. Times are of ``time.monotonic``, which all processes of a machine share."""

    replica: int
    number: int  # incarnation, from 1
    process: ChildProcess
    born_s: float = field(default_factory=time.monotonic)
    ready_s: float = 0.0  # time of ``Ready``; 0 before that
    last_message_s: float = field(default_factory=time.monotonic)
    # Time since its last step while it has work, and the part of that time that was its own
    progress: ProgressWatch = field(default_factory=lambda: ProgressWatch(time.monotonic()))
    fault_s: float = 0.0  # time of its failure, as it reported or from its last message; 0 while it lives
    noticed_s: float = 0.0  # time at which the failure was known here
    ready: Ready | None = None
    failure: HiserveError | None = None  # reason for its replacement
    snapshot: CrashSnapshot | None = None  # state of its engine at the failure, if it could report it
    stats: WorkerStats = field(default_factory=WorkerStats)  # the latest
    has_output: bool = False  # it reported output of a request

    def facts(self) -> WorkerFacts:
        """Returns its state for ``/server_info``."""
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
        """Records the arrival of a message."""
        self.last_message_s = now_s

    def on_stats(self, stats: WorkerStats, now_s: float) -> None:
        """Records stats, and progress when they show some."""
        if stats.steps != self.stats.steps or not stats.running + stats.waiting:
            self.progress.end(now_s)
        self.stats = stats

    def mark_ready(self, ready: Ready, now_s: float) -> None:
        """Records that it can take requests."""
        self.ready, self.ready_s = ready, now_s
        self.progress.end(now_s)
        self.stats = WorkerStats(free_pages=ready.num_pages)

    def no_progress_s(self, now_s: float) -> float:
        """Returns seconds without progress; an idle worker reports every second, which counts as progress."""
        return max(0.0, now_s - self.progress.since_s) if self.ready else 0.0

    def _is_idle(self) -> bool:
        """Whether its last stats, at most ``RECENT_S`` old, show no request."""
        return not self.stats.running + self.stats.waiting and self.no_progress_s(time.monotonic()) < RECENT_S

    def mark_failed(self, failure: HiserveError, *, fault_s: float, snapshot: CrashSnapshot | None = None) -> None:
        """Records the reason for its replacement; only the first one."""
        if self.failure is None:
            self.failure, self.snapshot = failure, snapshot
            self.fault_s, self.noticed_s = fault_s, time.monotonic()

    def stuck(self, now_s: float, max_still_s: float) -> str:
        """Returns a description of how it hangs; empty if it does not.

        Args:
            now_s: Now.
            max_still_s: Limit of its own time with work and without a step; 0 is no limit.
        """
        if self.ready is None:
            age_s = now_s - self.born_s
            return f"was not ready after {age_s:.0f} s" if age_s > MAX_START_S else ""
        own_s, num_requests = self.progress.own_s, self.stats.running + self.stats.waiting
        if not max_still_s or own_s <= (max_still_s if num_requests else max(max_still_s, RECENT_S)):
            return ""
        times = f"{self.no_progress_s(now_s):.1f} s ({own_s:.1f} s its own, {self.progress.computed_s:.1f} s of them computing)"
        return f"ended no step for {times}; by its last word it had {num_requests} requests"


@dataclass(slots=True)
class _OpenRecovery:
    """A recovery under way."""

    dead: WorkerProcess
    reaped_s: float  # time at which its process was reaped
    num_requests: int


class RecoveryTimes:
    """Measures recoveries, one per replica at a time. After several deaths, time counts from the first.

    Attributes:
        last: The latest complete one.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenRecovery] = {}
        self.last: Recovery | None = None

    def begin(self, dead: WorkerProcess, num_requests: int) -> None:
        """Begins a recovery, if the dead worker held requests."""
        if num_requests and dead.replica not in self._open:
            self._open[dead.replica] = _OpenRecovery(dead, time.monotonic(), num_requests)

    def on_idle(self, replica: int) -> None:
        """Drops the recovery of an idle successor: the requests run elsewhere, or have ended."""
        self._open.pop(replica, None)

    def first_output(self, worker: WorkerProcess) -> None:
        """Ends the recovery with the first output of a successor."""
        under_way = self._open.pop(worker.replica, None)
        if under_way is None or worker.ready is None:
            return
        dead, now_s = under_way.dead, time.monotonic()
        phases = {
            "detect": dead.noticed_s - dead.fault_s,
            "exit": under_way.reaped_s - dead.noticed_s,
            "wait": worker.born_s - under_way.reaped_s,
            **worker.ready.startup_s,
            "first token": now_s - worker.ready_s,
        }
        self.last = Recovery(
            replica=worker.replica,
            incarnation=worker.number,
            num_requests=under_way.num_requests,
            phases={name: round(seconds, 3) for name, seconds in phases.items()},
            total_s=round(now_s - dead.fault_s, 3),
        )
