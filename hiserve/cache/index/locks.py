"""Locks on paths of the tree: each prevents eviction, is counted in every node, and is released exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np

from hiserve.cache.index.nodes import Node, Tail
from hiserve.cache.index.tiers import CacheTiers
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES


class PathLock:
    """A lock on a path, by its last node: a split keeps the end of a node.

    Attributes:
        node: The last node; after a removal, the last one that is left.
        is_host: Only the host copies are locked; the device may evict its own.
        is_use: It counts as a use of the path; an offload before eviction does not.
        is_lost: The end of the path was removed.
        priority: Of the request; every node of the path has at least this.
    """

    __slots__ = ("is_host", "is_lost", "is_use", "node", "priority")

    def __init__(self, node: Node, *, is_host: bool, is_use: bool) -> None:
        self.node = node
        self.is_host = is_host
        self.is_use = is_use
        self.priority = 0
        self.is_lost = False


class PrefixLock:
    """A lock on a prefix. As a context manager it is released at the exit, unless it was detached.

    Attributes:
        path_lock: The lock on its path.
        pages: int32 ``[p]``. The prefix on the device, pages loaded since the lock included; shorter after a failed load.
        host_pages: int32 ``[h]``. The rest, on the host alone; must be loaded before an insert.
        ops: Loads in flight that fill some of ``pages``. A forward that reads these must wait for the loads.
        tail: At the end of the prefix as it was locked; None where nothing but pages is needed.
        is_open: Whether it was not released yet.
    """

    __slots__ = ("_is_detached", "_release", "host_pages", "is_open", "ops", "pages", "path_lock", "tail")

    def __init__(
        self, path_lock: PathLock, pages: Int32Array, host_pages: Int32Array, release: Callable[[PrefixLock], None]
    ) -> None:
        self.path_lock = path_lock
        self._release = release
        self.pages = pages
        self.host_pages = host_pages
        self.ops: set[int] = set()
        self.tail: Tail | None = None
        self.is_open = True
        self._is_detached = False

    @property
    def node(self) -> Node:
        """The last node of the locked prefix; ``insert`` moves it on."""
        return self.path_lock.node

    @property
    def is_whole(self) -> bool:
        """Whether all of the prefix can be read: no load of it is in flight, and none has failed."""
        return not (self.ops or self.path_lock.is_lost)

    def detach(self) -> PrefixLock:
        """Returns the lock to a caller that must release it."""
        self._is_detached = True
        return self

    def __enter__(self) -> PrefixLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the lock, unless it was detached and no exception was raised."""
        if self.is_open and (not self._is_detached or kind is not None):
            self._release(self)


