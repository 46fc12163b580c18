"""Which unlocked leaf loses its pages first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Protocol

from hiserve.cache.index.node import Node

ON_DEVICE: Callable[[Node], bool] = attrgetter("is_evictable")
ON_HOST: Callable[[Node], bool] = attrgetter("is_host_evictable")


class Eviction(Protocol):
    """A persistent structure over the evictable leaves of one tier; never rebuilt per call."""

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was."""

    def pop(self) -> Node | None:
        """Returns the next victim and forgets it; None when nothing is evictable."""


class LruEviction:
    """Least recently used first, by the tree's logical clock.

    Args:
        is_victim: What makes a node evictable; ``ON_DEVICE`` or ``ON_HOST``.
    """

    def __init__(self, is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        self._leaves = LeafHeap(attrgetter("last_used"), is_victim)

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self._leaves.add(node)

    def pop(self) -> Node | None:
        """Returns the least recently used evictable leaf and forgets it. O(log n) amortised."""
        return self._leaves.pop()


class PriorityEviction:
    """What only requests of low priority used first; of the same priority, least recently used first.

    Args:
        is_victim: What makes a node evictable; ``ON_DEVICE`` or ``ON_HOST``.
    """

    def __init__(self, is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        self._leaves = LeafHeap(attrgetter("priority", "last_used"), is_victim)

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self._leaves.add(node)

    def pop(self) -> Node | None:
        """Returns the evictable leaf of the lowest priority and forgets it. O(log n) amortised."""
        return self._leaves.pop()


class LeafHeap:
    """Evictable leaves by rank, lowest first.

    A heap with lazy deletion: an entry counts only while its node is evictable and has the rank that
    it was added with. Entries out of date are dropped when they surface, and all at once when they
    outnumber the rest, so the heap stays within a constant factor of the leaves.

    Args:
        rank: A node's place; changes only with its last use.
        is_victim: What makes a node evictable.
    """

    def __init__(self, rank: Callable[[Node], Any], is_victim: Callable[[Node], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heap: list[tuple[Any, int, Node]] = []
        self._serial = 0
        self._sweep_at = 1024

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Node]:
        """Walks the nodes whose entries count (for checks)."""
        return (entry[2] for entry in self._heap if self._counts(entry))

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self._serial += 1
        heapq.heappush(self._heap, (self._rank(node), self._serial, node))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def pop(self) -> Node | None:
        """Returns the evictable leaf of the lowest rank and forgets it; of equals, the first added. O(log n) amortised."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                return entry[2]
        return None

    def _counts(self, entry: tuple[Any, int, Node]) -> bool:
        rank, _, node = entry
        return bool(self._rank(node) == rank) and self._is_victim(node)

    def _sweep(self) -> None:
        latest = {id(entry[2]): entry for entry in self._heap if self._counts(entry)}
        self._heap = sorted(latest.values(), key=lambda entry: entry[:2])
        self._sweep_at = max(1024, 2 * len(self._heap))
