"""The radix tree over page-aligned token keys: find, split, join, extend, trim.

Keys are packed int32 bytes, so that comparing a run of tokens is one ``startswith``
(a memcmp); children are found by the bytes of their first page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hiserve.cache.index.nodes import Node, clear, close_tails, join_tails, make_root, split_tails
from hiserve.core.digest import Chain, chain
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES

MAX_NODE_PAGES = 128  # a leaf grows in place up to here: bounds the bytes that each insert of a growing row copies


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
            split_tails(upper, node)
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
            join_tails(parent, node)
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
        if leaf.tails:
            close_tails(leaf, keep)  # while their boundaries have names
        leaf.key = leaf.key[: keep * self.page_bytes]
        leaf.pages = leaf.pages[:keep].copy()
        leaf.host_pages = leaf.host_pages[:keep].copy()
        leaf.digests = leaf.digests[:keep]
        leaf.num_pages = keep
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
