"""Copies in flight: their numbers, what they hold, and the pages that outlive the tree because of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hiserve.cache.index.holds import Hold, Receipt
from hiserve.cache.index.node import NO_PAGES, Node
from hiserve.cache.index.tiers import Tiers
from hiserve.core.plan import Int32Array


class OpKind(IntEnum):
    """Where the bytes of an op go."""

    LOAD = 0  # host to device
    STORE = 1  # device to host
    PREFETCH = 2  # store to host
    UPLOAD = 3  # host to store
    STAGE = 4  # device to host, on the way to the store


@dataclass(slots=True, eq=False)
class Op:
    """A copy that was begun and not settled.

    Attributes:
        number: Monotone from 1.
        kind: Where its bytes go.
        hold: Keeps its nodes, and ends at the last of them.
        host_pages: int32 ``[n]``. Its pages on the host.
        read_pages: int32 ``[n]``. Pages on the device that it reads: of a store or a stage.
        readers: Receipts that wait for it; of a load.
        blocked: Nodes that can be stored when it is settled.
        orphans: Device pages that left the tree while it read or wrote them.
        host_orphans: Likewise on the host.
    """

    number: int
    kind: OpKind
    hold: Hold
    host_pages: Int32Array
    read_pages: Int32Array
    readers: list[Receipt] = field(default_factory=list)
    blocked: list[Node] = field(default_factory=list)
    orphans: list[Int32Array] = field(default_factory=list)
    host_orphans: list[Int32Array] = field(default_factory=list)


class Ops:
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

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._ops: dict[int, Op] = {}
        self._last = 0
        self.num_loads = 0
        self.num_begun = dict.fromkeys(OpKind, 0)
        self.num_in_flight = dict.fromkeys(OpKind, 0)

    def __getitem__(self, number: int) -> Op:
        """Returns an op in flight."""
        return self._ops[number]

    def __contains__(self, number: int) -> bool:
        """Whether the op is in flight."""
        return number in self._ops

    def __iter__(self) -> Iterator[Op]:
        """Walks the ops in the order of their numbers."""
        return iter(self._ops.values())

    def __len__(self) -> int:
        """Returns the number of ops in flight."""
        return len(self._ops)

    @property
    def num_ended(self) -> int:
        """Ops that have ended so far."""
        return self._last - len(self._ops)

    def begin(self, kind: OpKind, hold: Hold, host_pages: Int32Array, read_pages: Int32Array = NO_PAGES) -> Op:
        """Numbers a new op."""
        self._last += 1
        op = Op(self._last, kind, hold, host_pages, read_pages)
        self._ops[op.number] = op
        self.num_loads += kind is OpKind.LOAD
        self.num_begun[kind] += host_pages.size
        self.num_in_flight[kind] += host_pages.size
        return op

    def end(self, number: int) -> Op:
        """Forgets an op that reads and writes no more; each exactly once. Its orphans are free, or another op's."""
        assert number in self._ops, f"op {number} is not in flight; {self._last} were begun"
        op = self._ops.pop(number)
        self.num_loads -= op.kind is OpKind.LOAD
        self.num_in_flight[op.kind] -= op.host_pages.size
        for pages in op.orphans:
            self._free_device(pages)
        for pages in op.host_orphans:
            self.free_host(pages)
        return op

    def free(self, node: Node) -> None:
        """Frees the pages of a node that left the tree: at once, or when the op that uses them ends."""
        if node.pending_op:
            op = self._ops[node.pending_op]
            op.orphans.append(node.pages)
            op.host_orphans.append(node.host_pages)
        else:
            self._free_device(node.pages)
            self.free_host(node.host_pages)

    def forget_host(self, node: Node) -> None:
        """Takes the host copy from a node that stays on the device; a store that fills it fills nobody's pages."""
        op = node.pending_op
        pages = self._tiers.take_off_host(node)
        if op:
            self._ops[op].host_orphans.append(pages)
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
                    op.orphans.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.give(pages)

    def free_host(self, pages: Int32Array) -> None:
        """Frees host pages that no copy to or from the device uses; an upload may still read them."""
        for op in self._ops.values():
            if op.kind is OpKind.UPLOAD and pages.size:
                is_read = np.isin(pages, op.host_pages)
                if is_read.any():  # of runs of nothing, each end would hand ever more on
                    op.host_orphans.append(pages[is_read])
                    pages = pages[~is_read]
        self._tiers.give_host(pages)


def carriers(op: Op) -> list[Node]:
    """Returns the nodes that wait for a load or a store, first to last; splits may have made more of them."""
    nodes: list[Node] = []
    step: Node | None = op.hold.node
    while step is not None and step.pending_op == op.number:
        nodes.append(step)
        step = step.parent
    return nodes[::-1]
