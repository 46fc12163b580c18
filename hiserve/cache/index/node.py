"""One node of the radix tree: a run of pages that follow each other in a prefix."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import Int32Array


class Node:
    """A run of whole pages below a common prefix.

    Attributes:
        key: Packed int32 tokens of the run; a whole number of pages, empty for a root.
        pages: int32 ``[len(key) / page bytes]``. Where the run lies in the pool.
        digests: One chain digest per page. A root has one: its namespace's.
        parent: None for a root.
        children: By the packed tokens of their first page.
        num_locks: Receipts that hold this node or one below it.
        last_used: Logical time of the last lock or release through this node.
    """

    __slots__ = ("children", "digests", "key", "last_used", "num_locks", "pages", "parent")

    def __init__(self, key: bytes, pages: Int32Array, digests: list[bytes], parent: Node | None) -> None:
        self.key = key
        self.pages = pages
        self.digests = digests
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.last_used = 0

    @property
    def is_root(self) -> bool:
        """Whether this is the root of a namespace."""
        return self.parent is None

    @property
    def is_evictable(self) -> bool:
        """Whether its tail may be evicted: an unlocked leaf that is no root."""
        return not self.children and self.num_locks == 0 and self.parent is not None


def make_root(namespace: bytes) -> Node:
    """Returns the root of a namespace; its only digest starts the chain."""
    return Node(b"", np.empty(0, dtype=np.int32), [namespace], None)
