"""Which steps a graph was made for, by the gate's own reasons, and how many of those were replayed."""

from __future__ import annotations

from benchmarks.gpu.figures import Figure
from hiserve.ipc.messages import GateCounts
from hiserve.runners.gate import Action, Reason

# Why a step runs eagerly that no graph is made for, whatever else goes on. Any other reason is a replay that was lost: loads,
# a page that moved, a capture or a replay that failed.
NOT_ELIGIBLE = frozenset(
    reason.value for reason in (Reason.TOKENS, Reason.ROWS, Reason.CONTEXT, Reason.WIDTH, Reason.GRAPHS_OFF)
)


def share_of_eligible(gate: GateCounts) -> float | None:
    """Returns the share of the steps that a graph was made for that were replayed; None without such steps."""
    replayed = sum(gate.get(Action.REPLAY.value, {}).values())
    eager = gate.get(Action.EAGER.value, {})
    lost = sum(gate.get(Action.DEFER.value, {}).values())
    lost += sum(count for reason, count in eager.items() if reason not in NOT_ELIGIBLE)
    return replayed / (replayed + lost) if replayed + lost else None


def share_replayed(gate: GateCounts) -> float:
    """Returns the share of all steps that were replayed."""
    steps = sum(sum(reasons.values()) for reasons in gate.values())
    return sum(gate.get(Action.REPLAY.value, {}).values()) / steps


def replays(gate: GateCounts, bar: float) -> Figure:
    """Returns the share of all steps that were replayed; its ratio is that of the steps that a graph was made for."""
    name = "replayed steps under host traffic, against those that a graph was made for"
    return Figure(name, share_replayed(gate), "of steps", share_of_eligible(gate), bar, "the gate's reasons")
