"""Figures in words, each with its bar and whether it is met, for the page of figures."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.record import spread_text


def bar(sign: str, limit: float, is_met: bool, unit: str = "") -> str:
    return f"({sign} {limit:g}{unit}{'' if is_met else ': missed'})"


def at_most(figure: float, limit: float, unit: str = "") -> str:
    return bar("≤", limit, figure <= limit, unit)


def at_least(figure: float, limit: float, unit: str = "") -> str:
    return bar("≥", limit, figure >= limit, unit)


def against(ours: list[float], theirs: list[float], limit: float) -> str:
    """Returns how many times as fast ours was, round by round, with the bar."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{spread_text(ratios, '.2f', ' ×')} {at_least(statistics.median(ratios), limit)}"


def below(samples: list[float], form: str, unit: str, limit: float) -> str:
    """Returns samples whose median is to be at most the bar."""
    return f"{spread_text(samples, form, unit)} {at_most(statistics.median(samples), limit)}"


def planned(cases: list[dict[str, Any]], name: str) -> list[str]:
    """Returns each case with its spread and bar."""
    lines = []
    for case in cases:
        samples = case["samples"]
        each = samples.get(name) or [sum(both) for both in zip(samples["plan_us"], samples["commit_us"], strict=True)]
        limit, is_met = case["bar_us"], case["median"][name] <= case["bar_us"]
        lines.append(f"{spread_text(each, '.0f', ' µs')} (≤ {limit:.0f}{'' if is_met else ': missed'})")
    return lines
