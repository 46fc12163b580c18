"""Transfers in flight, the pages they use, and the removal of nodes that transfers or locks still refer to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hiserve.cache.index.locks import Locks, PathLock, PrefixLock, path
from hiserve.cache.index.nodes import Node, Tail, clear
from hiserve.cache.index.reports import Tier
from hiserve.cache.index.tiers import CacheTiers
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, CopyKind, TailImage


@dataclass(slots=True, eq=False)
class TransferOp:
    """A transfer in flight.

    Attributes:
        number: Monotone from 1.
        lock: On its nodes; ends at the last of them.
        host_pages: int32 ``[n]``. Its pages on the host.
        read_pages: int32 ``[n]``. Pages on the device that an offload or a stage reads.
        readers: Locks that wait for a load.
        blocked: Nodes whose offload waits for its end.
        deferred_frees: Device pages that left the tree while it read or wrote them; freed at its end.
        deferred_host_frees: Likewise on the host.
        tail: Moved with its pages, or alone; None without one.
        window_pages: int32 ``[w]``. Of the tail; the op holds them.
        slots: int32 ``[1]``. The slot of its snapshot, likewise; empty without one.
        num_pages: Host pages, frames of the tail included.
    """

    number: int
    kind: CopyKind
    lock: PathLock
    host_pages: Int32Array
    read_pages: Int32Array
    readers: list[PrefixLock] = field(default_factory=list)
    blocked: list[Node] = field(default_factory=list)
    deferred_frees: list[Int32Array] = field(default_factory=list)
    deferred_host_frees: list[Int32Array] = field(default_factory=list)
    tail: Tail | None = None
    window_pages: Int32Array = field(default_factory=lambda: NO_PAGES)
    slots: Int32Array = field(default_factory=lambda: NO_PAGES)
    num_pages: int = 0


class TransferOps:
    """The ops in flight, by number.

    Nodes refer to an op by its number, an op refers to the tree by its lock alone. So no op reaches a node that a flush
    or a failure removed: at its end only the deferred frees remain.

    Attributes:
        num_loads: Loads in flight.
        num_begun: Pages of all ops so far, by kind.
        num_in_flight: Pages of those in flight, by kind.
    """

    def __init__(self, tiers: CacheTiers) -> None:
        self._tiers = tiers
        self._ops: dict[int, TransferOp] = {}
        self._last = 0
        self.num_loads = 0
        self.num_begun = dict.fromkeys(CopyKind, 0)
        self.num_in_flight = dict.fromkeys(CopyKind, 0)

    def __getitem__(self, number: int) -> TransferOp:
        """Returns an op in flight."""
        assert number in self._ops, f"op {number} is not in flight; {self._last} were begun"
        return self._ops[number]

    def __contains__(self, number: int) -> bool:
        return number in self._ops

    def __iter__(self) -> Iterator[TransferOp]:
        return iter(self._ops.values())

    def __len__(self) -> int:
        return len(self._ops)

    @property
    def num_ended(self) -> int:
        """Ops that have ended so far."""
        return self._last - len(self._ops)

    def begin(
        self,
        kind: CopyKind,
        path_lock: PathLock,
        host_pages: Int32Array,
        read_pages: Int32Array = NO_PAGES,
        num_frames: int = 0,
    ) -> TransferOp:
        """Numbers a new op; ``num_frames`` are those of its tail."""
        self._last += 1
        num_pages = host_pages.size + num_frames
        op = TransferOp(self._last, kind, path_lock, host_pages, read_pages, num_pages=num_pages)
        self._ops[op.number] = op
        self.num_loads += kind is CopyKind.LOAD
        self.num_begun[kind] += num_pages
        self.num_in_flight[kind] += num_pages
        return op

    def end(self, number: int) -> TransferOp:
        """Removes an ended op, each exactly once, and frees its deferred pages."""
        op = self._ops.pop(number, None)
        assert op is not None, f"op {number} is not in flight; {self._last} were begun"
        self.num_loads -= op.kind is CopyKind.LOAD
        self.num_in_flight[op.kind] -= op.num_pages
        for pages in op.deferred_frees:
            self._free_device(pages)
        for pages in op.deferred_host_frees:
            self.free_host(pages)
        return op

    def free(self, node: Node) -> None:
        """Frees the pages of a node that left the tree: at once, or when the op that uses them ends."""
        if node.pending_op:
            op = self._ops[node.pending_op]
            op.deferred_frees.append(node.pages)
            op.deferred_host_frees.append(node.host_pages)
        else:
            self._free_device(node.pages)
            self.free_host(node.host_pages)

    def free_host_copy(self, node: Node) -> None:
        """Frees the host pages of a node that stays on the device: at once, or when the offload that fills them ends."""
        op = node.pending_op
        pages = self._tiers.take_off_host(node)
        if op:
            self._ops[op].deferred_host_frees.append(pages)
        else:
            self.free_host(pages)
        if node.is_evictable:
            self._tiers.queue(node)

    def _free_device(self, pages: Int32Array) -> None:
        """Frees device pages of no node in flight; a stage, or an offload of removed nodes, may still read them."""
        for op in self._ops.values():
            if op.read_pages.size and pages.size:
                is_read = np.isin(pages, op.read_pages)
                if is_read.any():
                    op.deferred_frees.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.free(pages)

    def free_host(self, pages: Int32Array) -> None:
        """Frees host pages without a transfer to or from the device; an upload may still read them."""
        for op in self._ops.values():
            if op.kind is CopyKind.UPLOAD and pages.size:
                is_read = np.isin(pages, op.host_pages)
                if is_read.any():  # an empty run would be deferred again at each end
                    op.deferred_host_frees.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.free_host(pages)


class SubtreeRemoval:
    """Removes nodes that may be locked or in transfer: after a failed load, and by a flush.

    Locks on removed nodes move to the rest of their paths; pages in transfer are freed when the transfer ends.
    """

    def __init__(self, tiers: CacheTiers, locks: Locks, ops: TransferOps) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops

    def detach(self, top: Node) -> list[PrefixLock]:
        """Removes a node and all below it; returns the locks that lost pages."""
        tiers, parent = self._tiers, top.parent
        assert parent is not None, "a root cannot be removed"
        was_queued = parent.is_evictable
        tiers.tree_epoch += 1
        tiers.tree.unlink(top)
        gone = [top]
        for node in gone:
            gone.extend(node.children.values())
        lost = self._locks.cut(set(gone), parent)
        for node in gone:
            self._remove(node)
            clear(node)
        if not was_queued:
            tiers.queue(parent)
        tiers.queue_copy(parent)
        return lost

    def flush(self, tier: Tier | None) -> int:
        """See ``PrefixCache.flush``; loads and prefetches in flight insert nothing."""
        tiers, device, host = self._tiers, self._tiers.device, self._tiers.host
        if tier is Tier.DEVICE:
            count = device.num_evictable
            if count:
                tiers.evict(count)
            return count
        num_free, num_free_host = device.pages.num_free, host.pages.num_free
        kept = {node for lock in self._locks.prefix_locks for node in path(lock.node)}
        for root in list(tiers.tree.roots.values()):
            self._cut_below(root, kept, spares_device=tier is Tier.HOST)
        to_load = {node for each in self._locks.prefix_locks if each.node.is_on_host_only for node in path(each.node)}
        for node in tiers.tree.nodes():
            if node.host_pages.size and node not in to_load:
                self._ops.free_host_copy(node)
                tiers.tree_epoch += 1
        for op in self._ops:
            if op.lock.is_host:
                self._locks.shorten(op.lock)
                op.lock.is_lost |= op.kind is CopyKind.PREFETCH
        for leaves in (device.eviction, host.eviction, tiers.reserve, tiers.copies):
            leaves.sweep()
        num_freed = device.pages.num_free - num_free
        device.num_evicted += num_freed
        return num_freed + host.pages.num_free - num_free_host

    def _cut_below(self, root: Node, kept: set[Node], *, spares_device: bool) -> None:
        stack = [root]
        while stack:
            for child in list(stack.pop().children.values()):
                if child in kept or (spares_device and child.pages.size):
                    stack.append(child)
                else:
                    self.detach(child)

    def _remove(self, node: Node) -> None:
        """Subtracts a node from all counts, and frees its pages."""
        device, host = self._tiers.device, self._tiers.host
        self._tiers.lost.add(node.digests)
        if node.num_locks == 0:
            device.num_evictable -= node.pages.size
            if node.num_host_locks == 0:
                host.num_evictable -= node.host_pages.size
        device.shares.charge(node.account, -node.pages.size)
        host.shares.charge(node.account, -node.host_pages.size)
        self._tiers.reserve.leave(node)
        self._tiers.retention.leave(node, node.num_pages)
        if node.pages.size and not node.device_ready_op:
            device.remove(node.digests)
        if node.host_pages.size and not node.host_ready_op:
            host.remove(node.digests)
        self._ops.free(node)


def image_of(tail: Tail, frames: Int32Array) -> TailImage:
    """Returns the image of a tail in frames."""
    *_, root = path(tail.node)
    return TailImage(frames=frames, namespace=root.digests[0], digest=tail.digest)


def nodes_in(op: TransferOp) -> list[Node]:
    """Returns the nodes of a load or an offload, first to last; splits may have increased their number."""
    nodes: list[Node] = []
    step: Node | None = op.lock.node
    while step is not None and step.pending_op == op.number:
        nodes.append(step)
        step = step.parent
    return nodes[::-1]
