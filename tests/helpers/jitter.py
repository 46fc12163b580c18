"""Delays on the device wherever streams meet: what is not ordered by an event happens in another order, sooner or later."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hiserve.runners.capture import Graph

SHARE = 0.1  # of the places that a delay is put at
MAX_CYCLES = 400_000  # 0.2 ms
LONG_SHARE, LONG_CYCLES = 0.003, 20_000_000  # 10 ms


class Jitter:
    """Launches kernels that do nothing for a while, now and then.

    Args:
        seed: Of what comes where; threads share it.

    Attributes:
        counts: Delays, by place.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def delay(self, place: str, stream: torch.cuda.Stream | None = None) -> None:
        """Maybe keeps a stream busy; the current one unless given."""
        with self._lock:
            chance, share = self._rng.random(), self._rng.random()
            if chance >= SHARE:
                return
            self.counts[place] += 1
        cycles = LONG_CYCLES if chance < LONG_SHARE else int(MAX_CYCLES * share)
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            torch.cuda._sleep(cycles)


@contextmanager
def jitter(seed: int) -> Iterator[Jitter]:
    """Puts delays around every event that is recorded, every wait for one and every replay, in every thread.

    Events and streams are torch's own, so these are what is patched: no place can be forgotten.
    """
    print(f"jitter seed {seed}")
    made = Jitter(seed)

    def around(name: str, owner: Any, stream_of: Callable[..., torch.cuda.Stream | None]) -> None:
        original = getattr(owner, name)

        def delayed(self: Any, *arguments: Any, **options: Any) -> Any:
            stream = stream_of(self, *arguments, **options)
            made.delay(f"before {name}", stream)
            result = original(self, *arguments, **options)
            made.delay(f"after {name}", stream)
            return result

        patch.setattr(owner, name, delayed)

    with pytest.MonkeyPatch.context() as patch:
        around("record", torch.cuda.Event, lambda event, stream=None: stream)
        around("wait_event", torch.cuda.Stream, lambda stream, event: stream)
        around("replay", Graph, lambda graph: None)
        yield made
