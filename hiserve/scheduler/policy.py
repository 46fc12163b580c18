"""Which waiting request is admitted next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hiserve.scheduler.queue import Waiting

LONGEST_PREFIX_WINDOW = 64
MAX_OVERTAKEN = 256


class Policy(Protocol):
    """Chooses among the oldest requests.

    Attributes:
        window: How many of them it wants to see.
    """

    window: int

    def choose(self, waiting: Sequence[Waiting], matched: Callable[[Waiting], int]) -> int:
        """Returns the index of the next request.

        Args:
            waiting: At least one request, oldest first.
            matched: Prompt tokens a worker with credit has cached for a request.
        """


class Fcfs:
    """First come, first served."""

    window = 1

    def choose(self, waiting: Sequence[Waiting], matched: Callable[[Waiting], int]) -> int:
        """Returns the oldest."""
        return 0


class LongestPrefix:
    """The request with the longest cached prefix; the oldest among equals.

    A request is overtaken at most ``MAX_OVERTAKEN`` times, so that none starves.
    """

    window = LONGEST_PREFIX_WINDOW

    def choose(self, waiting: Sequence[Waiting], matched: Callable[[Waiting], int]) -> int:
        """Returns the longest match, or the oldest once it has waited enough."""
        if waiting[0].num_overtaken >= MAX_OVERTAKEN:
            return 0
        lengths = [matched(candidate) for candidate in waiting]
        return lengths.index(max(lengths))


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "longest-prefix": LongestPrefix}
