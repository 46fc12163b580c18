"""Reports of worker deaths: state at the crash, recovery, replays."""

from __future__ import annotations

import msgspec


class StepSnapshot(msgspec.Struct, frozen=True):
    """A step in flight at a crash."""

    step: int
    uids: list[int]  # requests in it, by the scheduler's uids
    num_tokens: int  # tokens it computes
    num_drafts: int  # of them, drafts to verify
    waits: list[int]  # numbers of the loads that it waits for on the device
    copies: list[int]  # numbers of the tier copies that its plan ordered


class CrashSnapshot(msgspec.Struct, frozen=True):
    """The state of an engine at its failure, as far as it could be read."""

    steps: list[StepSnapshot] = []  # in flight, oldest first
    decision: str = ""  # the gate's last decision: action, reason, and the replayed graph, if any
    decision_step: int = 0  # its step
    pending_ops: list[int] = []  # numbers of tier copies that had not ended


class Crash(msgspec.Struct, frozen=True):
    """The death of a worker."""

    replica: int
    incarnation: int
    pid: int
    end: str  # exit code or signal
    error: str
    code: str
    unix_s: float  # time at which it was noticed, in seconds since 1970
    num_steps: int  # reported steps
    uids: list[int]
    snapshot: CrashSnapshot | None = None  # the worker's own last report; None without one


class Recovery(msgspec.Struct, frozen=True):
    """The time from the death of a worker to the first output of a successor."""

    replica: int
    incarnation: int  # of the successor
    num_requests: int  # requests that the dead worker held
    # Seconds of each phase, in order. Phases before "exit" are upper bounds: the fault itself is not observed.
    phases: dict[str, float]
    total_s: float


class ReplayStats(msgspec.Struct, frozen=True):
    """Requests that continued on another worker. Counters never decrease."""

    requests: int = 0
    tokens: int = 0  # their prompt tokens and the reply tokens known at that time
    cached: dict[str, int] = {}  # of these, the tokens cached by the other worker, by tier
