"""A clock that stands until a test moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that the test sets; a call returns them."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s
