"""How long a worker has ended no step, by time that was its own: what the machine kept from it does not count."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Of the time that was its own: a worker that computed for so much of it was slow, not hung.
ALIVE_SHARE = 0.25
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12  # fields of /proc/PID/stat behind the command's name


class CpuUsage(NamedTuple):
    """What a process makes of the machine.

    Attributes:
        cpu_s: CPU time of all its threads until now, in seconds.
        wants_cpu: One of its threads is on a CPU, or waits for one.
    """

    cpu_s: float
    wants_cpu: bool


def usage_of(pid: int, proc: Path = Path("/proc")) -> CpuUsage | None:
    """Asks the kernel; None where it does not tell, as of a process that is gone.

    Args:
        pid: The process.
        proc: Where the kernel's files are.
    """
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
    """Times are of ``time.monotonic``.

    A worker that wants a CPU is charged the CPU time it got; one that does not, as it sleeps or waits for a device, is
    charged the time that passed: nobody keeps the machine from it.

    Attributes:
        since_s: When it last ended a step, or had no work.
        sampled_s: When it was looked at last.
        own_s: Seconds since then that were its own.
        computed_s: Of them, those in which it computed.
        cpu_s: CPU time it had at the last look; None if nobody asked.
    """

    since_s: float
    sampled_s: float = 0.0
    own_s: float = 0.0
    computed_s: float = 0.0
    cpu_s: float | None = None

    def end(self, now_s: float) -> None:
        """The worker got on, or has nothing to do."""
        self.since_s = now_s
        self.own_s = self.computed_s = 0.0

    def extend_deadline(self, seconds: float) -> None:
        """Nobody looked for so long: what it said meanwhile was not heard."""
        self.since_s += seconds
        self.sampled_s += seconds

    def sample(self, now_s: float, usage: CpuUsage | None) -> None:
        """Charges the worker the time since the last look, or since it got on.

        Args:
            now_s: Now.
            usage: Of its process; None charges all of the time.
        """
        passed_s = max(0.0, now_s - max(self.sampled_s, self.since_s))
        computed_s = 0.0 if usage is None or self.cpu_s is None else min(passed_s, max(0.0, usage.cpu_s - self.cpu_s))
        is_kept_waiting = usage is not None and self.cpu_s is not None and usage.wants_cpu
        self.own_s += computed_s if is_kept_waiting else passed_s
        self.computed_s += computed_s
        self.sampled_s, self.cpu_s = now_s, None if usage is None else usage.cpu_s

    @property
    def is_alive(self) -> bool:
        """Whether it computed for much of its time: a step that takes long looks like this, a deadlock does not."""
        return self.computed_s > ALIVE_SHARE * self.own_s
