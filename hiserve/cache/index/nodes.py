"""The nodes of the radix tree, where their bytes are, and the tails at their boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES

STEP_SHIFT = 32  # of a node's logical time: the upper half is the step, the lower half counts within


class TailPools(Protocol):
    """The memory of tails on both tiers."""

    def leave_device(self, tail: Tail) -> None:
        """Gives back the window pages and the slot of a tail that is there."""

    def leave_host(self, tail: Tail) -> None:
        """Gives back the frames of a tail that has some."""

    def assign_account(self, tail: Tail, account: bytes) -> None:
        """Charges an account for a tail, in place of the one before."""


@dataclass(slots=True, eq=False)
class Tail:
    """What a request reads that is resumed at a boundary, beside the history before it, or the images of it.

    These are window pages, and a snapshot of recurrent states and last inputs; a model may have one of them only.

    Attributes:
        node: Has the boundary; a tail that is on no tier may be forgotten by it.
        at: Pages from the start of the node to the boundary, 1 to ``num_pages``.
        pages: int32 ``[n]``. Window pages on the device, first to last; None if the device lacks the tail.
        slots: int32 ``[1]``. The slot of its snapshot on the device; empty without one.
        frames: int32 ``[f]``. Host pages with the images of each window page, then of the snapshot; None if the host lacks
            the tail.
        device_ready_op: The load that fills ``pages`` and ``slots``; 0 when they are filled.
        host_ready_op: The offload that fills ``frames``; 0 when they are filled.
        last_used: Logical time of its last use.
        priority: Of the node, at the last use.
        account: Charged for its window pages, its slot and its frames.
        is_uploading: An upload reads ``frames``, which stay.
        is_provisional: A row passed its boundary, and may replace it by that of the next one: it is not offloaded yet.
        retained_until_s: Others go first until then (see ``Retention``); 0 is not retained, and closed.
        num_retained: Frames that count in the quota of its account.
    """

    node: Node
    at: int
    last_used: int
    _pools: TailPools
    pages: Int32Array | None = None
    slots: Int32Array = field(default_factory=lambda: NO_PAGES)
    frames: Int32Array | None = None
    device_ready_op: int = 0
    host_ready_op: int = 0
    priority: int = field(init=False)
    account: bytes = field(init=False)
    is_uploading: bool = False
    is_provisional: bool = False
    retained_until_s: int = 0
    num_retained: int = 0

    def __post_init__(self) -> None:
        """Takes priority and account of its node."""
        self.priority, self.account = self.node.priority, self.node.account

    @property
    def is_open(self) -> bool:
        """Whether it is on a tier."""
        return self.pages is not None or self.frames is not None

    @property
    def num_pages(self) -> int:
        """Its window pages on the device."""
        return 0 if self.pages is None else self.pages.size

    @property
    def is_on_device(self) -> bool:
        """Whether the device has it, or is being given it."""
        return self.pages is not None

    @property
    def is_on_host_only(self) -> bool:
        """Whether it must be loaded before its use, and can be."""
        return self.pages is None and self.frames is not None and not self.host_ready_op

    @property
    def pending_op(self) -> int:
        """The transfer that reads or writes it now, or 0."""
        return self.device_ready_op or self.host_ready_op

    @property
    def eviction_cost(self) -> int:
        """As that of a leaf on no other tier (see ``Node``)."""
        return 1

    @property
    def is_host_evictable(self) -> bool:
        """Whether the host may evict its frames."""
        return self.frames is not None and not (self.pending_op or self.is_uploading)

    @property
    def digest(self) -> bytes:
        """The name of the page before its boundary."""
        return self.node.digests[self.at - 1]

    def leave_device(self) -> None:
        """Gives its window pages and its slot back, if it is there."""
        if self.pages is not None:
            self._pools.leave_device(self)

    def leave_host(self) -> None:
        """Gives its frames back, if it has any."""
        if self.frames is not None:
            self._pools.leave_host(self)

    def assign_account(self, account: bytes) -> None:
        """Charges an account for it, in place of the one before."""
        self._pools.assign_account(self, account)

    def close(self) -> None:
        """Leaves both tiers."""
        self.leave_device()
        self.leave_host()


Tails = dict[int, Tail]  # of a node: by ``Tail.at``


class NodeState(Enum):
    """Where a node's bytes are: D device, H host; W being offloaded, L being loaded.

    D → DW → DH → H → HL → DH; eviction removes D and H. A failed offload makes DW D again. L is an HL whose host copy was
    flushed; it becomes D.
    """

    D = "device"
    DW = "device, on the way to the host"
    DH = "device and host"
    H = "host"
    HL = "host, on the way to the device"
    L = "on the way to the device"


@dataclass(slots=True, eq=False)
class Node:
    """A run of whole pages below a common prefix. A tier has all of its pages, or none.

    A tier that has a node also has its parent: each tier has a prefix of every cached sequence.

    Attributes:
        key: Packed int32 tokens of the run; a whole number of pages, empty for a root.
        num_pages: Length of the run; 0 for a root and for a node that was removed.
        pages: int32 ``[num_pages]`` on the device, or empty.
        host_pages: int32 ``[num_pages]`` on the host, or empty.
        device_ready_op: The load that fills ``pages``; 0 when they are filled.
        host_ready_op: The offload that fills ``host_pages``; 0 when they are filled.
        digests: One chain digest per page. A root has one: its namespace's.
        parent: None for a root.
        children: By the packed tokens of their first page.
        num_device_children: Of them, how many have pages on the device.
        num_host_children: Of them, how many have pages on the host.
        num_locks: Locks on this node or one below it: it stays on every tier it is on.
        num_host_locks: Locks on its host copy, or on one below it.
        last_used: Logical time of the last lock or release through this node (see ``CacheTiers.clock``).
        priority: Largest priority of the requests that used it.
        retained_until_s: Evicted after all others until then (see ``Retention``); 0 is not retained.
        is_queued: Whether it waits for its offload.
        is_wanted: Whether it is to be offloaded, at the latest before the device evicts it.
        is_spare: Whether the device may evict it without loss (see ``EvictionReserve``).
        account: Charged for its pages on each tier (see ``TenantShares``); one for a whole tree.
        written_step: The last step whose forward wrote its pages on the device; 0 after a load.
        tails: What requests read that are resumed at boundaries in this node; closed ones may be among them.
    """

    key: bytes
    pages: Int32Array
    digests: list[bytes]
    parent: Node | None
    num_pages: int = field(init=False)
    host_pages: Int32Array = field(default_factory=lambda: NO_PAGES)
    device_ready_op: int = 0
    host_ready_op: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    num_device_children: int = 0
    num_host_children: int = 0
    num_locks: int = 0
    num_host_locks: int = 0
    last_used: int = 0
    priority: int = 0
    retained_until_s: int = 0
    is_queued: bool = False
    is_wanted: bool = False
    is_spare: bool = False
    account: bytes = field(init=False)
    written_step: int = 0
    tails: Tails | None = None

    def __post_init__(self) -> None:
        """Takes the account of its parent."""
        self.num_pages = 0 if self.parent is None else len(self.digests)
        self.account = b"" if self.parent is None else self.parent.account

    @property
    def is_root(self) -> bool:
        """Whether this is the root of a namespace."""
        return self.parent is None

    @property
    def is_on_host_only(self) -> bool:
        """Whether its only copy is on the host."""
        return not self.pages.size and self.num_pages > 0

    @property
    def is_evictable(self) -> bool:
        """Whether the device may evict its last pages: it has no lock, and no child there."""
        return self.num_locks == 0 and self.num_device_children == 0 and self.pages.size > 0

    @property
    def is_unbacked(self) -> bool:
        """Whether it is to be offloaded, and the host has no copy."""
        return self.is_wanted and not self.host_pages.size

    @property
    def eviction_cost(self) -> int:
        """What evicting it from the device costs: 0 spare, 1 nothing, 2 the last copy of wanted pages."""
        return 0 if self.is_spare else 2 if self.is_wanted and not self.host_pages.size else 1

    @property
    def is_candidate(self) -> bool:
        """Whether it may become spare."""
        return not self.is_spare and self.is_evictable

    @property
    def is_copy(self) -> bool:
        """Whether the host may free its copy: the device has the pages and every tail, and no transfer uses them."""
        return (
            self.host_pages.size > 0
            and self.pages.size > 0
            and self.num_host_children == self.num_host_locks == 0
            and not (self.device_ready_op or self.host_ready_op)
            and not (self.tails and any(tail.pages is None and tail.frames is not None for tail in self.tails.values()))
        )

    @property
    def is_host_evictable(self) -> bool:
        """Whether the host may evict its last pages, the last copy: an unlocked leaf on no other tier."""
        return self.is_on_host_only and not self.children and self.num_locks == 0 and self.num_host_locks == 0

    @property
    def pending_op(self) -> int:
        """The transfer that reads or writes its pages now, or 0; never more than one."""
        return self.device_ready_op or self.host_ready_op

    @property
    def state(self) -> NodeState:
        """Where its bytes are; not of a root."""
        if not self.pages.size:
            return NodeState.H
        if not self.host_pages.size:
            return NodeState.L if self.device_ready_op else NodeState.D
        if self.device_ready_op:
            return NodeState.HL
        return NodeState.DW if self.host_ready_op else NodeState.DH


def make_root(namespace: bytes) -> Node:
    """Returns the root of a namespace; its only digest starts the chain."""
    return Node(b"", NO_PAGES, [namespace], None)


def clear(node: Node) -> None:
    """Empties a node that left the tree, so that queues skip it."""
    if node.tails:
        close_tails(node)  # while their boundaries have names
    node.key, node.digests, node.num_pages = b"", [], 0
    node.pages = node.host_pages = NO_PAGES
    node.device_ready_op = node.host_ready_op = node.num_device_children = node.num_host_children = 0
    node.is_spare = False
    node.retained_until_s = 0
    node.children = {}


def split_tails(upper: Node, lower: Node) -> None:
    """Gives the upper part of a node that was cut the tails that end there."""
    tails, lower.tails = lower.tails or {}, None
    for tail in tails.values():
        if tail.at <= upper.num_pages:
            _place(tail, upper, tail.at)
        else:
            _place(tail, lower, tail.at - upper.num_pages)


def join_tails(parent: Node, node: Node) -> None:
    """Gives a node the tails of the parent that it is about to absorb."""
    tails, node.tails = node.tails or {}, None
    for tail in (parent.tails or {}).values():
        _place(tail, node, tail.at)
    for tail in tails.values():
        _place(tail, node, parent.num_pages + tail.at)
    parent.tails = None


def close_tails(node: Node, num_pages: int = 0) -> None:
    """Closes the tails behind the first ``num_pages`` of a node, and forgets those that are closed."""
    for tail in list((node.tails or {}).values()):
        if tail.at > num_pages:
            tail.close()
    node.tails = {at: tail for at, tail in (node.tails or {}).items() if tail.is_open} or None


def _place(tail: Tail, node: Node, at: int) -> None:
    if tail.is_open:
        tail.node, tail.at = node, at
        node.tails = {} if node.tails is None else node.tails
        node.tails[at] = tail


def is_ready_on_host(node: Node) -> bool:
    """Whether host pages may follow this node: it is a root, or its host copy is filled."""
    return node.is_root or (node.host_pages.size > 0 and not node.host_ready_op)
