"""Reports of worker deaths: state at the crash, recovery, replays."""

from __future__ import annotations

import msgspec


class StepSnapshot(msgspec.Struct, frozen=True):
    """A step in flight at a crash.

    Attributes:
        step: Its number.
        uids: Requests in it, by the scheduler's uids.
        num_tokens: Tokens it computes.
        num_drafts: Of them, drafts to verify.
        waits: Numbers of the loads that it waits for on the device.
        copies: Numbers of the tier copies that its plan ordered.
    """

    step: int
    uids: list[int]
    num_tokens: int
    num_drafts: int
    waits: list[int]
    copies: list[int]


class CrashSnapshot(msgspec.Struct, frozen=True):
    """The state of an engine at its failure, as far as it could be read.

    Attributes:
        steps: In flight, oldest first.
        decision: The gate's last decision: action, reason, and the replayed graph, if any.
        decision_step: The step of that decision.
        pending_ops: Numbers of tier copies that had not ended.
    """

    steps: list[StepSnapshot] = []
    decision: str = ""
    decision_step: int = 0
    pending_ops: list[int] = []


class Crash(msgspec.Struct, frozen=True):
    """The death of a worker.

    Attributes:
        replica: Index from 0.
        incarnation: Its number.
        pid: Process id.
        end: Exit code or signal.
        error: The reason.
        code: The error's code.
        unix_s: Time at which it was noticed, in seconds since 1970.
        num_steps: Steps it had reported.
        uids: Requests it held.
        snapshot: Its own last report; None without one.
    """

    replica: int
    incarnation: int
    pid: int
    end: str
    error: str
    code: str
    unix_s: float
    num_steps: int
    uids: list[int]
    snapshot: CrashSnapshot | None = None


class Recovery(msgspec.Struct, frozen=True):
    """The time from the death of a worker to the first output of a successor.

    Attributes:
        replica: Index from 0.
        incarnation: Of the successor.
        num_requests: Requests that the dead worker held.
        phases: Seconds of each phase, in order. Phases before "exit" are upper bounds: the fault itself is not
            observed.
        total_s: Their sum.
    """

    replica: int
    incarnation: int
    num_requests: int
    phases: dict[str, float]
    total_s: float


class ReplayStats(msgspec.Struct, frozen=True):
    """Requests that continued on another worker. Counters never decrease.

    Attributes:
        requests: Replays.
        tokens: Their prompt tokens and the reply tokens known at that time.
        cached: Of these, the tokens cached by the other worker, by tier.
    """

    requests: int = 0
    tokens: int = 0
    cached: dict[str, int] = {}
