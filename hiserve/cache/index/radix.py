"""The radix tree over page-aligned token keys: its nodes, and find, split, join, extend, trim.

Keys are packed int32 bytes, so that comparing a run of tokens is one ``startswith``
(a memcmp); children are found by the bytes of their first page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from hiserve.cache.index.tails import Tails, close_tails, join_tails, split_tails
from hiserve.core.digest import Chain, chain
from hiserve.core.plan import Int32Array

STEP_SHIFT = 32  # of a node's logical time: the upper half is the step, the lower half counts within
MAX_NODE_PAGES = 128  # a leaf grows in place up to here: bounds the bytes that each insert of a growing row copies
NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


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

    __slots__ = (
        "account",
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
        "pages",
        "parent",
        "priority",
        "retained_until_s",
        "tails",
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
        self.retained_until_s = 0
        self.is_queued = False
        self.is_wanted = False
        self.is_spare = False
        self.account: bytes = parent.account if parent is not None else b""
        self.written_step = 0
        self.tails: Tails | None = None

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
        """Whether the host may free its copy: the device has the pages, and no transfer uses them."""
        return (
            self.host_pages.size > 0
            and self.pages.size > 0
            and self.num_host_children == self.num_host_locks == 0
            and not (self.device_ready_op or self.host_ready_op)
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


class RadixTree:
    """One root per namespace; ``link`` computes the digests of pages (``core.digest.chain_of``)."""

    def __init__(self, page_size: int, link: Chain = chain) -> None:
        self.page_size = page_size
        self._link = link
        self.page_bytes = 4 * page_size
        self.roots: dict[bytes, Node] = {}

    def chain(self, parent: bytes, key: bytes) -> list[bytes]:
        """Returns the digests of the whole pages of ``key``, which follow the page or root of digest ``parent``."""
        return self._link(parent, key, self.page_size)

    def root(self, namespace: bytes) -> Node:
        """Returns the namespace's root; a new one is not in the tree yet."""
        return self.roots.get(namespace) or make_root(namespace)

    def add_root(self, root: Node) -> Node:
        """Adds a root before it is locked; returns the one that its namespace already has, if any."""
        return self.roots.setdefault(root.digests[0], root)

    def drop_root_if_unused(self, root: Node) -> None:
        """Removes a root without children and locks."""
        if not root.children and root.num_locks == 0 and root.num_host_locks == 0:
            self.roots.pop(root.digests[0], None)

    def find(self, root: Node, key: bytes) -> tuple[Node, int, int]:
        """Finds the longest run of whole pages that starts ``key``.

        Args:
            root: Root of the namespace.
            key: Packed tokens; a trailing partial page is ignored.

        Returns:
            The deepest node reached, how many of its pages match, and how many match in all.
        """
        page_bytes = self.page_bytes
        node = root
        offset = 0
        while True:
            child = node.children.get(key[offset : offset + page_bytes])
            if child is None:
                return node, node.num_pages, offset // page_bytes
            edge = child.key
            if not key.startswith(edge, offset):
                used = self.common_pages(edge, key, offset)
                return child, used, offset // page_bytes + used
            node = child
            offset += len(edge)

    def common_pages(self, edge: bytes, key: bytes, offset: int = 0) -> int:
        """Counts the leading pages that ``edge`` shares with ``key[offset:]``."""
        return self.common_tokens(edge, key, offset) // self.page_size

    def common_tokens(self, edge: bytes, key: bytes, offset: int = 0) -> int:
        """Counts the leading tokens that ``edge`` shares with the whole pages of ``key[offset:]``."""
        length = min(len(edge), (len(key) - offset) // self.page_bytes * self.page_bytes)
        ours = np.frombuffer(edge, dtype=np.int32, count=length // 4)
        theirs = np.frombuffer(key, dtype=np.int32, count=length // 4, offset=offset)
        differs = ours != theirs
        return int(differs.argmax()) if differs.any() else ours.size

    def closest(self, pages: Sequence[bytes], page: bytes) -> int:
        """Returns the most leading tokens of ``page`` that one of ``pages`` (at least one) shares."""
        theirs = np.frombuffer(b"".join(pages), dtype=np.int32).reshape(len(pages), self.page_size)
        differs = theirs != np.frombuffer(page, dtype=np.int32)
        return int(np.where(differs.any(axis=1), differs.argmax(axis=1), self.page_size).max())

    def split(self, node: Node, num_pages: int) -> Node:
        """Cuts ``node`` after ``num_pages``; returns the new upper part.

        The old object stays the lower part, so that locks and queue entries still end where they ended. Both parts are on
        the tiers of the node, and wait for its transfer.

            before   parent ── node[0, n)
            after    parent ── upper[0, k) ── node[k, n)
        """
        assert 0 < num_pages < node.num_pages, f"cannot cut {node.num_pages} pages after {num_pages}"
        assert node.parent is not None
        cut = num_pages * self.page_bytes
        upper = Node(node.key[:cut], NO_PAGES, node.digests[:num_pages], node.parent)
        upper.num_locks = node.num_locks
        upper.num_host_locks = node.num_host_locks
        upper.device_ready_op = node.device_ready_op
        upper.host_ready_op = node.host_ready_op
        upper.last_used = node.last_used
        upper.priority = node.priority
        upper.retained_until_s = node.retained_until_s
        upper.written_step = node.written_step
        upper.is_wanted = node.is_wanted
        upper.is_spare = node.is_spare
        node.parent.children[upper.key[: self.page_bytes]] = upper
        node.key = node.key[cut:]
        node.digests = node.digests[num_pages:]
        node.num_pages -= num_pages
        if node.tails:
            upper.tails, node.tails = split_tails(node.tails, num_pages)
        if node.pages.size:
            upper.pages, node.pages = node.pages[:num_pages].copy(), node.pages[num_pages:].copy()
            upper.num_device_children = 1
        if node.host_pages.size:
            upper.host_pages, node.host_pages = node.host_pages[:num_pages].copy(), node.host_pages[num_pages:].copy()
            upper.num_host_children = 1
        node.parent = upper
        upper.children[node.key[: self.page_bytes]] = node
        return upper

    def join(self, node: Node) -> None:
        """Undoes a split: ``node`` absorbs its parent, which has no other child and is on the same tiers.

        before   above ── parent[0, k) ── node[k, n)
        after    above ── node[0, n)
        """
        parent = node.parent
        assert parent is not None and parent.parent is not None and len(parent.children) == 1
        node.key = parent.key + node.key
        node.digests = parent.digests + node.digests
        node.pages = np.concatenate((parent.pages, node.pages))
        node.host_pages = np.concatenate((parent.host_pages, node.host_pages))
        if parent.tails or node.tails:
            node.tails, parent.tails = join_tails(parent.tails or {}, node.tails or {}, parent.num_pages), None
        node.num_pages += parent.num_pages
        node.written_step = max(parent.written_step, node.written_step)
        node.parent = parent.parent
        node.parent.children[node.key[: self.page_bytes]] = node
        clear(parent)

    def extend(self, node: Node, key: bytes, pages: Int32Array, *, in_place: bool = True) -> Node:
        """Adds new device pages below ``node``.

        With ``in_place``, a leaf on the device alone that only the caller has locked grows; otherwise a child is added.
        Returns the node that ends with the new pages.
        """
        digests, count = self._link(node.digests[-1], key, self.page_size), pages.size
        assert len(digests) == count > 0, f"{count} pages for a key of {len(key)} bytes"
        may_grow = in_place and node.num_locks == 1 and node.parent is not None and not node.children
        is_plain = not (node.host_pages.size or node.device_ready_op)
        if may_grow and is_plain and node.num_pages + count <= MAX_NODE_PAGES:
            node.key += key
            node.pages = np.concatenate((node.pages, pages))
            node.digests += digests
            node.num_pages += count
            return node
        node.num_device_children += 1
        return self.add_child(Node(key, pages.copy(), digests, node))

    def add_child(self, child: Node) -> Node:
        """Links a new node below its parent, and returns it."""
        parent, first = child.parent, child.key[: self.page_bytes]
        assert parent is not None and first not in parent.children, "the first new page is already in the tree"
        parent.children[first] = child
        return child

    def trim(self, leaf: Node, num_pages: int) -> tuple[Int32Array, Int32Array, list[bytes]]:
        """Removes the last ``num_pages`` of a leaf from every tier; unlinks an empty leaf.

        Returns:
            The removed pages on the device and on the host, first to last, and their digests.
        """
        assert not leaf.children and leaf.parent is not None
        keep = leaf.num_pages - num_pages
        assert keep >= 0, f"cannot remove {num_pages} of {leaf.num_pages} pages"
        if keep == 0:
            removed = leaf.pages, leaf.host_pages, leaf.digests
            self.unlink(leaf)
            clear(leaf)
            return removed
        removed = leaf.pages[keep:].copy(), leaf.host_pages[keep:].copy(), leaf.digests[keep:]
        leaf.key = leaf.key[: keep * self.page_bytes]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.host_pages = leaf.host_pages[:keep].copy()
        leaf.digests = leaf.digests[:keep]
        leaf.num_pages = keep
        leaf.tails = close_tails(leaf.tails, keep) if leaf.tails else None
        return removed

    def unlink(self, node: Node) -> None:
        """Removes a node, with all below it, from the tree."""
        assert node.parent is not None
        del node.parent.children[node.key[: self.page_bytes]]
        if node.pages.size:
            node.parent.num_device_children -= 1
        if node.host_pages.size:
            node.parent.num_host_children -= 1

    def nodes(self) -> Iterator[Node]:
        """Walks every node except the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack.extend(node.children.values())


def clear(node: Node) -> None:
    """Empties a node that left the tree, so that queues skip it."""
    node.key, node.digests, node.num_pages = b"", [], 0
    node.pages = node.host_pages = NO_PAGES
    node.device_ready_op = node.host_ready_op = node.num_device_children = node.num_host_children = 0
    node.is_spare = False
    node.retained_until_s = 0
    node.children = {}
    node.tails = close_tails(node.tails) if node.tails else None
