"""What each process holds over time: memory of its own and open files; and how fast the memory grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

MIB = 2**20
SAMPLE_S = 1.0
WARM_UP = 0.3  # of a life
MAX_WARM_UP_S = 300.0
JUDGED_S = 600.0  # after the warm-up; a shorter run is reported and not judged
MIN_SAMPLES = 5


class ProcessHistory(msgspec.Struct, kw_only=True):
    """One process, from when it was first seen to when it was last seen.

    Attributes:
        times_s: When samples were taken.
        memory_bytes: Resident memory that is not shared, at each of them.
        num_files: Open descriptors, at each of them.
    """

    role: str
    pid: int
    times_s: list[float] = []
    memory_bytes: list[int] = []
    num_files: list[int] = []


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory of a process grew after its warm-up, by a line through the samples.

    Attributes:
        seconds: Between first and last sample after the warm-up.
        mib_per_min: Slope.
        is_judged: It lived long enough for the slope to mean something.
    """

    role: str
    pid: int
    seconds: float
    last_mib: float
    mib_per_min: float
    is_judged: bool


class ProcessMonitor:
    """Samples the processes that a function returns with their roles, again and again; ``lives`` holds them by process."""

    def __init__(self, processes: Callable[[], dict[int, str]]) -> None:
        self._processes = processes
        self.lives: dict[int, ProcessHistory] = {}

    def look(self) -> None:
        """Takes one sample of each process."""
        for pid, role in self._processes().items():
            try:
                resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
                num_files = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue  # it has just died
            if not int(resident):
                continue  # a zombie
            life = self.lives.setdefault(pid, ProcessHistory(role=role, pid=pid))
            life.times_s.append(time.perf_counter())
            life.memory_bytes.append((int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))
            life.num_files.append(num_files)

    def open_files(self) -> dict[str, int]:
        """Returns how many descriptors each role has open now, all its processes together."""
        self.look()
        found: dict[str, int] = {}
        for pid, role in self._processes().items():
            if pid in self.lives:
                found[role] = found.get(role, 0) + self.lives[pid].num_files[-1]
        return found


def growth(life: ProcessHistory) -> Growth | None:
    """Returns how a process grew; None where it was seen too seldom."""
    seconds = np.array(life.times_s) - life.times_s[0]
    begin_s = min(WARM_UP * float(seconds[-1]), MAX_WARM_UP_S)
    is_later = seconds >= begin_s
    if int(is_later.sum()) < MIN_SAMPLES:
        return None
    mib = np.array(life.memory_bytes)[is_later] / MIB
    seconds = seconds[is_later]
    span_s = float(seconds[-1] - seconds[0])
    return Growth(
        role=life.role,
        pid=life.pid,
        seconds=span_s,
        last_mib=float(mib[-1]),
        mib_per_min=60 * float(np.polyfit(seconds, mib, 1)[0]),
        is_judged=span_s >= JUDGED_S,
    )
