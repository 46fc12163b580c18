"""Which cases of a test run each time, and which behind ``make test-wide`` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import cycle, product
from typing import Any

import pytest


def usual(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns cases as parameters: first some in which each value of each factor occurs, then all others, which are ``wide``."""
    left = [(case, set(enumerate(case))) for case in cases]
    wanted = {each for _, its in left for each in its}
    found = []
    while wanted:
        best = max(left, key=lambda each: len(wanted & each[1]))
        left.remove(best)
        found.append(best[0])
        wanted -= best[1]
    return [*(pytest.param(case) for case in found), *(pytest.param(case, marks=pytest.mark.wide) for case, _ in left)]


def some(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """Returns cases as parameters: those named are usual, all others ``wide``; a case of several values is a tuple."""
    cases = list(cases)
    assert set(usual) <= set(cases), f"{set(usual) - set(cases)} are none of {cases}"
    found = []
    for case in cases:
        values: Collection[Any] = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in usual else pytest.mark.wide))
    return found


def in_turn(cases: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns each case with each value as parameters: usual is each case with one value, which take turns; all else is ``wide``."""
    cases, values = list(cases), list(values)
    assert len(cases) >= len(values), f"{len(cases)} cases have no turn for each of {len(values)} values"
    return some(product(cases, values), *zip(cases, cycle(values), strict=False))
