"""What a run says about itself while it lasts."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TypeAlias

from hiserve.bench.summary import ttft_s
from hiserve.bench.workload import Sample

# Called after each of the things that are counted, with what has been measured so far, in words.
Advance: TypeAlias = Callable[[str], None]
# Called with the total; None if it is unknown.
Begin: TypeAlias = Callable[[int | None], Advance]


class SoFar:
    """Figures of the requests that have ended; says them after each one."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._begin_s = float("inf")
        self._num_ok = 0
        self._num_failed = 0
        self._num_output = 0
        self._num_prompt = 0
        self._num_cached = 0
        self._ttfts_s: list[float] = []

    def add(self, sample: Sample) -> None:
        """Takes a request that has ended."""
        self._begin_s = min(self._begin_s, sample.begin_s)
        if sample.error:
            self._num_failed += 1
        else:
            self._num_ok += 1
            self._num_output += sample.num_output
            self._num_prompt += max(0, sample.num_prompt)
            self._num_cached += max(0, sample.num_cached)
            if (first_s := ttft_s(sample)) is not None:
                bisect.insort(self._ttfts_s, first_s)
        self._advance(self._words(sample.end_s))

    def _words(self, now_s: float) -> str:
        words = [f"{self._num_output / max(now_s - self._begin_s, 1e-9):,.0f} tokens/s"]
        if self._ttfts_s:
            words.append(f"TTFT {self._ttfts_s[len(self._ttfts_s) // 2] * 1e3:,.0f} ms")
        if self._num_cached:
            words.append(f"{self._num_cached / self._num_prompt:.0%} cached")
        if self._num_failed:
            words.append(f"{self._num_failed:,} failed")
        return ", ".join(words)
