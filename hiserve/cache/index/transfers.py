"""Loads and offloads: which nodes are copied, and the changes at the end of a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from hiserve.cache.index.locks import Locks, PrefixLock, path
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.tails import TailTiers
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import SubtreeRemoval, TransferOp, TransferOps, nodes_in
from hiserve.cache.index.uploads import Uploads
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import DEVICE_KINDS, NO_PAGES, CopyKind, PageCopy, PageRun

MANY_COPIES = 1 << 30
# Offloads of tails that a step may begin whatever it begins of history. One order holds the new pages of many requests, but
# one tail: a step in which several requests end would leave tails behind, which are lost with their pages on the device.
MIN_TAILS = 4
MIN_SWEEP = 64  # queued nodes, from which those that left the tree are removed


class Transfers:
    """Begins and ends loads and offloads.

    A node is offloaded only after its parents, or together with them: a failed offload leaves no gap on the host.

    Args:
        removal: Removes nodes whose load failed.
        uploads: Is offered offloaded pages; None without a store, or where it is offered inserted pages.
        tails: Those of the pages; None where each boundary is a resume point.

    Attributes:
        num_arrived: By kind, LOAD and OFFLOAD: pages made findable by ended copies.
        num_failed: By kind: pages whose copy failed.
        num_without_room: Pages that were not offloaded because no host page could be freed.
    """

    def __init__(
        self,
        tiers: CacheTiers,
        locks: Locks,
        ops: TransferOps,
        removal: SubtreeRemoval,
        uploads: Uploads | None,
        tails: TailTiers | None,
    ) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._removal = removal
        self._uploads = uploads
        self._tails = tails
        self._queue: deque[Node] = deque()
        self._sweep_at = MIN_SWEEP
        self._saves: dict[int, int] = {}
        self._is_stuck = False  # no host page is idle for the next leaf, until a copy ends or pages are allocated
        self.num_arrived = dict.fromkeys(DEVICE_KINDS, 0)
        self.num_failed = dict.fromkeys(DEVICE_KINDS, 0)
        self.num_without_room = 0

    @property
    def has_offloads(self) -> bool:
        """Whether ``begin_offloads`` has anything to do."""
        tiers = self._tiers
        has_room = self._is_urgent or (tiers.has_idle_host_pages and not self._is_stuck)
        is_saving = self.num_to_save and has_room and tiers.reserve.has_candidates
        has_tails = self._tails is not None and self._tails.has_offloads
        return bool(is_saving) or has_tails or (bool(self._queue) and self._has_room)

    @property
    def num_to_offload(self) -> int:
        """Nodes that wait for their offload; some may have left the tree."""
        return len(self._queue)

    @property
    def num_to_save(self) -> int:
        """Pages missing from the reserve, those being offloaded for it not counted."""
        return max(0, self._tiers.reserve.num_wanted - sum(self._saves.values()))

    @property
    def _is_urgent(self) -> bool:
        return self._tiers.reserve.num_short > sum(self._saves.values())

    @property
    def _has_room(self) -> bool:
        """Whether the host takes pages that wait for their offload, which the device does not evict yet."""
        host = self._tiers.host
        return host.num_unused > 0 or (self._tiers.reserve.is_outrun and host.num_available > 0 and not self._is_stuck)

    def enqueue(self, node: Node) -> None:
        """Queues a node and its ancestors for offload, if the host lacks them."""
        if node.is_queued and node.is_wanted and node.num_pages:
            return  # the most frequent case
        node = _surviving(node)
        step: Node | None = node
        while step is not None and step.num_pages and not step.host_pages.size and not step.is_wanted:
            self._want(step, is_wanted=True)
            step = step.parent
        if node.is_queued or node.host_pages.size or node.is_root:
            return
        node.is_queued = True
        self._queue.append(node)
        if len(self._queue) >= self._sweep_at:
            self.sweep()

    def sweep(self) -> None:
        """Replaces queued nodes that left the tree by the rest of their paths."""
        queue, self._queue = self._queue, deque()
        self._sweep_at = 2 * len(queue)
        for node in queue:
            node.is_queued = False
            if _surviving(node).is_wanted:
                self.enqueue(node)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._queue))

    def begin_load(
        self, lock: PrefixLock, pages: Int32Array, window_pages: Int32Array = NO_PAGES, slots: Int32Array = NO_PAGES
    ) -> PageCopy:
        """See ``PrefixCache``."""
        tiers, host_pages, tail = self._tiers, lock.host_pages, lock.tail
        assert lock.is_open and pages.size == host_pages.size, f"{pages.size} pages for {host_pages.size}"
        assert pages.size or window_pages.size or slots.size, "a load of nothing"
        nodes = [node for node in path(lock.node) if node.is_on_host_only]
        assert sum(node.num_pages for node in nodes) == pages.size, "the prefix came to the device; match again"
        pages = pages.copy()
        num_frames = 0
        if tail is not None and tail.frames is not None and (window_pages.size or slots.size):
            num_frames = tail.frames.size
        op = self._ops.begin(CopyKind.LOAD, self._locks.lock(lock.node), host_pages, num_frames=num_frames)
        end, image = pages.size, None
        for node in nodes:
            tiers.put_on_device(node, pages[end - node.num_pages : end].copy(), ready_op=op.number)
            end -= node.num_pages
        lock.pages = np.concatenate((lock.pages, pages))
        lock.host_pages = NO_PAGES
        self.wait(lock, op)
        after_step = int(tiers.device.last_step[pages].max(initial=0))
        if num_frames:
            assert self._tails is not None and tail is not None
            image = self._tails.begin_load(tail, op, window_pages, slots)
            after_step = max(after_step, self._tails.last_step(tail))
        return PageCopy(op.number, CopyKind.LOAD, pages, host_pages, after_step, None, window_pages, image, slots)

    def wait(self, lock: PrefixLock, op: TransferOp) -> None:
        """Lets a lock wait for a load."""
        lock.ops.add(op.number)
        op.readers.append(lock)

    def begin_offloads(
        self, max_pages: int, max_copies: int = MANY_COPIES, is_worth: Callable[[int], bool] | None = None
    ) -> list[PageCopy]:
        """See ``PrefixCache``.

        A node that is not begun grows meanwhile: then several pages of a row are offloaded by one copy.
        """
        copies = self._save(max_pages, max_copies, is_worth)
        self._is_stuck &= not self._tiers.reserve.end_step()
        max_pages -= sum(copy.host_pages.size for copy in copies)
        host, is_outrun = self._tiers.host, self._tiers.reserve.is_outrun
        while self._queue and self._has_room and max_pages > 0 and len(copies) < max_copies:
            node = self._queue.popleft()
            node.is_queued = False
            chain = unbacked(_surviving(node))
            blocking = _blocking(chain)
            if blocking:
                self._block(chain[-1], self._ops[blocking])
            elif chain:
                most = max_pages if is_outrun else min(max_pages, host.num_unused)
                room = self._make_room(chain, most, evicts=is_outrun)
                if not room:
                    self.enqueue(chain[-1])
                    self._is_stuck = True
                    break
                copies.append(self._offload(chain, room))
                max_pages -= room
        if self._tails is not None:
            copies += self._tails.begin_offloads(max(MIN_TAILS, max_copies - len(copies)))
        return copies

    def _save(self, max_pages: int, max_copies: int, is_worth: Callable[[int], bool] | None) -> list[PageCopy]:
        """Offloads the next pages to evict from the device, until the reserve is complete."""
        tiers, reserve = self._tiers, self._tiers.reserve
        copies: list[PageCopy] = []
        while max_pages > 0 and len(copies) < max_copies and self.num_to_save:
            leaf = reserve.next()
            if leaf is None:
                break
            if not leaf.is_unbacked:
                tiers.mark_spare(leaf)
                continue
            chain = unbacked(leaf)
            num_pages, blocking = sum(node.num_pages for node in chain), _blocking(chain)
            if blocking:
                self._block(leaf, self._ops[blocking])
                continue
            room = 0
            if is_worth is None or is_worth(num_pages):
                room = self._make_room(chain, max_pages, evicts=self._is_urgent)
                if not (room or self._is_urgent):
                    reserve.add(leaf)
                    self._is_stuck = True
                    break
                self.num_without_room += 0 if room else num_pages
            if not room:
                for node in chain:
                    self._want(node, is_wanted=False)
                continue
            copies.append(self._offload(chain, room))
            self._saves[copies[-1].op] = copies[-1].host_pages.size
            max_pages -= copies[-1].host_pages.size
        return copies

    def _make_room(self, chain: list[Node], max_pages: int, *, evicts: bool) -> int:
        """Frees host pages for a run of nodes; returns how many of it fit."""
        assert chain[0].parent is not None
        above = self._locks.lock_host(chain[0].parent)
        room = self._tiers.make_host_room(min(max_pages, sum(node.num_pages for node in chain)), evicts=evicts)
        self._locks.drop(above)
        return room

    def _want(self, node: Node, *, is_wanted: bool) -> None:
        """Sets whether a node is to be offloaded, and with it the rank of its eviction."""
        self._tiers.reserve.leave_path(node)
        node.is_wanted = is_wanted
        if node.is_evictable:
            self._tiers.queue(node)

    def complete(self, number: int, *, ok: bool) -> list[PrefixLock]:
        """Ends a load or an offload; see ``PrefixCache``."""
        op = self._ops.end(number)
        self._is_stuck = False
        nodes = nodes_in(op)
        lost: list[PrefixLock] = []
        if op.tail is not None:
            assert self._tails is not None
            num_frames = op.num_pages - op.host_pages.size
            self.num_failed[op.kind] += 0 if ok else num_frames
            self.num_arrived[op.kind] += self._tails.end(op, ok=ok)
        if op.kind is CopyKind.LOAD:
            for lock in op.readers:
                lock.ops.discard(number)
            if ok:
                self._end_load(nodes)
            elif nodes:
                lost = self._fail_load(nodes)
            else:
                lost = self._lose_tail(op)
        else:
            self._saves.pop(number, None)
            self._end_offload(nodes, ok=ok)
            if ok and self._uploads is not None and nodes:
                self._uploads.offer(nodes[-1], [digest for node in nodes for digest in node.digests])
        self._locks.drop(op.lock)
        if op.kind is CopyKind.OFFLOAD and ok:
            for node in nodes:
                self._tiers.join(node)
        for node in op.blocked:
            node.is_queued = False
            self.enqueue(node)
            self._tiers.queue(_surviving(node))
        return lost

    def _offload(self, chain: list[Node], room: int) -> PageCopy:
        """Offloads the first ``room`` pages of a run of nodes; the rest waits for the end of this offload."""
        tiers = self._tiers
        last = chain[-1]
        chain = self._leading(chain, room)
        pages = chain[0].pages if len(chain) == 1 else np.concatenate([node.pages for node in chain])
        host_pages = tiers.allocate_host(pages.size)
        op = self._ops.begin(CopyKind.OFFLOAD, self._locks.lock(chain[-1], is_use=False), host_pages, pages)
        start = after_step = 0
        digests: list[bytes] = []
        for node in chain:
            end = start + node.num_pages
            tiers.put_on_host(node, host_pages[start:end].copy(), op.number)
            digests += node.digests
            after_step = max(after_step, node.written_step)
            start = end
        if chain[-1] is not last:
            self._block(last, op)
        parent = chain[0].parent
        assert parent is not None
        *_, root = path(parent)
        run = PageRun(
            pages=host_pages,
            namespace=root.digests[0],
            parent=parent.digests[-1],
            digests=digests,
            key=b"".join([node.key for node in chain]),
        )
        return PageCopy(op.number, CopyKind.OFFLOAD, pages, host_pages, after_step, run)

    def _leading(self, chain: list[Node], room: int) -> list[Node]:
        """Returns the first ``room`` pages of a run of nodes, after a split if necessary."""
        leading: list[Node] = []
        for node in chain:
            leading.append(self._tiers.tree.split(node, room) if node.num_pages > room else node)
            room -= leading[-1].num_pages
            if not room:
                break
        return leading

    def _block(self, node: Node, op: TransferOp) -> None:
        node.is_queued = True
        op.blocked.append(node)

    def _end_load(self, nodes: list[Node]) -> None:
        for node in nodes:
            node.device_ready_op = 0
            self._tiers.device.insert(node)
            self.num_arrived[CopyKind.LOAD] += node.num_pages

    def _fail_load(self, nodes: list[Node]) -> list[PrefixLock]:
        """Removes nodes whose load failed, with all below; their host copies may be damaged too."""
        for node in nodes:
            self.num_failed[CopyKind.LOAD] += node.num_pages
            self._tiers.free(node.pages)
            self._tiers.device.shares.charge(node.account, -node.num_pages)
            node.pages = NO_PAGES
            node.device_ready_op = 0
            assert node.parent is not None
            node.parent.num_device_children -= 1
        lost = self._removal.detach(nodes[0])
        self._tiers.relocation_version += bool(lost)
        return lost

    def _lose_tail(self, op: TransferOp) -> list[PrefixLock]:
        """Returns the locks that need a tail whose load failed; their pages are whole."""
        lost = [lock for lock in op.readers if lock.is_open and op.tail is not None and lock.tail is op.tail]
        for lock in lost:
            lock.path_lock.is_lost = True
        self._tiers.relocation_version += bool(lost)
        return lost

    def _end_offload(self, nodes: list[Node], *, ok: bool) -> None:
        for node in nodes:
            if ok:
                node.host_ready_op = 0
                self._tiers.host.insert(node)
                self.num_arrived[CopyKind.OFFLOAD] += node.num_pages
                if self._tails is not None:
                    self._tails.enqueue_all(node)
            else:
                self._tiers.free_host(self._tiers.take_off_host(node))
                node.is_wanted = False
                self.num_failed[CopyKind.OFFLOAD] += node.num_pages


def _surviving(node: Node) -> Node:
    """Returns the node, or the end of the rest of its path if it left the tree."""
    while not node.num_pages and node.parent is not None:
        node = node.parent
    return node


def unbacked(node: Node) -> list[Node]:
    """Returns the nodes of a path that the host lacks, first to last."""
    nodes: list[Node] = []
    while node.num_pages and not node.host_pages.size:
        nodes.append(node)
        assert node.parent is not None
        node = node.parent
    return nodes[::-1]


def _blocking(chain: list[Node]) -> int:
    """Returns the op that must end before an offload of these nodes, or 0."""
    if not chain:
        return 0
    assert chain[0].parent is not None
    return chain[0].parent.pending_op or next((node.device_ready_op for node in chain if node.device_ready_op), 0)
