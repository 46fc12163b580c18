"""The radix tree over page-aligned token keys: find, split, extend, trim.

Keys are packed int32 bytes, so that comparing a run of tokens is one ``startswith``
(a memcmp); children are found by the bytes of their first page.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hiserve.cache.index.node import Node, make_root
from hiserve.core.digest import chain
from hiserve.core.plan import Int32Array

MAX_NODE_PAGES = 128  # a leaf grows in place up to here: bounds what each publish of a growing row copies


class RadixTree:
    """One root per namespace.

    Args:
        page_size: Tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes) -> Node:
        """Returns the namespace's root, or an empty one that the tree does not keep yet."""
        return self.roots.get(namespace) or make_root(namespace)

    def keep_root(self, root: Node) -> Node:
        """Keeps a root that is about to be locked; returns the one its namespace has already, if any."""
        return self.roots.setdefault(root.digests[0], root)

    def drop_root_if_unused(self, root: Node) -> None:
        """Forgets a root that holds nothing and that no receipt refers to."""
        if not root.children and root.num_locks == 0:
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
                return node, node.pages.size, offset // page_bytes
            edge = child.key
            if not key.startswith(edge, offset):
                used = self.common_pages(edge, key, offset)
                return child, used, offset // page_bytes + used
            node = child
            offset += len(edge)

    def common_pages(self, edge: bytes, key: bytes, offset: int = 0) -> int:
        """Counts the leading pages that ``edge`` shares with ``key[offset:]``."""
        length = min(len(edge), (len(key) - offset) // self.page_bytes * self.page_bytes)
        ours = np.frombuffer(edge, dtype=np.int32, count=length // 4)
        theirs = np.frombuffer(key, dtype=np.int32, count=length // 4, offset=offset)
        differs = ours != theirs
        first = int(differs.argmax()) if differs.any() else ours.size
        return first // self.page_size

    def split(self, node: Node, num_pages: int) -> Node:
        """Cuts ``node`` after ``num_pages``; returns the new upper part.

        The old object stays the lower part, so that receipts and queue entries that refer
        to it keep meaning everything down to its end.

            before   parent ── node[0, n)
            after    parent ── upper[0, k) ── node[k, n)
        """
        assert 0 < num_pages < node.pages.size, f"cannot cut {node.pages.size} pages after {num_pages}"
        assert node.parent is not None
        cut = num_pages * self.page_bytes
        upper = Node(node.key[:cut], node.pages[:num_pages].copy(), node.digests[:num_pages], node.parent)
        upper.num_locks = node.num_locks
        upper.last_used = node.last_used
        node.parent.children[upper.key[: self.page_bytes]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:].copy()
        node.digests = node.digests[num_pages:]
        node.parent = upper
        upper.children[node.key[: self.page_bytes]] = node
        return upper

    def extend(self, node: Node, key: bytes, pages: Int32Array) -> tuple[Node, list[bytes]]:
        """Adds pages below ``node``; they must not be there yet.

        A leaf that only the caller holds grows in place; otherwise a child is made.

        Returns:
            The node that ends with the new pages, and the new pages' digests.
        """
        digests = chain(node.digests[-1], key, self.page_size)
        assert len(digests) == pages.size > 0, f"{pages.size} pages for a key of {len(key)} bytes"
        grows = not node.children and node.num_locks == 1 and not node.is_root
        if grows and node.pages.size + pages.size <= MAX_NODE_PAGES:
            node.key += key
            node.pages = np.concatenate((node.pages, pages))
            node.digests += digests
            return node, digests
        assert key[: self.page_bytes] not in node.children, "the first new page is already in the tree"
        child = Node(key, pages.copy(), digests, node)
        node.children[key[: self.page_bytes]] = child
        return child, digests

    def trim(self, leaf: Node, num_pages: int) -> tuple[Int32Array, list[bytes]]:
        """Removes the last ``num_pages`` of a leaf; unlinks it when nothing is left.

        Returns:
            The removed pages, first to last, and their digests.
        """
        assert not leaf.children and leaf.parent is not None
        keep = leaf.pages.size - num_pages
        assert keep >= 0, f"cannot remove {num_pages} of {leaf.pages.size} pages"
        pages, digests = leaf.pages[keep:].copy(), leaf.digests[keep:]
        if keep == 0:
            del leaf.parent.children[leaf.key[: self.page_bytes]]
        leaf.key = leaf.key[: keep * self.page_bytes]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.digests = leaf.digests[:keep]
        return pages, digests

    def nodes(self) -> Iterator[Node]:
        """Walks every node but the roots (for checks and statistics)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack.extend(node.children.values())
