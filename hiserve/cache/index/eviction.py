"""Which unlocked leaf loses its pages first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from hiserve.cache.index.node import Node

ON_DEVICE: Callable[[Node], bool] = attrgetter("is_evictable")
ON_HOST: Callable[[Node], bool] = attrgetter("is_host_evictable")


class Eviction(Protocol):
    """A persistent structure over the evictable leaves of one tier; never rebuilt per call.

    Attributes:
        leaves: By owner, in the order in which they go.
        age: A node's place among those of equal ``Node.turn``.
    """

    leaves: OwnedHeaps
    age: Callable[[Node], Any]

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was."""

    def pop(self) -> Node | None:
        """Returns the next victim, whoever owns it, and forgets it; None when nothing is evictable."""


class LruEviction:
    """Least recently used first, by the tree's logical clock; what would be lost after what lies elsewhere, too.

    Args:
        is_victim: What makes a node evictable; ``ON_DEVICE`` or ``ON_HOST``.
    """

    age: Callable[[Node], Any] = attrgetter("last_used")

    def __init__(self, is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        self.leaves = OwnedHeaps(attrgetter("turn", "last_used"), is_victim)

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self.leaves.add(node)

    def pop(self) -> Node | None:
        """Returns the least recently used evictable leaf and forgets it. O(log n) amortised."""
        return self.leaves.pop()


class PriorityEviction:
    """What only requests of low priority used first; of the same priority, as ``LruEviction``.

    Args:
        is_victim: What makes a node evictable; ``ON_DEVICE`` or ``ON_HOST``.
    """

    age: Callable[[Node], Any] = attrgetter("priority", "last_used")

    def __init__(self, is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        self.leaves = OwnedHeaps(attrgetter("priority", "turn", "last_used"), is_victim)

    def add(self, node: Node) -> None:
        """Records that ``node`` became evictable, or was used while it was. O(log n)."""
        self.leaves.add(node)

    def pop(self) -> Node | None:
        """Returns the evictable leaf of the lowest priority and forgets it. O(log n) amortised."""
        return self.leaves.pop()


class OwnedHeaps:
    """Leaves by rank, those of each owner apart.

    Args:
        rank: A node's place.
        is_victim: What makes a node one of them.
    """

    def __init__(self, rank: Callable[[Node], Any], is_victim: Callable[[Node], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heaps: dict[bytes, LeafHeap] = {}

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return sum(len(heap) for heap in self._heaps.values())

    def __iter__(self) -> Iterator[Node]:
        """Walks the nodes whose entries count (for checks)."""
        return (node for heap in self._heaps.values() for node in heap)

    def add(self, node: Node) -> None:
        """Records that ``node`` became one of them, or changed its place. O(log n)."""
        heap = self._heaps.get(node.owner)
        if heap is None:
            heap = self._heaps[node.owner] = LeafHeap(self._rank, partial(self._is_leaf_of, node.owner))
        heap.add(node)

    def _is_leaf_of(self, owner: bytes, node: Node) -> bool:
        """Whether a node is one of them, and still the owner's (see ``Tiers.hand_over``)."""
        return node.owner == owner and self._is_victim(node)

    def sweep(self) -> None:
        """Drops all entries that are out of date, and so the nodes that they keep from being freed. O(n log n)."""
        for owner, heap in list(self._heaps.items()):
            heap.sweep()
            if not len(heap):
                del self._heaps[owner]

    def head(self, owner: bytes) -> Any:
        """Returns the lowest rank of an owner's leaves, or None. O(log n) amortised."""
        heap = self._heaps.get(owner)
        head = heap.head() if heap is not None else None
        if heap is not None and head is None:
            del self._heaps[owner]
        return head

    def pop(self, owner: bytes | None = None) -> Node | None:
        """Returns the first leaf of an owner, or of all, and forgets it."""
        if owner is None and len(self._heaps) == 1:
            (owner,) = self._heaps
        elif owner is None:
            heads = [(head, each) for each in list(self._heaps) if (head := self.head(each)) is not None]
            owner = min(heads)[1] if heads else b""
        heap = self._heaps.get(owner)
        return None if heap is None else heap.pop()


class LeafHeap:
    """Leaves by rank, lowest first.

    A heap with lazy deletion: an entry counts only while its node is one of them and has the rank that
    it was added with. Entries out of date are dropped when they surface, and all at once when they
    outnumber the rest, so the heap stays within a constant factor of the leaves.

    Args:
        rank: A node's place. Whoever changes it adds the node again.
        is_victim: What makes a node one of them.
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
        """Records that ``node`` became one of them, or changed its place. O(log n)."""
        self._serial += 1
        heapq.heappush(self._heap, (self._rank(node), self._serial, node))
        if len(self._heap) >= self._sweep_at:
            self.sweep()

    def head(self) -> Any:
        """Returns the lowest rank, or None. O(log n) amortised."""
        while self._heap:
            if self._counts(self._heap[0]):
                return self._heap[0][0]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Node | None:
        """Returns the leaf of the lowest rank and forgets it; of equals, the first added. O(log n) amortised."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                return entry[2]
        return None

    def _counts(self, entry: tuple[Any, int, Node]) -> bool:
        rank, _, node = entry
        return bool(self._rank(node) == rank) and self._is_victim(node)

    def sweep(self) -> None:
        """Drops all entries that are out of date. O(n log n)."""
        latest = {id(entry[2]): entry for entry in self._heap if self._counts(entry)}
        self._heap = sorted(latest.values(), key=lambda entry: entry[:2])
        self._sweep_at = max(1024, 2 * len(self._heap))
