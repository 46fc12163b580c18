"""What is told of deaths of workers and of what came after: the last scene, the recovery, the replays."""

from __future__ import annotations

import msgspec


class StepSnapshot(msgspec.Struct, frozen=True):
    """A step whose result was not taken in.

    Attributes:
        step: Its number.
        uids: Requests in it, by the scheduler's names.
        num_tokens: Tokens it computes.
        num_drafts: Of them, drafts to verify.
        waits: Loads that it waits for on the device, by number.
        copies: Copies between tiers that its plan ordered, by number.
    """

    step: int
    uids: list[int]
    num_tokens: int
    num_drafts: int
    waits: list[int]
    copies: list[int]


class CrashSnapshot(msgspec.Struct, frozen=True):
    """What an engine was at when it failed, as far as it can still tell.

    Attributes:
        steps: In flight, oldest first.
        verdict: The gate's last: action, reason, and the graph that was replayed, if one was.
        verdict_step: The step that it was about.
        pending_ops: Copies between tiers that were ordered and had not ended, by number.
    """

    steps: list[StepSnapshot] = []
    verdict: str = ""
    verdict_step: int = 0
    pending_ops: list[int] = []


class Crash(msgspec.Struct, frozen=True):
    """The death of a worker.

    Attributes:
        replica: Index from 0.
        incarnation: Its number.
        pid: Process id.
        end: How the process ended: exit code or signal.
        error: Why.
        code: The error's, for programs.
        unix_s: When it was noticed, in seconds since 1970.
        num_steps: Steps it had told of.
        uids: Requests it held.
        scene: What it could still tell itself; None where it could not.
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
    scene: CrashSnapshot | None = None


class Recovery(msgspec.Struct, frozen=True):
    """The way from the death of a worker to the first news of a request from a later one.

    Attributes:
        replica: Index from 0.
        incarnation: Of the worker that told the news.
        num_requests: Requests that the dead one held.
        phases: Seconds of each phase, in order. What precedes "exit" is an upper bound: nobody sees the fault itself.
        total_s: All of them.
    """

    replica: int
    incarnation: int
    num_requests: int
    phases: dict[str, float]
    total_s: float


class ReplayStats(msgspec.Struct, frozen=True):
    """Requests that went on with another worker. Counters never fall.

    Attributes:
        requests: How often one did.
        tokens: Of their prompts and replies, as far as these had come.
        cached: What of these tokens the other worker had, by tier.
    """

    requests: int = 0
    tokens: int = 0
    cached: dict[str, int] = {}
