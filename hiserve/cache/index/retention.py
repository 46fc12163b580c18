"""Retained pages: evicted after all others, until a time of the caller's clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.nodes import Node
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


class Retention:
    """The retained nodes: the leading nodes of paths, each at least as long as its children.

    Args:
        tree: Of the nodes.
        pages: Of the host; without one, of the device.
        requeue: Called with each node that is no longer retained, or again: the rank of its eviction has changed.
        host_times: Receives the time of each host page that is retained.

    Attributes:
        host_times: As given.
        held: Retained pages of each account that has any.
        num_ignored: Pages that were not retained because their account had its quota.
    """

    def __init__(
        self, tree: RadixTree, pages: PageAllocator, requeue: Callable[[Node], object], host_times: HostTimes
    ) -> None:
        self._tree = tree
        self._pages = pages
        self._requeue = requeue
        self.host_times = host_times
        # When, a serial number, and a node: it and the nodes above, if they are not retained longer. The node may have
        # left the tree, the nodes above it not.
        self._due: list[tuple[int, int, Node]] = []
        self._num_added = 0
        self._sweep_at = MIN_SWEEP
        self.held: dict[bytes, int] = {}
        self.num_ignored = 0

    @property
    def quota(self) -> int:
        """Most pages that an account may retain."""
        return (self._pages.num_ready - 1) // QUOTA_SHARE

    @property
    def has_ends(self) -> bool:
        """Whether ``expire`` may have anything to end, now or later."""
        return bool(self._due)

    def retain(self, end: Node, num_pages: int, until_s: int) -> None:
        """Retains the first ``num_pages`` of a locked path, or as many of them as the quota allows, at least until a time."""
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
                room = node.num_pages if node.retained_until_s else self.quota - self.held.get(node.account, 0)
                count = min(num_pages, node.num_pages, room)
                if count <= 0:
                    self.num_ignored += num_pages
                    break
                last = self._tree.split(node, count) if count < node.num_pages else node
                if not last.retained_until_s:
                    self.charge(last, count)
                last.retained_until_s = until_s
                self.host_times.add(last.host_pages, until_s)
                num_pages -= count
                if last is not node and num_pages:
                    self.num_ignored += num_pages
                    break
            else:
                num_pages -= node.num_pages
        if last is not None:
            self._add(until_s, last)

    def restore(self, node: Node, until_s: int) -> None:
        """Retains a recovered node, which no lock has, as the process did that recorded the time; without a quota, which it kept."""
        parent = node.parent
        assert parent is not None and not node.retained_until_s, f"{node.num_pages} recovered pages are in use"
        if not parent.is_root:
            until_s = min(until_s, parent.retained_until_s)
        if until_s > 0:
            self.charge(node, node.num_pages)
            node.retained_until_s = until_s
            self._add(until_s, node)
            self._requeue(node)

    def expire(self, now_s: int) -> None:
        """Ends the retention of nodes that were retained until now or earlier."""
        while self._due and self._due[0][0] <= now_s:
            step: Node | None = heapq.heappop(self._due)[2]
            while step is not None:
                if 0 < step.retained_until_s <= now_s:
                    self.leave(step, step.num_pages)
                    self._requeue(step)
                step = step.parent

    def leave(self, node: Node, count: int) -> None:
        """Forgets the last ``count`` pages of a retained node; others have none."""
        if node.retained_until_s:
            self.charge(node, -count)
            if count == node.num_pages:
                node.retained_until_s = 0

    def charge(self, node: Node, count: int) -> None:
        """Counts retained pages that the account of a node gained, or lost (``count`` < 0)."""
        held = self.held.get(node.account, 0) + count
        assert held >= 0, f"{-held} pages too many are no longer retained of {node.account.hex()}"
        self.held[node.account] = held
        if not held:
            del self.held[node.account]

    def _add(self, until_s: int, node: Node) -> None:
        heapq.heappush(self._due, (until_s, self._num_added, node))
        self._num_added += 1
        if len(self._due) >= self._sweep_at:
            nodes = [node for node in self._tree.nodes() if node.retained_until_s]
            self._due = [(node.retained_until_s, serial, node) for serial, node in enumerate(nodes)]
            heapq.heapify(self._due)
            self._num_added = len(nodes)
            self._sweep_at = max(MIN_SWEEP, 2 * len(nodes))
