"""The pages of both tiers under the tree: allocated, demoted, evicted and freed."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from hiserve.cache.index.eviction import MAX_ACCOUNTS, EvictionReserve, LeafHeap
from hiserve.cache.index.miss_reasons import LostPages
from hiserve.cache.index.nodes import STEP_SHIFT, Node, Tail
from hiserve.cache.index.radix import MAX_NODE_PAGES, RadixTree
from hiserve.cache.index.retention import HostTimes, Retention, RetentionQuota
from hiserve.cache.index.tier_pages import TierPages
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES


class CacheTiers:
    """The tree and the pages of both tiers under it.

    Without a host tier (``has_host``), no page of ``host`` is ready.

    Attributes:
        reserve: The leaves that the device can evict without loss; empty without a host tier.
        retention: The nodes that are evicted after all others.
        copies: Nodes whose host copy may be freed because the device has them too: the latest used first, spare ones last.
        tree_epoch: Grows when the result of a match could change (insert, load, demote, evict, flush): a match of
            another epoch is invalid.
        relocation_version: Grows when a page of a live request moves: another request's page replaced it, or its load
            failed. Allocation and release do not change it.
        clock: Logical time, ``step << 32 | count``: a node's last use includes the last step whose forward
            may touch its pages, because a forward reads only locked pages.
        lost: Pages that left the cache.
        freed_host: Host pages freed since ``take_freed_host_pages``.
        num_unbacked: Pages evicted from the device that were on no other tier.
    """

    def __init__(
        self, tree: RadixTree, device: TierPages[Node], host: TierPages[Node | Tail], *, has_host: bool
    ) -> None:
        self.tree = tree
        self.device = device
        self.host = host
        self.reserve = EvictionReserve(
            device.pages, host.pages, device.eviction, device.shares, is_kept=has_host, on_change=self.queue_copy
        )
        quota = RetentionQuota((host if has_host else device).pages)
        self.retention = Retention(tree, quota, self.queue, HostTimes(host.pages.num_pages))
        self.copies = LeafHeap(lambda node: (node.is_spare, -node.last_used), attrgetter("is_copy"))
        self.tree_epoch = 1
        self.relocation_version = 1
        self.clock = 0
        self.lost = LostPages()
        self.freed_host: list[Int32Array] = []
        self.num_unbacked = 0

    @property
    def step(self) -> int:
        """The last step that was planned."""
        return self.clock >> STEP_SHIFT

    def allocate(self, wanted: Int32Array) -> Int32Array | None:
        """Allocates device pages, with evictions if necessary; None, and nothing evicted, when there are too few."""
        short = int(wanted.size) - self.device.pages.num_free
        if short > self.device.num_evictable:
            return None
        self.reserve.num_taken += int(wanted.size)
        if short > 0:
            self.evict(short)
        taken = self.device.pages.allocate(wanted)
        assert taken is not None, f"{wanted.size} pages wanted, {self.device.pages.num_free} free after eviction"
        return taken

    def allocate_host(self, count: int, *, num_left: int | None = None) -> Int32Array:
        """Allocates ``count`` host pages, with evictions if necessary; so many must be available. See ``make_host_room``."""
        self.make_host_room(count, num_left=num_left)
        if self.host.pages.num_free < count:
            self._free_copies(count - self.host.pages.num_free, and_spare=True)
        taken = self.host.pages.allocate_any(count)
        assert taken is not None, f"{count} host pages wanted, {self.host.pages.num_free} free after eviction"
        return taken

    @property
    def has_idle_host_pages(self) -> bool:
        """Whether the host has pages that are free, or copies of the device's that are not spare."""
        return self.host.num_unused > 0 or ((head := self.copies.head()) is not None and not head[0])

    def make_host_room(
        self, count: int, *, num_left: int | None = None, evicts: bool = True, keeps_tails: bool = False
    ) -> int:
        """Frees host pages until ``count`` are free; returns how many of these there are.

        Copies of pages that the device has are freed first, except those of spare nodes: the host keeps the pages that the
        device lacks. Where steps outrun the reserve last copies are: pages of the device are evicted too soon to come back.

        Args:
            count: Pages wanted.
            num_left: Pages that stay free besides; default: ``num_reserved``.
            evicts: Whether last copies may be evicted.
            keeps_tails: Whether copies stay that would take a tail along.
        """
        num_left = self.host.num_reserved if num_left is None else num_left
        while (short := count + num_left - self.host.pages.num_free) > 0:
            if evicts and self.reserve.is_outrun and self._evict_host(short):
                continue
            if not (self._free_copies(short, keeps_tails=keeps_tails) or (evicts and self._evict_host(short))):
                break
        return max(0, min(count, self.host.pages.num_free - num_left))

    def free(self, pages: Int32Array) -> None:
        """Frees device pages."""
        self.device.free(pages, self.step)

    def free_host(self, pages: Int32Array) -> None:
        """Frees host pages; no transfer may read or write them."""
        self.host.free(pages, 0)
        self.freed_host.append(pages)
        self.retention.host_times.drop(pages)

    def evict(self, count: int) -> None:
        """Frees ``count`` device pages in the order of ``TenantShares`` and the eviction, last page of a leaf first."""
        self.tree_epoch += 1
        self.device.num_evictable -= count
        self.device.num_evicted += count
        freed: list[Int32Array] = []
        steps: list[int] = []
        for leaf, most in self.device.shares.next(self.device.eviction):
            steps.append(leaf.last_used >> STEP_SHIFT)
            share = min(count, most, leaf.num_pages)
            freed.append(self._demote(leaf, share) if leaf.host_pages.size else self._delete(leaf, share))
            count -= share
            if not count:
                break
        assert not count, f"{count} pages short of what was counted evictable"
        self.device.free(np.concatenate(freed), np.repeat(steps, [pages.size for pages in freed]))

    def _evict_host(self, count: int) -> int:
        """Frees up to ``count`` pages of the next leaf that is on the host alone, or the next tail; returns how many."""
        leaf, most = next(self.host.shares.next(self.host.eviction), (None, 0))
        if leaf is None:
            return 0
        if isinstance(leaf, Tail):
            return self._evict_tail(leaf)
        self.tree_epoch += 1
        parent, account = leaf.parent, leaf.account
        assert parent is not None
        count = min(count, most, leaf.num_pages)
        self.retention.leave(leaf, count)
        _, pages, digests = self.tree.trim(leaf, count)
        self.host.num_evictable -= pages.size
        self.host.num_evicted += pages.size
        self.host.shares.charge(account, -pages.size)
        self.host.remove(digests)
        self.lost.add(digests)
        self.free_host(pages)
        self.queue(leaf if leaf.num_pages else parent)
        return int(pages.size)

    def _evict_tail(self, tail: Tail) -> int:
        assert tail.frames is not None
        num_frames = tail.frames.size
        self.host.num_evicted += num_frames
        tail.leave_host()
        return num_frames

    def _free_copies(self, count: int, *, and_spare: bool = False, keeps_tails: bool = False) -> int:
        """Frees up to ``count`` host pages that the device has too; returns how many."""
        num_freed = 0
        while num_freed < count and (head := self.copies.head()) is not None and (and_spare or not head[0]):
            node = self.copies.pop()
            assert node is not None
            if keeps_tails and any(tail.frames is not None for tail in (node.tails or {}).values()):
                self.copies.add(node)
                break
            if node.num_pages > count - num_freed:
                self.queue_copy(self.tree.split(node, node.num_pages - (count - num_freed)))
            pages = self.take_off_host(node)
            self.free_host(pages)
            num_freed += pages.size
            node.is_wanted = True
            if node.is_evictable:
                self.queue(node)
        return num_freed

    def put_on_host(self, node: Node, pages: Int32Array, ready_op: int = 0) -> None:
        """Gives host pages to a node of the device alone; offload ``ready_op`` fills them, unless it is 0."""
        assert not node.host_pages.size and pages.size == node.num_pages and node.parent is not None
        node.host_pages = pages
        node.host_ready_op = ready_op
        node.parent.num_host_children += 1
        self.host.shares.charge(node.account, pages.size)
        if not node.num_locks and not node.num_host_locks:
            self.host.num_evictable += pages.size
        if not ready_op:
            self.host.insert(node)
        if node.retained_until_s:
            self.retention.host_times.add(pages, node.retained_until_s)

    def take_off_host(self, node: Node) -> Int32Array:
        """Removes and returns the host pages of a node that stays on the device."""
        pages, node.host_pages = node.host_pages, NO_PAGES
        assert pages.size and node.parent is not None
        if not node.host_ready_op:
            self.host.remove(node.digests)
        node.host_ready_op = 0
        for tail in list((node.tails or {}).values()):
            tail.leave_host()
        node.parent.num_host_children -= 1
        self.host.shares.charge(node.account, -pages.size)
        if not node.num_locks and not node.num_host_locks:
            self.host.num_evictable -= pages.size
        self.reserve.leave_path(node)
        self.queue_copy(node.parent)
        return pages

    def queue(self, node: Node) -> None:
        """Queues a node that lost a child, a lock or a tier for eviction, or removes an empty root."""
        if node.parent is None:
            self.tree.drop_root_if_unused(node)
            return
        if node.is_evictable:
            self.device.eviction.add(node)
            self.reserve.add(node)
        elif node.is_host_evictable:
            self.host.eviction.add(node)
        if node.host_pages.size:
            self.queue_copy(node)

    def queue_copy(self, node: Node) -> None:
        """Queues the host copy of a node to be freed, if the device has the node too."""
        if node.is_copy:
            self.copies.add(node)

    def mark_spare(self, leaf: Node) -> None:
        """Makes a leaf of the device spare: it is evicted before all others."""
        self.reserve.mark(leaf)
        self.device.eviction.add(leaf)

    def assign_account(self, root: Node, account: bytes) -> None:
        """Charges a tree without account, with all its pages, to an account that can have a share."""
        if root.account or (account not in self.device.shares.held and len(self.device.shares.held) >= MAX_ACCOUNTS):
            return
        root.account = account
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            for shares, pages in ((self.device.shares, node.pages), (self.host.shares, node.host_pages)):
                shares.charge(node.account, -pages.size)
                shares.charge(account, pages.size)
            for tail in (node.tails or {}).values():
                tail.assign_account(account)
            retained = node.num_pages if node.retained_until_s else 0
            self.retention.quota.charge(node.account, -retained)
            node.account = account
            self.retention.quota.charge(node.account, retained)
            self.queue(node)
            stack.extend(node.children.values())

    def put_on_device(self, node: Node, pages: Int32Array, *, ready_op: int = 0, step: int = 0) -> None:
        """Gives device pages to a locked node of the host alone; a load or a step fills them."""
        assert node.is_on_host_only and node.num_locks and pages.size == node.num_pages and node.parent is not None
        node.pages = pages
        node.device_ready_op = ready_op
        node.written_step = step
        node.parent.num_device_children += 1
        self.device.shares.charge(node.account, pages.size)
        self.tree_epoch += 1
        if not ready_op:
            self.device.insert(node)
        self.queue_copy(node)

    def notify_all(self) -> None:
        """Reports every readable page to the listener, parents first."""
        for node in self.tree.nodes():
            if node.pages.size and not node.device_ready_op:
                self.device.notify(node)
            if node.host_pages.size and not node.host_ready_op:
                self.host.notify(node)

    def join(self, node: Node) -> None:
        """Joins a node with its parent if all their attributes are equal, so that paths stay short."""
        parent = node.parent
        if (
            parent is None
            or parent.parent is None
            or len(parent.children) != 1
            or parent.num_pages + node.num_pages > MAX_NODE_PAGES
            or bool(parent.host_pages.size) != bool(node.host_pages.size)
            or bool(parent.pages.size) != bool(node.pages.size)
            or parent.pending_op
            or node.pending_op
            or parent.is_queued
            or (parent.is_wanted, parent.is_spare) != (node.is_wanted, node.is_spare)
            or (parent.num_locks, parent.num_host_locks) != (node.num_locks, node.num_host_locks)
            or (parent.last_used, parent.priority) != (node.last_used, node.priority)
            or parent.retained_until_s != node.retained_until_s
            or (parent.digests[-1] in self.lost.awaited) != (node.digests[0] in self.lost.awaited)
        ):
            return
        self.tree.join(node)
        self.tree_epoch += 1

    def _delete(self, leaf: Node, count: int) -> Int32Array:
        parent = leaf.parent
        assert parent is not None
        if leaf.is_spare:
            self.reserve.leave(leaf, count)
        self.retention.leave(leaf, count)
        pages, _, digests = self.tree.trim(leaf, count)
        self.device.shares.charge(leaf.account, -count)
        self.device.remove(digests)
        self.lost.add(digests)
        self.num_unbacked += count
        self.queue(leaf if leaf.num_pages else parent)
        return pages

    def _demote(self, leaf: Node, count: int) -> Int32Array:
        """Removes the last ``count`` pages of a leaf from the device; they stay on the host."""
        if count < leaf.num_pages:
            self.tree.split(leaf, leaf.num_pages - count)
        parent, pages = leaf.parent, leaf.pages
        assert parent is not None
        self.reserve.leave(leaf)
        self.device.remove(leaf.digests)
        self.device.shares.charge(leaf.account, -count)
        leaf.pages = NO_PAGES
        for tail in list((leaf.tails or {}).values()):
            tail.leave_device()
        parent.num_device_children -= 1
        self.queue(leaf)
        self.queue(parent)
        if len(leaf.children) == 1:
            self.join(next(iter(leaf.children.values())))
        return pages
