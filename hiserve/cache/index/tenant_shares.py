"""How many pages of a tier each tenant has, and whose go next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import OwnedHeaps
from hiserve.cache.index.node import Node

MAX_OWNERS = 64  # with shares of their own; all others have one together
MAX_IDLE_TURNOVERS = 32  # a tenant that sends nothing while the tier changes hands so often has no share any more


class TenantShares:
    """Keeps tenants from evicting each other below their shares.

    A share is the tier's pages by the number of tenants that have some and were seen lately. Who has more than
    that gives first, least recently used pages first; what a tenant leaves of its share is lent, because nobody gives
    anything while pages are free.

    Args:
        pages: The tier's.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._held: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}
        self._num_given = 0

    @property
    def held(self) -> dict[bytes, int]:
        """Pages of each owner that has some."""
        return self._held

    def charge(self, owner: bytes, count: int) -> None:
        """An owner has ``count`` pages more, or less."""
        held = self._held.get(owner, 0) + count
        assert held >= 0, f"{-held} pages more were given up than {owner.hex()} had"
        if held:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)
        if count < 0:
            self._num_given -= count
        elif owner not in self._seen:
            self._seen[owner] = self._num_given

    def see(self, owner: bytes) -> None:
        """A request of an owner came."""
        self._seen[owner] = self._num_given
        if len(self._seen) > 4 * MAX_OWNERS:
            self._seen = {each: seen for each, seen in self._seen.items() if each in self._held or each == owner}

    def next(self, leaves: OwnedHeaps) -> Iterator[tuple[Node, int]]:
        """Takes leaves in the order in which they should go.

        The caller charges what goes before it asks for the next. With one owner, this is the order of its leaves.

        Yields:
            A leaf, and how many of its pages its owner should give at most.
        """
        if len(self._held) <= 1:
            while (leaf := leaves.pop()) is not None:
                yield leaf, leaf.num_pages
            return
        for floors in self._floors():
            heads: list[tuple[Any, bytes]] = [(leaves.head(owner), owner) for owner in floors]
            heads = [each for each in heads if each[0] is not None]
            heapq.heapify(heads)
            while heads:
                owner = heads[0][1]
                excess = self._held.get(owner, 0) - floors[owner]
                found = leaves.pop(owner) if excess > 0 else None
                if found is not None:
                    yield found, excess
                head = leaves.head(owner) if found is not None else None
                if head is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (head, owner))

    def _floors(self) -> Iterator[dict[bytes, int]]:
        """Tells down to what each owner gives: its share; where that is not enough, the mean, then nothing."""
        capacity = self._pages.num_ready - 1
        since = self._num_given - MAX_IDLE_TURNOVERS * capacity
        active = {owner for owner in self._held if self._seen[owner] >= since}
        share = capacity // max(1, len(active))
        yield {owner: share if owner in active else 0 for owner in self._held}
        mean = sum(self._held.values()) // max(1, len(self._held))
        yield dict.fromkeys(self._held, mean)
        yield dict.fromkeys(self._held, 0)
