"""A measured figure beside its bar, the table of them, and the gate's counts as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hiserve.ipc.messages import GateCounts
from hiserve.runners.gate import Action, Reason

# Why a step runs eagerly that no graph is made for, whatever else goes on. Any other reason is a replay that was lost: loads,
# a page that moved, a capture or a replay that failed.
NOT_ELIGIBLE = frozenset(
    reason.value for reason in (Reason.TOKENS, Reason.ROWS, Reason.CONTEXT, Reason.WIDTH, Reason.GRAPHS_OFF)
)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        ratio: The value against its limit or peer, larger is better; None where there is nothing to compare with.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    bar: float | None = None  # least ratio; None where there is no bar
    against: str = ""  # what the ratio compares with

    @property
    def is_met(self) -> bool:
        return self.bar is None or (self.ratio is not None and self.ratio >= self.bar)

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "ok" if self.is_met else "MISSED"


def table(figures: Iterable[dict[str, Any]]) -> str:
    rows = [("figure", "value", "", "ratio", "bar", "")]
    for each in (Figure(**given) for given in figures):
        ratio, bar = ("-" if number is None else f"{number:.3f}" for number in (each.ratio, each.bar))
        rows.append((each.name, f"{each.value:.4g}", each.unit, ratio, bar, each.verdict))
    return "\n".join(f"{row[0]:<46} {row[1]:>9} {row[2]:<8} {row[3]:>7} {row[4]:>7} {row[5]}".rstrip() for row in rows)


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
