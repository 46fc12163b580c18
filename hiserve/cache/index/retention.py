"""Retained pages: evicted after all others, until a time of the caller's clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.nodes import Node, Tail
from hiserve.cache.index.radix import RadixTree
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import NO_PAGES

QUOTA_SHARE = 4  # an account may retain one in so many pages of the slower tier
MIN_SWEEP = 1024
NO_TIMES: Int64Array = np.empty(0, dtype=np.int64)


class HostTimes:
    """The times until which host pages are retained, on their way to the records, which outlive this process.

    Args:
        num_pages: Host pages, page 0 included.
    """

    def __init__(self, num_pages: int) -> None:
        self._until_s: Int64Array = np.zeros(num_pages, dtype=np.int64)  # 0: nothing to record
        self._added: list[Int32Array] = []

    @property
    def is_empty(self) -> bool:
        """Whether no page was added since ``take``."""
        return not self._added

    def add(self, pages: Int32Array, until_s: int) -> None:
        """Adds pages in use, of parents before those of children: a process that dies has recorded the first."""
        if pages.size:
            self._until_s[pages] = until_s
            self._added.append(pages)

    def drop(self, pages: Int32Array) -> None:
        """Leaves out pages that were freed."""
        if self._added:
            self._until_s[pages] = 0

    def take(self) -> tuple[Int32Array, Int64Array]:
        """Returns the pages added since the last call, int32 ``[K]``, and the time of each, int64 ``[K]``."""
        if not self._added:
            return NO_PAGES, NO_TIMES
        pages = np.concatenate(self._added)
        self._added = []
        pages = pages[self._until_s[pages] > 0]
        until_s: Int64Array = self._until_s[pages]
        self._until_s[pages] = 0
        return pages, until_s


class RetentionQuota:
    """The pages that each account retains, of history and as frames of tails: at most one in ``QUOTA_SHARE`` of a tier.

    Args:
        pages: Of the host; without one, of the device.

    Attributes:
        held: Retained pages of each account that has any.
        num_ignored: Pages that were not retained because their account had its quota.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self.held: dict[bytes, int] = {}
        self.num_ignored = 0

    def room(self, account: bytes) -> int:
        """Returns the pages that an account may retain beside those that it does."""
        return (self._pages.num_ready - 1) // QUOTA_SHARE - self.held.get(account, 0)

    def charge(self, account: bytes, count: int) -> None:
        """Counts retained pages that an account gained, or lost (``count`` < 0)."""
        held = self.held.get(account, 0) + count
        assert held >= 0, f"{-held} pages too many are no longer retained of {account.hex()}"
        self.held[account] = held
        if not held:
            del self.held[account]


Retained = TypeVar("Retained", bound=Node | Tail)


class RetentionEnds(Generic[Retained]):
    """The ends of retention, soonest first; those of what is retained longer now, or no more, may be among them.

    Args:
        retained: Returns all that is retained: when the ends out of date outnumber the others, they are made anew.
    """

    def __init__(self, retained: Callable[[], Iterable[Retained]]) -> None:
        self._retained = retained
        self._heap: list[tuple[int, int, Retained]] = []  # when, a serial number, and a node or a tail
        self._num_added = 0
        self._sweep_at = MIN_SWEEP

    def __len__(self) -> int:
        """Returns the number of ends."""
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, Retained]]:
        """Walks the ends, in any order (for tests)."""
        return ((until_s, each) for until_s, _, each in self._heap)

    def add(self, each: Retained) -> None:
        """Adds the end of a node or a tail whose time was set."""
        heapq.heappush(self._heap, (each.retained_until_s, self._num_added, each))
        self._num_added += 1
        if len(self._heap) >= self._sweep_at:
            self._heap = [(each.retained_until_s, serial, each) for serial, each in enumerate(self._retained())]
            heapq.heapify(self._heap)
            self._num_added = len(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

    def take(self, now_s: int) -> Iterator[Retained]:
        """Removes and yields those whose end was until now or earlier."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]


class Retention:
    """The retained nodes: the leading nodes of paths, each at least as long as its children.

    Args:
        tree: Of the nodes.
        quota: Of the accounts.
        requeue: Called with each node that is no longer retained, or again: the rank of its eviction has changed.
        host_times: Receives the time of each host page that is retained.

    Attributes:
        quota, host_times: As given; for tails too.
    """

    def __init__(
        self, tree: RadixTree, quota: RetentionQuota, requeue: Callable[[Node], object], host_times: HostTimes
    ) -> None:
        self._tree = tree
        self._requeue = requeue
        self.quota = quota
        self.host_times = host_times
        # Of a node and of the nodes above, if they are not retained longer. The node may have left the tree, those above not.
        self.ends = RetentionEnds[Node](lambda: (node for node in tree.nodes() if node.retained_until_s))

    def retain(self, end: Node, num_pages: int, until_s: int, num_beside: int = 0) -> None:
        """Retains the first pages of a locked path, or as many of them as the quota allows, at least until a time.

        Args:
            end: Of the path.
            num_pages: Its leading pages to retain.
            until_s: The time.
            num_beside: Pages of the quota to leave, for a tail.
        """
        nodes: list[Node] = []
        while end.parent is not None:
            nodes.append(end)
            end = end.parent
        num_pages = min(num_pages, sum(node.num_pages for node in nodes))
        last: Node | None = None
        for node in reversed(nodes):
            if num_pages <= 0:
                break
            if node.retained_until_s < until_s:
                room = node.num_pages if node.retained_until_s else self.quota.room(node.account) - num_beside
                count = min(num_pages, node.num_pages, room)
                if count <= 0:
                    self.quota.num_ignored += num_pages
                    break
                last = self._tree.split(node, count) if count < node.num_pages else node
                if not last.retained_until_s:
                    self.quota.charge(last.account, count)
                last.retained_until_s = until_s
                self.host_times.add(last.host_pages, until_s)
                num_pages -= count
                if last is not node and num_pages:
                    self.quota.num_ignored += num_pages
                    break
            else:
                num_pages -= node.num_pages
        if last is not None:
            self.ends.add(last)

    def restore(self, node: Node, until_s: int) -> None:
        """Retains a recovered node, which no lock has, as the process did that recorded the time; without a quota, which it kept."""
        parent = node.parent
        assert parent is not None and not node.retained_until_s, f"{node.num_pages} recovered pages are in use"
        if not parent.is_root:
            until_s = min(until_s, parent.retained_until_s)
        if until_s > 0:
            self.quota.charge(node.account, node.num_pages)
            node.retained_until_s = until_s
            self.ends.add(node)
            self._requeue(node)

    def expire(self, now_s: int) -> None:
        """Ends the retention of nodes that were retained until now or earlier."""
        step: Node | None
        for step in self.ends.take(now_s):
            while step is not None:
                if 0 < step.retained_until_s <= now_s:
                    self.leave(step, step.num_pages)
                    self._requeue(step)
                step = step.parent

    def leave(self, node: Node, count: int) -> None:
        """Forgets the last ``count`` pages of a retained node; others have none."""
        if node.retained_until_s:
            self.quota.charge(node.account, -count)
            if count == node.num_pages:
                node.retained_until_s = 0
