"""One node of the radix tree: a run of pages that follow each other in a prefix, and where they lie."""

from __future__ import annotations

from enum import Enum

import numpy as np

from hiserve.core.plan import Int32Array

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


class NodeState(Enum):
    """Where a node's bytes are: D device, H host; W on their way to the host, L to the device.

    D → DW → DH → H → HL → DH; any of D and H → gone. A store that fails takes DW back to D. L is an HL whose host
    copy a flush forgot; it becomes D.
    """

    D = "device"
    DW = "device, on the way to the host"
    DH = "device and host"
    H = "host"
    HL = "host, on the way to the device"
    L = "on the way to the device"


class Node:
    """A run of whole pages below a common prefix. On each tier it lies as a whole, or not at all.

    A node on the device has its parent there too, and so has one on the host: what a prefix holds of a tier is
    a prefix.

    Attributes:
        key: Packed int32 tokens of the run; a whole number of pages, empty for a root.
        num_pages: Length of the run; 0 for a root and for a node that was removed.
        pages: int32 ``[num_pages]`` on the device, or empty.
        host_pages: int32 ``[num_pages]`` on the host, or empty.
        device_ready_op: The load that fills ``pages``; 0 when they are filled.
        host_ready_op: The store that fills ``host_pages``; 0 when they are filled.
        digests: One chain digest per page. A root has one: its namespace's.
        parent: None for a root.
        children: By the packed tokens of their first page.
        num_device_children: Of them, how many have pages on the device.
        num_host_children: Of them, how many have pages on the host.
        num_locks: Holds on this node or one below it: it stays on every tier it is on.
        num_host_locks: Holds on its host copy, or on one below it.
        last_used: Logical time of the last lock or release through this node (see ``Tiers.clock``).
        priority: Largest priority of the requests that used it.
        is_queued: Whether it waits for its turn to be stored.
        is_wanted: Whether the host is to have it, at the latest before the device loses it.
        is_spare: Whether the device counts it among what may go at no loss (see ``EvictionReserve``).
        owner: Whose share of each tier it takes (see ``TenantShares``); the same all over a tree.
        written_step: The step whose forward wrote its pages on the device last; 0 when a load did.
    """

    __slots__ = (
        "children",
        "device_ready_op",
        "digests",
        "host_pages",
        "host_ready_op",
        "is_queued",
        "is_spare",
        "is_wanted",
        "key",
        "last_used",
        "num_device_children",
        "num_host_children",
        "num_host_locks",
        "num_locks",
        "num_pages",
        "owner",
        "pages",
        "parent",
        "priority",
        "written_step",
    )

    def __init__(
        self,
        key: bytes,
        pages: Int32Array,
        digests: list[bytes],
        parent: Node | None,
        host_pages: Int32Array = NO_PAGES,
    ) -> None:
        self.key = key
        self.num_pages = len(digests) if parent is not None else 0
        self.pages = pages
        self.host_pages = host_pages
        self.device_ready_op = 0
        self.host_ready_op = 0
        self.digests = digests
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.num_device_children = 0
        self.num_host_children = 0
        self.num_locks = 0
        self.num_host_locks = 0
        self.last_used = 0
        self.priority = 0
        self.is_queued = False
        self.is_wanted = False
        self.is_spare = False
        self.owner: bytes = parent.owner if parent is not None else b""
        self.written_step = 0

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
        """Whether the device may lose its tail: nobody holds it, and nothing below it is there."""
        return self.num_locks == 0 and self.num_device_children == 0 and self.pages.size > 0

    @property
    def is_unbacked(self) -> bool:
        """Whether the device alone has what the host is to have."""
        return self.is_wanted and not self.host_pages.size

    @property
    def turn(self) -> int:
        """When it goes, among leaves of the device: 0 what is spare, then what costs nothing, last what would be lost."""
        return 0 if self.is_spare else 2 if self.is_wanted and not self.host_pages.size else 1

    @property
    def is_candidate(self) -> bool:
        """Whether it may become spare."""
        return not self.is_spare and self.is_evictable

    @property
    def is_copy(self) -> bool:
        """Whether the host may forget its tail at once, because the device has it, and no copy needs it."""
        return (
            self.host_pages.size > 0
            and self.pages.size > 0
            and self.num_host_children == self.num_host_locks == 0
            and not self.pending_op
        )

    @property
    def is_host_evictable(self) -> bool:
        """Whether the host may lose its tail, and with it the last copy: an unheld leaf that is nowhere else."""
        return self.is_on_host_only and not self.children and self.num_locks == 0 and self.num_host_locks == 0

    @property
    def pending_op(self) -> int:
        """The copy that reads or writes its pages now, or 0; there is never more than one."""
        return self.device_ready_op or self.host_ready_op

    @property
    def state(self) -> NodeState:
        """Where its bytes are; it must have some."""
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
