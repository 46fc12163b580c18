"""A measured figure beside its bar, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        ratio: The value against its limit or peer, larger is better; None where there is nothing to compare with.
        bar: Least ratio; None where there is no bar.
        against: What the ratio compares with.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    bar: float | None = None
    against: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached; true without one."""
        return self.bar is None or (self.ratio is not None and self.ratio >= self.bar)

    @property
    def verdict(self) -> str:
        """Returns what the table says."""
        return "" if self.bar is None else "ok" if self.is_met else "MISSED"


def table(figures: Iterable[dict[str, Any]]) -> str:
    """Returns a line for each figure, under a heading."""
    rows = [("figure", "value", "", "ratio", "bar", "")]
    for each in (Figure(**given) for given in figures):
        ratio, bar = ("-" if number is None else f"{number:.3f}" for number in (each.ratio, each.bar))
        rows.append((each.name, f"{each.value:.4g}", each.unit, ratio, bar, each.verdict))
    return "\n".join(f"{row[0]:<46} {row[1]:>9} {row[2]:<8} {row[3]:>7} {row[4]:>7} {row[5]}".rstrip() for row in rows)
