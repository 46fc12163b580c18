"""Which unlocked leaf loses its pages first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

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

    A heap with lazy deletion: an entry counts only while its node is evictable and unused
    since. Entries out of date are dropped when they surface, and all at once when they
    outnumber the rest, so the heap stays within a constant factor of the leaves.

    Args:
        is_victim: What makes a node evictable; ``ON_DEVICE`` or ``ON_HOST``.
    """

    def __init__(self, is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        self._is_victim = is_victim
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0
        self._sweep_at = 1024

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self._serial += 1
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def pop(self) -> Node | None:
        """Returns the least recently used evictable leaf and forgets it. O(log n) amortised."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if node.last_used == used and self._is_victim(node):
                return node
        return None

    def _sweep(self) -> None:
        latest: dict[int, tuple[int, int, Node]] = {}
        for entry in self._heap:
            if entry[2].last_used == entry[0] and self._is_victim(entry[2]):
                latest[id(entry[2])] = entry
        self._heap = sorted(latest.values(), key=lambda entry: entry[:2])
        self._sweep_at = max(1024, 2 * len(self._heap))
