"""A real worker that waits to be killed amid its requests: ``tests.faults.held_worker N:M:TOKENS ENDPOINT``.

The first worker begins when it has N requests and computes nothing more once it has told scores of a prompt. The second begins
with M requests, and stops when it has generated so many TOKENS. So neither is ever done, however long its client or the
scheduler get no CPU. Those after them are sound.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hiserve.config.settings import Settings
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.engine.service import serve
from hiserve.engine.worker import build as build_worker


class Held:
    """An engine that has work from so many requests on, and none any more after so many tokens, or the scores of a prompt.

    Args:
        engine: A real one.
        num_requests: As many were added before its first step.
        num_tokens: After as many, it does no further step; None: after the first scores of a prompt.
    """

    def __init__(self, engine: Any, num_requests: int, num_tokens: int | None) -> None:
        self._engine = engine
        self._num_missing = num_requests
        self._num_tokens = num_tokens
        self._scored: set[int] = set()
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return self._num_missing <= 0 and not self._is_over and bool(self._engine.has_work)

    def add(self, admit: Any, tokens: Any) -> None:
        self._num_missing -= 1
        if admit.sampling.prompt_logprobs is not None:
            self._scored.add(admit.uid)
        self._engine.add(admit, tokens)

    def step(self) -> Any:
        if not self.has_work:
            return None
        updates = self._engine.step()
        if self._num_tokens is not None:
            self._is_over = self._engine.stats().generated_tokens >= self._num_tokens
        elif updates is not None:
            told = zip(updates.uids, updates.score_words, strict=True)
            self._is_over = any(uid in self._scored and num_words for uid, num_words in told)
        return updates


def main(limits: str, endpoint: str) -> int:
    *num_requests, num_tokens = map(int, limits.split(":"))
    path = Path(os.environ["TMPDIR"]) / "lives"
    life = len(path.read_bytes()) if path.exists() else 0
    path.write_bytes(b"." * (life + 1))

    def build(config: Settings, host_fd: int, replica: int, measurements: StartupMeasurements) -> Any:
        engine = build_worker(config, host_fd, replica, measurements)
        return Held(engine, num_requests[life], num_tokens if life else None) if life < 2 else engine

    return serve(endpoint, build)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
