"""Taking parts out of the tree whatever is in flight there: what failed to load, and what is flushed."""

from __future__ import annotations

from hiserve.cache.index.locks import Locks, PrefixLock, path
from hiserve.cache.index.node import Node
from hiserve.cache.index.radix import clear
from hiserve.cache.index.tier import Tier
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferKind, TransferOps


class SubtreeRemoval:
    """Cuts off nodes that may be held, or in use by copies.

    Args:
        tiers: What lies where.
        locks: Those on what is cut off move to what is left.
        ops: Those that use its pages get them as orphans.
    """

    def __init__(self, tiers: CacheTiers, locks: Locks, ops: TransferOps) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops

    def detach(self, top: Node) -> list[PrefixLock]:
        """Removes a node and all below it; nothing of it can be found any more.

        Returns:
            The receipts that lost pages; they end now where the rest of their prefix ends.
        """
        tiers, parent = self._tiers, top.parent
        assert parent is not None, "a root cannot be cut off"
        was_queued = parent.is_evictable
        tiers.versions.tree_epoch += 1
        tiers.tree.unlink(top)
        gone = [top]
        for node in gone:
            gone.extend(node.children.values())
        lost = self._locks.cut(set(gone), parent)
        for node in gone:
            self._forget(node)
            clear(node)
        if not was_queued:
            tiers.queue(parent)
        tiers.queue_copy(parent)
        return lost

    def flush(self, tier: Tier | None) -> int:
        """Empties a tier, or both, but for what receipts hold; copies in flight end in nothing.

        Returns:
            Pages freed at once; those that copies use follow when they end.
        """
        tiers, device, host = self._tiers, self._tiers.device, self._tiers.host
        if tier is Tier.DEVICE:
            count = device.num_evictable
            if count:
                tiers.evict(count)
            return count
        num_free, num_free_host = device.pages.num_free, host.pages.num_free
        kept = {node for lock in self._locks.prefix_locks for node in path(lock.node)}
        for root in list(tiers.tree.roots.values()):
            self._cut_below(root, kept, spares_device=tier is Tier.HOST)
        to_load = {node for each in self._locks.prefix_locks if each.node.is_on_host_only for node in path(each.node)}
        for node in tiers.tree.nodes():
            if node.host_pages.size and node not in to_load:
                self._ops.forget_host(node)
                tiers.versions.tree_epoch += 1
        for op in self._ops:
            if op.lock.is_host:
                self._locks.shorten(op.lock)
                op.lock.is_lost |= op.kind is TransferKind.PREFETCH
        for leaves in (device.eviction.leaves, host.eviction.leaves, tiers.reserve, tiers.copies):
            leaves.sweep()
        num_freed = device.pages.num_free - num_free
        device.num_evicted += num_freed
        return num_freed + host.pages.num_free - num_free_host

    def _cut_below(self, root: Node, kept: set[Node], *, spares_device: bool) -> None:
        stack = [root]
        while stack:
            for child in list(stack.pop().children.values()):
                if child in kept or (spares_device and child.pages.size):
                    stack.append(child)
                else:
                    self.detach(child)

    def _forget(self, node: Node) -> None:
        """Takes a node out of all counts and gives its pages back."""
        device, host = self._tiers.device, self._tiers.host
        self._tiers.lost.add(node.digests)
        if node.num_locks == 0:
            device.num_evictable -= node.pages.size
            if node.num_host_locks == 0:
                host.num_evictable -= node.host_pages.size
        device.shares.charge(node.owner, -node.pages.size)
        host.shares.charge(node.owner, -node.host_pages.size)
        self._tiers.reserve.leave(node)
        if node.pages.size and not node.device_ready_op:
            device.remove(node.digests)
        if node.host_pages.size and not node.host_ready_op:
            host.remove(node.digests)
        self._ops.free(node)
