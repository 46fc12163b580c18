"""Measures the way from the death of a worker to the first news of a request from a later one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hiserve.ipc.lifecycle import Recovery
from hiserve.scheduler.worker_process import WorkerProcess


@dataclass(slots=True)
class _OpenRecovery:
    """A recovery under way.

    Attributes:
        dead: Who died.
        reaped_s: When nothing was left of it.
        num_requests: That it held.
    """

    dead: WorkerProcess
    reaped_s: float
    num_requests: int


class RecoveryTimes:
    """One for each replica at a time. If a successor dies before any news, the first death is where the way began.

    Attributes:
        last: The latest that came to its end.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenRecovery] = {}
        self.last: Recovery | None = None

    def begin(self, dead: WorkerProcess, num_requests: int) -> None:
        """A worker is gone; nobody waits for news where it held nothing."""
        if num_requests and dead.replica not in self._open:
            self._open[dead.replica] = _OpenRecovery(dead, time.monotonic(), num_requests)

    def on_idle(self, replica: int) -> None:
        """A successor has nothing to do: what the worker before it held runs elsewhere, or has ended."""
        self._open.pop(replica, None)

    def first_output(self, worker: WorkerProcess) -> None:
        """A worker told news of a request."""
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
