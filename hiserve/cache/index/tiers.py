"""What lies on which tier: pages taken, demoted and evicted, and what may go."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.events import PrefixEvents
from hiserve.cache.index.eviction import Eviction
from hiserve.cache.index.misses import Lost
from hiserve.cache.index.node import NO_PAGES, Node
from hiserve.cache.index.pages import PageAllocator
from hiserve.cache.index.radix import MAX_NODE_PAGES, RadixTree
from hiserve.cache.index.version import Versions
from hiserve.core.plan import Int32Array

STEP_SHIFT = 32  # the clock's upper half is the step, its lower half counts within


class Tier(StrEnum):
    """Where pages lie."""

    DEVICE = "device"
    HOST = "host"


class TierListener(Protocol):
    """Hears, in order, of every page that a tier can give from now on, or cannot any more."""

    def stored(self, tier: Tier, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        """A run of pages can be read.

        Args:
            tier: Where.
            parent: Digest of the page before the run, which the tier has, too; None at the start of a prefix.
            digests: Of the run.
            key: Its packed tokens.
        """

    def removed(self, tier: Tier, digests: list[bytes]) -> None:
        """Pages cannot be read any more. The list changes after the call."""

    def cleared(self) -> None:
        """Nothing can be read on any tier any more, but for what is stored from now on."""


class TierPages:
    """The pages of one tier.

    Args:
        tier: Which.
        num_pages: Pages in the pool, page 0 included, which is never handed out.
        eviction: Decides which unlocked leaf goes first.
        num_ready: Pages below this can be used already; all, unless given.
        listener: Hears what ``events`` collects, as it happens and with the tokens.

    Attributes:
        pages: Which are free.
        eviction: Holds every node of the tier that may lose its tail.
        events: Pages that can be read on this tier, or cannot any more.
        num_evictable: Pages that eviction could free, in time.
        num_evicted: Pages it did free.
        num_reserved: Of the free and evictable ones, those that are left for staged uploads (see ``Uploads``).
        last_step: int64 ``[num_pages]``. Of a free page, the last step whose forward may touch it.
    """

    def __init__(
        self,
        tier: Tier,
        num_pages: int,
        eviction: Eviction,
        num_ready: int | None = None,
        listener: TierListener | None = None,
    ) -> None:
        self._tier = tier
        self._listener = listener
        self.pages = PageAllocator(num_pages, num_ready)
        self.eviction = eviction
        self.events = PrefixEvents()
        self.num_evictable = 0
        self.num_evicted = 0
        self.num_reserved = 0
        self.last_step: NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)

    @property
    def num_available(self) -> int:
        """Pages that may be taken to cache something."""
        return max(0, self.pages.num_free + self.num_evictable - self.num_reserved)

    def publish(self, node: Node, start: int = 0) -> None:
        """Tells that the pages of a node, from the one at ``start`` on, can be read here."""
        self.events.publish(node.digests[start:])
        self.tell(node, start)

    def tell(self, node: Node, start: int = 0) -> None:
        """Tells the listener alone."""
        if self._listener is not None:
            assert node.parent is not None
            parent = None if node.parent.is_root else node.parent.digests[-1]
            if start:
                parent = node.digests[start - 1]
            key = node.key[start * len(node.key) // node.num_pages :]
            self._listener.stored(self._tier, parent, node.digests[start:], key)

    def remove(self, digests: list[bytes]) -> None:
        """Tells that pages cannot be read here any more."""
        self.events.remove(digests)
        if self._listener is not None:
            self._listener.removed(self._tier, digests)

    def give(self, pages: Int32Array, last_step: NDArray[np.int64] | int) -> None:
        """Returns pages; forwards up to ``last_step`` may still touch them."""
        self.last_step[pages] = last_step
        self.pages.give(pages)


class Tiers:
    """The tree and the pages of both tiers under it.

    Args:
        tree: Who shares which prefix.
        device: Its pages on the device.
        host: Its pages on the host; without a host tier, a pool in which no page is ready.

    Attributes:
        versions: Both counters.
        clock: Logical time, ``step << 32 | count``: a node's last use also tells the last step whose forward
            may touch its pages, because a forward reads only what a lock holds.
        lost: Pages that were cached and are no more.
        freed_host: Host pages given back since somebody last asked.
        num_unbacked: Pages evicted from the device that were nowhere else.
    """

    def __init__(self, tree: RadixTree, device: TierPages, host: TierPages) -> None:
        self.tree = tree
        self.device = device
        self.host = host
        self.versions = Versions()
        self.clock = 0
        self.lost = Lost()
        self.freed_host: list[Int32Array] = []
        self.num_unbacked = 0

    @property
    def step(self) -> int:
        """The last step that was planned."""
        return self.clock >> STEP_SHIFT

    def begin_after(self, step_id: int) -> None:
        """Tells that this step is planned: its forward may touch whatever is in use now."""
        self.clock = max(self.clock, step_id << STEP_SHIFT)

    def take(self, wanted: Int32Array) -> Int32Array | None:
        """Takes device pages, evicting if need be; None, and nothing evicted, when there are too few."""
        short = int(wanted.size) - self.device.pages.num_free
        if short > self.device.num_evictable:
            return None
        if short > 0:
            self.evict(short)
        taken = self.device.pages.take(wanted)
        assert taken is not None, f"{wanted.size} pages wanted, {self.device.pages.num_free} free after eviction"
        return taken

    def take_host(self, count: int, *, num_left: int | None = None) -> Int32Array:
        """Takes ``count`` host pages, evicting if need be; there must be so many available.

        Args:
            count: Pages.
            num_left: Pages that are to stay free, as far as eviction can help; those that are reserved unless given.
        """
        host = self.host
        num_left = host.num_reserved if num_left is None else num_left
        short = count - host.pages.num_free
        short = max(short, min(short + num_left, host.num_evictable))
        if short > 0:
            self.evict_host(short)
        taken = self.host.pages.take_any(count)
        assert taken is not None, f"{count} host pages wanted, {self.host.pages.num_free} free after eviction"
        return taken

    def give(self, pages: Int32Array) -> None:
        """Returns device pages that were in use until now."""
        self.device.give(pages, self.step)

    def give_host(self, pages: Int32Array) -> None:
        """Returns host pages; no copy may be reading or writing them."""
        self.host.give(pages, 0)
        self.freed_host.append(pages)

    def evict(self, count: int) -> None:
        """Frees ``count`` device pages, least recently used leaf first, last page of a leaf first."""
        self.versions.tree_epoch += 1
        self.device.num_evictable -= count
        self.device.num_evicted += count
        freed: list[Int32Array] = []
        steps: list[int] = []
        while count:
            leaf = self.device.eviction.pop()
            assert leaf is not None and leaf.parent is not None, f"{count} pages short of what was counted evictable"
            steps.append(leaf.last_used >> STEP_SHIFT)
            share = min(count, leaf.num_pages)
            freed.append(self._demote(leaf, share) if leaf.host_pages.size else self._delete(leaf, share))
            count -= share
        self.device.give(np.concatenate(freed), np.repeat(steps, [pages.size for pages in freed]))

    def evict_host(self, count: int) -> None:
        """Frees ``count`` pages that lie on the host alone, in the same order."""
        self.versions.tree_epoch += 1
        self.host.num_evictable -= count
        self.host.num_evicted += count
        while count:
            leaf = self.host.eviction.pop()
            assert leaf is not None and leaf.parent is not None, f"{count} pages short of what was counted evictable"
            parent = leaf.parent
            _, pages, digests = self.tree.trim(leaf, min(count, leaf.num_pages))
            self.host.remove(digests)
            self.lost.add(digests)
            self.give_host(pages)
            count -= pages.size
            if leaf.num_pages:
                self.host.eviction.add(leaf)
            else:
                self.queue(parent)

    def queue(self, node: Node) -> None:
        """Offers a node that lost a child, a hold or a tier to eviction, or drops a root of which nothing is left."""
        if node.parent is None:
            self.tree.drop_root_if_unused(node)
        elif node.is_evictable:
            self.device.eviction.add(node)
        elif node.is_host_evictable:
            self.host.eviction.add(node)

    def put_on_device(self, node: Node, pages: Int32Array, *, ready_op: int = 0, step: int = 0) -> None:
        """Gives a locked node that lies on the host alone a copy on the device, which a load or a step fills."""
        assert node.is_on_host_only and node.num_locks and pages.size == node.num_pages and node.parent is not None
        node.pages = pages
        node.device_ready_op = ready_op
        node.written_step = step
        node.parent.num_device_children += 1
        self.versions.tree_epoch += 1
        if not ready_op:
            self.device.publish(node)

    def tell_all(self) -> None:
        """Tells the listener of every page that can be read, parents first."""
        for node in self.tree.nodes():
            if node.pages.size and not node.device_ready_op:
                self.device.tell(node)
            if node.host_pages.size and not node.host_ready_op:
                self.host.tell(node)

    def join(self, node: Node) -> None:
        """Joins a backed node with its parent where nothing tells them apart, so that paths stay short."""
        parent = node.parent
        if (
            parent is None
            or parent.parent is None
            or len(parent.children) != 1
            or parent.num_pages + node.num_pages > MAX_NODE_PAGES
            or not (parent.host_pages.size and node.host_pages.size)
            or bool(parent.pages.size) != bool(node.pages.size)
            or parent.pending_op
            or node.pending_op
            or (parent.num_locks, parent.num_host_locks) != (node.num_locks, node.num_host_locks)
            or (parent.last_used, parent.priority) != (node.last_used, node.priority)
            or (parent.digests[-1] in self.lost.awaited) != (node.digests[0] in self.lost.awaited)
        ):
            return
        self.tree.join(node)
        self.versions.tree_epoch += 1

    def _delete(self, leaf: Node, count: int) -> Int32Array:
        parent = leaf.parent
        assert parent is not None
        pages, _, digests = self.tree.trim(leaf, count)
        self.device.remove(digests)
        self.lost.add(digests)
        self.num_unbacked += count
        if leaf.num_pages:
            self.device.eviction.add(leaf)
        else:
            self.queue(parent)
        return pages

    def _demote(self, leaf: Node, count: int) -> Int32Array:
        """Takes the last ``count`` pages of a leaf off the device; they stay on the host."""
        if count < leaf.num_pages:
            self.tree.split(leaf, leaf.num_pages - count)
        parent, pages = leaf.parent, leaf.pages
        assert parent is not None
        self.device.remove(leaf.digests)
        leaf.pages = NO_PAGES
        parent.num_device_children -= 1
        if not leaf.num_host_locks:
            self.host.num_evictable += count
        self.queue(leaf)
        self.queue(parent)
        if len(leaf.children) == 1:
            self.join(next(iter(leaf.children.values())))
        return pages
