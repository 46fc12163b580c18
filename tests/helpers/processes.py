"""Whether processes live, and what a test leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


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


def wait_dead(pids: Iterable[int], timeout_s: float = 10.0) -> None:
    """Waits until all processes are gone, and says which is not."""
    deadline = time.monotonic() + timeout_s
    left = set(pids)
    while left := {pid for pid in left if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still alive after {timeout_s} s: {sorted(left)}"
        time.sleep(0.01)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