class Locks:
    """All open locks; they change the numbers of evictable pages of ``tiers``."""

    def __init__(self, tiers: CacheTiers) -> None:
        self._tiers = tiers
        self._open: dict[PathLock, PrefixLock | None] = {}

    def issue(self, node: Node, release: Callable[[PrefixLock], None], priority: int) -> PrefixLock:
        """Locks a path for a request."""
        path_lock, runs, host_runs = self._lock(node)
        path_lock.priority = priority
        raise_priority(node, priority)
        lock = PrefixLock(path_lock, joined(runs), joined(host_runs), release)
        self._open[path_lock] = lock
        return lock

    def lock(self, node: Node, *, is_use: bool = True) -> PathLock:
        """Locks a path on every tier, for a transfer."""
        return self._lock(node, is_use=is_use)[0]

    def _lock(self, node: Node, *, is_use: bool = True) -> tuple[PathLock, list[Int32Array], list[Int32Array]]:
        tiers = self._tiers
        host, reserve = tiers.host, tiers.reserve
        runs: list[Int32Array] = []
        host_runs: list[Int32Array] = []
        step = node
        while step.is_on_host_only and step.parent is not None:
            if not step.num_locks and not step.num_host_locks:
                host.num_evictable -= step.num_pages
            step.num_locks += 1
            host_runs.append(step.host_pages)
            step = step.parent
        num_pinned = 0
        while True:
            if step.num_locks == 0:
                num_pinned += step.num_pages
                if not step.num_host_locks:
                    host.num_evictable -= step.host_pages.size
                if step.is_spare:
                    reserve.leave(step)
            step.num_locks += 1
            runs.append(step.pages)
            if step.parent is None:
                break
            step = step.parent
        tiers.device.num_evictable -= num_pinned
        path_lock = self._add(node, is_host=False, is_use=is_use)
        if is_use:
            tiers.clock += 1
            self.touch(node)
        return path_lock, runs, host_runs

    def lock_host(self, node: Node) -> PathLock:
        """Locks the host copies of a path; no use of it."""
        step: Node | None = node
        while step is not None:
            if not step.num_locks and not step.num_host_locks:
                self._tiers.host.num_evictable -= step.host_pages.size
            step.num_host_locks += 1
            step = step.parent
        return self._add(node, is_host=True, is_use=False)

    def move_on(self, path_lock: PathLock, child: Node) -> None:
        """Extends a lock by one node."""
        tiers = self._tiers
        assert child.parent is path_lock.node and not path_lock.is_host
        if child.num_locks == 0:
            tiers.device.num_evictable -= child.pages.size
            if not child.num_host_locks:
                tiers.host.num_evictable -= child.host_pages.size
            tiers.reserve.leave(child)
        child.num_locks += 1
        child.priority = max(child.priority, path_lock.priority)
        path_lock.node = child
        tiers.clock += 1
        self.touch(child)

    def touch(self, node: Node | None) -> None:
        """Sets the time of use of a whole path: no parent is older than its child."""
        clock = self._tiers.clock
        copy: Node | None = None
        while node is not None:
            node.last_used = clock
            if node.is_spare:
                self._tiers.reserve.leave(node)
            if copy is None and node.host_pages.size and node.pages.size:
                copy = node
            node = node.parent
        if copy is not None:
            self._tiers.queue_copy(copy)

    def drop(self, path_lock: PathLock) -> None:
        """Releases a path lock, exactly once."""
        del self._open[path_lock]
        if path_lock.is_host:
            self._drop_host(path_lock.node)
        else:
            self._drop_lock(path_lock.node, is_use=path_lock.is_use)

    def cut(self, gone: set[Node], end: Node) -> list[PrefixLock]:
        """Moves the locks on removed nodes to the ends of the rest of their paths; returns the prefix locks that lost pages."""
        lost: list[PrefixLock] = []
        for path_lock, lock in self._open.items():
            if path_lock.node not in gone:
                continue
            path_lock.node = end
            path_lock.is_lost = True
            if lock is not None:
                lock.pages, lock.host_pages = path_pages(end)
                lock.ops = {node.device_ready_op for node in path(end)} - {0}
                lost.append(lock)
        return lost

    def shorten(self, path_lock: PathLock) -> None:
        """Moves a host lock up to the last node that still has host pages."""
        while not path_lock.node.host_pages.size and path_lock.node.parent is not None:
            path_lock.node.num_host_locks -= 1
            path_lock.node = path_lock.node.parent

    @property
    def prefix_locks(self) -> list[PrefixLock]:
        """The open prefix locks."""
        return [lock for lock in self._open.values() if lock is not None]

    def _add(self, node: Node, *, is_host: bool, is_use: bool) -> PathLock:
        path_lock = PathLock(node, is_host=is_host, is_use=is_use)
        self._open[path_lock] = None
        return path_lock

    def _drop_lock(self, node: Node, *, is_use: bool) -> None:
        tiers = self._tiers
        step, num_freed, num_host_freed = node, 0, 0
        end_on_device: Node | None = None
        end_on_both: Node | None = None
        while True:
            assert step.num_locks > 0, f"a node of {step.num_pages} pages has no lock to release"
            step.num_locks -= 1
            if end_on_device is None and not step.is_on_host_only:
                end_on_device = step
            if end_on_both is None and step.pages.size and step.host_pages.size:
                end_on_both = step
            if step.num_locks == 0:
                num_freed += step.pages.size
                if not step.num_host_locks:
                    num_host_freed += step.host_pages.size
            if step.parent is None:
                break
            step = step.parent
        tiers.device.num_evictable += num_freed
        tiers.host.num_evictable += num_host_freed
        if is_use:
            tiers.clock += 1
            self.touch(node)
        # Of a path, only the last node of each tier can be a leaf there.
        tiers.queue(node)
        if end_on_device is not None and end_on_device is not node:
            tiers.queue(end_on_device)
        if end_on_both is not None:
            tiers.queue_copy(end_on_both)
        tiers.queue(step)

    def _drop_host(self, node: Node) -> None:
        step: Node = node
        end_on_both: Node | None = None
        while True:
            assert step.num_host_locks > 0, f"a node of {step.num_pages} pages has no host lock to release"
            step.num_host_locks -= 1
            if end_on_both is None and step.pages.size and step.host_pages.size:
                end_on_both = step
            if not step.num_locks and not step.num_host_locks:
                self._tiers.host.num_evictable += step.host_pages.size
            if step.parent is None:
                break
            step = step.parent
        if node.is_on_host_only:
            self._tiers.queue(node)
        if end_on_both is not None:
            self._tiers.queue_copy(end_on_both)
        self._tiers.queue(step)


def raise_priority(node: Node, priority: int) -> None:
    """Raises a path to a priority: no parent has less than its child."""
    step: Node | None = node
    while step is not None and step.priority < priority:
        step.priority = priority
        step = step.parent


def path(node: Node) -> Iterator[Node]:
    """Walks from a node up to its root."""
    step: Node | None = node
    while step is not None:
        yield step
        step = step.parent


def path_digests(node: Node, num_less: int = 0) -> tuple[bytes, ...]:
    """Returns the digests of the pages of a path, first to last, without the last ``num_less`` of its last node."""
    *nodes, _ = path(node)
    digests = [digest for step in nodes[::-1] for digest in step.digests]
    return tuple(digests[: len(digests) - num_less])


def path_pages(node: Node) -> tuple[Int32Array, Int32Array]:
    """Returns the device pages of a path, and the host pages of its end that is on the host alone."""
    nodes = list(path(node))
    runs = [step.pages for step in nodes if not step.is_on_host_only]
    return joined(runs), joined([step.host_pages for step in nodes if step.is_on_host_only])


def joined(runs: list[Int32Array]) -> Int32Array:
    """Joins the runs of a path, gathered from its end."""
    return np.concatenate(runs[::-1]) if runs else NO_PAGES
