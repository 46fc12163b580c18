"""Whether processes live, and what a test leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hiserve.scheduler.worker_process import usage_of


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    """Direct children of a process, over all its threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def output_of(command: Sequence[str], limit_s: float, cwd: Path) -> str:
    """Returns what a command and the processes it starts print; at the limit all of them are killed.

    Raises:
        subprocess.TimeoutExpired: One of them had not ended after ``limit_s``.
        subprocess.CalledProcessError: The command failed.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True) as child:
        try:
            printed = child.communicate(timeout=limit_s)[0].decode()
        finally:
            if child.returncode is None:  # not reaped, so the number of its group is still its own
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, printed)
    return printed


def wait_dead(pids: Iterable[int], timeout_s: float = 60.0) -> None:
    """Waits until all processes are gone, and says which is not."""
    deadline = time.monotonic() + timeout_s
    left = set(pids)
    while left := {pid for pid in left if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still alive after {timeout_s} s: {sorted(left)}"
        time.sleep(0.01)


def wait_resting(pid: int, rest_s: float = 1.0, timeout_s: float = 120.0) -> None:
    """Waits until a process neither computed nor wanted to for a while, so that a machine that is busy looks like no rest."""
    deadline = rested_s = time.monotonic()
    deadline += timeout_s
    before = usage_of(pid)
    while time.monotonic() - rested_s < rest_s:
        assert time.monotonic() < deadline, f"{pid} still computes after {timeout_s} s"
        time.sleep(0.02)
        now = usage_of(pid)
        if now is None or before is None or now.wants_cpu or now.cpu_s > before.cpu_s + 0.015:  # a tick is a heartbeat
            rested_s, before = time.monotonic(), now


def others_rest() -> bool:
    """Whether all other threads of this process sleep, and none of them has work that it was not given the CPU for."""
    own = threading.get_native_id()
    for _ in range(3):  # one may wake another that was looked at before
        others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
        try:
            states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in others}
        except (FileNotFoundError, ProcessLookupError):  # one has just ended
            return False
        if states - {"S"}:
            return False
    return True


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
