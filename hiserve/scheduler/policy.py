"""Which waiting request is admitted next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hiserve.scheduler.queue import QueuedRequest

LONGEST_PREFIX_WINDOW = 64


class Policy(Protocol):
    """Chooses among the oldest requests of one caller. One that was overtaken too often is the only one it sees.

    Attributes:
        window: How many of them it wants to see.
    """

    window: int

    def rank(self, priority: int) -> int:
        """Returns the rank of a request in the queue; a larger rank is chosen first.

        Args:
            priority: As the caller gave it.
        """

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the index of the next request.

        Args:
            waiting: At least one request, all of one caller and of his largest rank, oldest first.
            matched: Prompt tokens a worker with credit has cached for a request.
        """


class Fcfs:
    """First come, first served."""

    window = 1

    def rank(self, priority: int) -> int:
        """Returns the same for all."""
        return 0

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the oldest."""
        return 0


class LongestPrefix:
    """The request with the longest cached prefix; the oldest among equals."""

    window = LONGEST_PREFIX_WINDOW

    def rank(self, priority: int) -> int:
        """Returns the same for all."""
        return 0

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the longest match."""
        lengths = [matched(candidate) for candidate in waiting]
        return lengths.index(max(lengths))


class Priority:
    """The largest priority; first come, first served among equals."""

    window = 1

    def rank(self, priority: int) -> int:
        """Returns the priority itself."""
        return priority

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the oldest."""
        return 0


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "longest-prefix": LongestPrefix, "priority": Priority}
