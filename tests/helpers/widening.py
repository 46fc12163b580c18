"""Which cases of a test run each time, and which behind ``make test-wide`` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usual(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns cases as parameters: first some in which each value of a factor occurs twice, then all others, which are ``wide``."""
    left = list(cases)
    values = Counter(each for case in left for each in enumerate(case))
    wanted = Counter({each: min(2, count) for each, count in values.items()})
    found = []
    while wanted:
        best = max(left, key=lambda case: len(wanted.keys() & enumerate(case)))
        left.remove(best)
        found.append(best)
        wanted -= Counter(enumerate(best))
    return [*(pytest.param(case) for case in found), *(pytest.param(case, marks=pytest.mark.wide) for case in left)]


def some(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """Returns cases as parameters: those named are usual, all others ``wide``; a case of several values is a tuple."""
    cases = list(cases)
    assert set(usual) <= set(cases), f"{set(usual) - set(cases)} are none of {cases}"
    found = []
    for case in cases:
        values: Collection[Any] = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in usual else pytest.mark.wide))
    return found
