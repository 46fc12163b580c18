"""The only door to the index: match, lock, take, publish, release, flush."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np

from hiserve.cache.index.events import PrefixEvents
from hiserve.cache.index.eviction import Eviction
from hiserve.cache.index.node import Node
from hiserve.cache.index.pages import PageAllocator
from hiserve.cache.index.radix import RadixTree
from hiserve.cache.index.version import Versions
from hiserve.core.digest import namespace_digest
from hiserve.core.plan import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached prefix of a prompt. Valid while ``tree_epoch`` stands.

    Attributes:
        num_tokens: Tokens covered: a whole number of pages.
        tree_epoch: Epoch of the tree at the time of the match.
    """

    num_tokens: int
    tree_epoch: int
    _node: Node
    _num_beyond: int  # pages of the node after the match: a split leaves a node's end where it is


class Receipt:
    """Proof of a lock on a prefix; every lock ends in exactly one release.

    As a context manager it is released on the way out, unless ``keep`` handed it on.

    Attributes:
        node: The last node of the locked prefix; ``publish`` moves it on.
        pages: int32 ``[p]``. Where the prefix lay when it was locked.
        is_open: Whether it still has to be released.
    """

    __slots__ = ("_cache", "_is_kept", "is_open", "node", "pages")

    def __init__(self, cache: CacheManager, node: Node, pages: Int32Array) -> None:
        self._cache = cache
        self.node = node
        self.pages = pages
        self.is_open = True
        self._is_kept = False

    def keep(self) -> Receipt:
        """Hands the lock to a longer-lived owner, who must release it."""
        self._is_kept = True
        return self

    def __enter__(self) -> Receipt:
        """Starts the short life of a lock."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the lock unless it was kept, or when an exception passes."""
        if self.is_open and (not self._is_kept or kind is not None):
            self._cache.release(self)


