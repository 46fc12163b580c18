"""Copies in flight: their numbers, what they hold, and the pages that outlive the tree because of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hiserve.cache.index.locks import PathLock, PrefixLock
from hiserve.cache.index.node import NO_PAGES, Node
from hiserve.cache.index.tiers import CacheTiers
from hiserve.core.plan import Int32Array


class TransferKind(IntEnum):
    """Where the bytes of an op go."""

    LOAD = 0  # host to device
    OFFLOAD = 1  # device to host
    PREFETCH = 2  # store to host
    UPLOAD = 3  # host to store
    STAGE = 4  # device to host, on the way to the store


@dataclass(slots=True, eq=False)
class TransferOp:
    """A copy that was begun and not settled.

    Attributes:
        number: Monotone from 1.
        kind: Where its bytes go.
        lock: Keeps its nodes, and ends at the last of them.
        host_pages: int32 ``[n]``. Its pages on the host.
        read_pages: int32 ``[n]``. Pages on the device that it reads: of a store or a stage.
        readers: Receipts that wait for it; of a load.
        blocked: Nodes that can be stored when it is settled.
        deferred_frees: Device pages that left the tree while it read or wrote them.
        deferred_host_frees: Likewise on the host.
    """

    number: int
    kind: TransferKind
    lock: PathLock
    host_pages: Int32Array
    read_pages: Int32Array
    readers: list[PrefixLock] = field(default_factory=list)
    blocked: list[Node] = field(default_factory=list)
    deferred_frees: list[Int32Array] = field(default_factory=list)
    deferred_host_frees: list[Int32Array] = field(default_factory=list)


class TransferOps:
    """Every op in flight, by number.

    The tree refers to an op by the numbers in its nodes, an op to the tree by its hold alone. So what a flush or a
    failure takes out of the tree is out of reach of every op begun before: all it finds at its end are its orphans.

    Args:
        tiers: Where orphans go back to.

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
        self.num_begun = dict.fromkeys(TransferKind, 0)
        self.num_in_flight = dict.fromkeys(TransferKind, 0)

    def __getitem__(self, number: int) -> TransferOp:
        """Returns an op in flight."""
        return self._ops[number]

    def __contains__(self, number: int) -> bool:
        """Whether the op is in flight."""
        return number in self._ops

    def __iter__(self) -> Iterator[TransferOp]:
        """Walks the ops in the order of their numbers."""
        return iter(self._ops.values())

    def __len__(self) -> int:
        """Returns the number of ops in flight."""
        return len(self._ops)

    @property
    def num_ended(self) -> int:
        """Ops that have ended so far."""
        return self._last - len(self._ops)

    def begin(
        self, kind: TransferKind, path_lock: PathLock, host_pages: Int32Array, read_pages: Int32Array = NO_PAGES
    ) -> TransferOp:
        """Numbers a new op."""
        self._last += 1
        op = TransferOp(self._last, kind, path_lock, host_pages, read_pages)
        self._ops[op.number] = op
        self.num_loads += kind is TransferKind.LOAD
        self.num_begun[kind] += host_pages.size
        self.num_in_flight[kind] += host_pages.size
        return op

    def end(self, number: int) -> TransferOp:
        """Forgets an op that reads and writes no more; each exactly once. Its orphans are free, or another op's."""
        assert number in self._ops, f"op {number} is not in flight; {self._last} were begun"
        op = self._ops.pop(number)
        self.num_loads -= op.kind is TransferKind.LOAD
        self.num_in_flight[op.kind] -= op.host_pages.size
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

    def forget_host(self, node: Node) -> None:
        """Takes the host copy from a node that stays on the device; a store that fills it fills nobody's pages."""
        op = node.pending_op
        pages = self._tiers.take_off_host(node)
        if op:
            self._ops[op].deferred_host_frees.append(pages)
        else:
            self.free_host(pages)
        if node.is_evictable:
            self._tiers.queue(node)

    def _free_device(self, pages: Int32Array) -> None:
        """Frees device pages of no node in flight; a stage, or a store that a flush made pointless, may still read them."""
        for op in self._ops.values():
            if op.read_pages.size and pages.size:
                is_read = np.isin(pages, op.read_pages)
                if is_read.any():
                    op.deferred_frees.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.free(pages)

    def free_host(self, pages: Int32Array) -> None:
        """Frees host pages that no copy to or from the device uses; an upload may still read them."""
        for op in self._ops.values():
            if op.kind is TransferKind.UPLOAD and pages.size:
                is_read = np.isin(pages, op.host_pages)
                if is_read.any():  # of runs of nothing, each end would hand ever more on
                    op.deferred_host_frees.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.free_host(pages)


def nodes_in(op: TransferOp) -> list[Node]:
    """Returns the nodes that wait for a load or a store, first to last; splits may have made more of them."""
    nodes: list[Node] = []
    step: Node | None = op.lock.node
    while step is not None and step.pending_op == op.number:
        nodes.append(step)
        step = step.parent
    return nodes[::-1]