class CacheManager:
    """Owns the pages and the tree; the planner sees nothing below it.

    Args:
        num_pages: Pages in the device pool, the sink included.
        page_size: Tokens per page.
        namespace: Base digest of everything that keeps caches apart but the tenant.
        eviction: Decides which unlocked leaf goes first.
    """

    def __init__(self, *, num_pages: int, page_size: int, namespace: bytes, eviction: Eviction) -> None:
        self.page_size = page_size
        self.namespace = namespace
        self.versions = Versions()
        self.pages = PageAllocator(num_pages)
        self.tree = RadixTree(page_size)
        self.num_evictable = 0
        self.num_evicted = 0
        self._eviction = eviction
        self._events = PrefixEvents()
        self._clock = 0

    def match(self, tenant: bytes, key: bytes) -> Match:
        """Finds the longest cached prefix, leaving at least the last token to compute.

        Changes nothing. ``key`` is the whole prompt, packed.
        """
        usable = max(0, len(key) // 4 - 1) // self.page_size * self.tree.page_bytes
        root = self.tree.root(namespace_digest(self.namespace, tenant))
        node, node_pages, num_pages = self.tree.find(root, key[:usable])
        return Match(num_pages * self.page_size, self.versions.tree_epoch, node, node.pages.size - node_pages)

    def lock(self, match: Match) -> Receipt:
        """Keeps a matched prefix from eviction until the receipt is released."""
        assert match.tree_epoch == self.versions.tree_epoch, "the tree changed since the match; match again"
        node = self._end_of(match)
        self._clock += 1
        runs: list[Int32Array] = []
        step = node
        while True:
            if step.num_locks == 0:
                self.num_evictable -= step.pages.size
            step.num_locks += 1
            step.last_used = self._clock
            runs.append(step.pages)
            if step.parent is None:
                break
            step = step.parent
        runs.reverse()
        return Receipt(self, node, np.concatenate(runs))

    def release(self, receipt: Receipt) -> None:
        """Returns a lock. Exactly once per receipt."""
        assert receipt.is_open, "this receipt was released before"
        receipt.is_open = False
        self._clock += 1
        step: Node | None = receipt.node
        root = receipt.node
        while step is not None:
            assert step.num_locks > 0, f"a node of {step.pages.size} pages has no lock to return"
            step.num_locks -= 1
            step.last_used = self._clock
            if step.num_locks == 0:
                self.num_evictable += step.pages.size
                if step.is_evictable:
                    self._eviction.add(step)
            root, step = step, step.parent
        self.tree.drop_root_if_unused(root)

    def take(self, wanted: Int32Array) -> Int32Array | None:
        """Takes one page per entry of ``wanted`` (see ``PageAllocator.take``), evicting if need be.

        Returns:
            int32 ``[n]`` pages, or None when free and evictable pages together do not suffice
            (then nothing was evicted).
        """
        short = int(wanted.size) - self.pages.num_free
        if short > self.num_evictable:
            return None
        if short > 0:
            self._evict(short)
        taken = self.pages.take(wanted)
        assert taken is not None, f"{wanted.size} pages wanted, {self.pages.num_free} free after eviction"
        return taken

    def give(self, pages: Int32Array) -> None:
        """Returns pages that were never published."""
        self.pages.give(pages)

    def publish(self, receipt: Receipt, key: bytes, pages: Int32Array) -> Int32Array:
        """Makes freshly computed full pages findable, below what ``receipt`` holds.

        Where the tree already has the same tokens, the caller's copies are given back and
        the tree's pages are to be used instead: a relocation of a live request.

        Args:
            receipt: Lock on the prefix before ``key``; moves on to its end.
            key: Packed tokens of the new pages.
            pages: int32 ``[p]``. Where they were computed; owned by the caller until now.

        Returns:
            int32 ``[p]``. The pages to use from now on; ``pages`` itself when none moved.
        """
        assert receipt.is_open and len(key) == pages.size * self.tree.page_bytes
        canonical = pages
        done = 0
        node = receipt.node
        while done < pages.size:
            offset = done * self.tree.page_bytes
            child = node.children.get(key[offset : offset + self.tree.page_bytes])
            if child is None:
                node = self._insert(node, key[offset:], pages[done:])
                break
            shared = self.tree.common_pages(child.key, key, offset)
            if shared < child.pages.size:
                child = self.tree.split(child, shared)
            canonical = np.concatenate((canonical[:done], child.pages, pages[done + shared :]))
            node = self._lock_child(child)
            done += shared
        receipt.node = node
        if done:
            self.pages.give(pages[:done])
            self.versions.relocation_version += 1
        return canonical

    def flush(self) -> int:
        """Evicts everything that no receipt holds; returns how many pages."""
        count = self.num_evictable
        if count:
            self._evict(count)
        return count

    def take_events(self) -> tuple[bytes, bytes]:
        """Returns (published, removed) page digests since the last call, 16 bytes each."""
        return self._events.take()

    def _end_of(self, match: Match) -> Node:
        """Returns the node that ends where the match ends, cutting one if need be."""
        node, num_beyond = match._node, match._num_beyond
        if node.is_root:
            return self.tree.keep_root(node)
        while num_beyond >= node.pages.size:  # another lock cut this node since the match
            num_beyond -= node.pages.size
            assert node.parent is not None
            node = node.parent
        return self.tree.split(node, node.pages.size - num_beyond) if num_beyond else node

    def _insert(self, node: Node, key: bytes, pages: Int32Array) -> Node:
        end, digests = self.tree.extend(node, key, pages)
        if end is not node:
            end.num_locks = 1
            self._clock += 1
            end.last_used = self._clock
            self._touch(node)
        self._events.publish(digests)
        self.versions.tree_epoch += 1
        return end

    def _lock_child(self, child: Node) -> Node:
        if child.num_locks == 0:
            self.num_evictable -= child.pages.size
        child.num_locks += 1
        self._clock += 1
        self._touch(child)
        return child

    def _touch(self, node: Node | None) -> None:
        """Marks the path as just used, so that no parent looks older than its child."""
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def _evict(self, count: int) -> None:
        """Frees ``count`` pages, least recently used leaf first, last page of a leaf first."""
        self.versions.tree_epoch += 1
        self.num_evictable -= count
        self.num_evicted += count
        freed: list[Int32Array] = []
        lost: list[bytes] = []
        while count:
            leaf = self._eviction.pop()
            assert leaf is not None and leaf.parent is not None, f"{count} pages short of what was counted evictable"
            parent = leaf.parent
            pages, digests = self.tree.trim(leaf, min(count, leaf.pages.size))
            freed.append(pages)
            lost += digests
            count -= pages.size
            if leaf.pages.size:
                self._eviction.add(leaf)
            elif parent.is_evictable:
                self._eviction.add(parent)
            elif parent.is_root:
                self.tree.drop_root_if_unused(parent)
        self.pages.give(np.concatenate(freed))
        self._events.remove(lost)
