"""The tails on both tiers: kept by rows, written through behind their history, loaded and recovered whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum

import numpy as np

from hiserve.cache.index.eviction import TenantShares
from hiserve.cache.index.locks import Locks
from hiserve.cache.index.nodes import Node, Tail, is_ready_on_host
from hiserve.cache.index.retention import RetentionEnds, RetentionQuota
from hiserve.cache.index.tail_pool import TailMemory
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOp, TransferOps, image_of
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, CopyKind, PageCopy, TailImage


class UploadedTails(Enum):
    """Which tails a store is to have."""

    NONE = "none"
    KEPT = "kept"  # all but those that a row replaces
    OFFLOADED = "offloaded"  # those that came to the host


class TailTiers:
    """Keeps tails on the device, and copies of them on the host.

    A tier has a tail only with the history before it. The host gets a tail once its history has arrived there.

    Args:
        memory: Of the tails on the device.
        uploads: Tails that a store is to have.

    Attributes:
        to_upload: Those of them that were not taken yet, and the frames that each takes; closed ones may be among them.
        ends: Of the retention of tails.
        num_without_room: Frames of tails that were not offloaded because no host page could be freed.
    """

    def __init__(
        self, tiers: CacheTiers, locks: Locks, ops: TransferOps, memory: TailMemory, uploads: UploadedTails
    ) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._memory = memory
        self._uploads = uploads
        self._on_device, self._on_host = tiers.device.require_tails(), tiers.host.require_tails()
        self._queue: OrderedDict[Tail, None] = OrderedDict()  # to be offloaded; the history of each was on the host
        self.ends = RetentionEnds[Tail](lambda: (tail for tail in self._all() if tail.retained_until_s))
        self.to_upload: OrderedDict[Tail, int] = OrderedDict()
        self.num_without_room = 0

    # --- on the device ----------------------------------------------------------------------

    def keep(self, node: Node, at: int, pages: Int32Array, slots: Int32Array) -> Tail:
        """Gives a boundary of a node a tail of pages and a slot that have a holder, unless it has one; counts as its use.

        A new one with a slot is provisional until it is used or settled.
        """
        node.tails = {} if node.tails is None else node.tails
        tail = node.tails.get(at)
        is_new = tail is None or not tail.is_open
        if tail is None or is_new:
            tail = node.tails[at] = Tail(node, at, 0, self)
        if tail.pages is None:
            self._memory.keep(tail, pages, slots)
            tail.is_provisional = slots.size > 0 and tail.frames is None
            self._on_device.add_tail(tail.digest)
            self._tiers.tree_epoch += 1
            self._tiers.queue_copy(node)
        self.touch(tail, self._tiers.clock)
        self.enqueue(tail)
        if is_new and not tail.is_provisional and self._uploads is UploadedTails.KEPT:
            self._offer(tail)
        return tail

    def settle(self, tail: Tail) -> None:
        """Counts as a use of an open tail, and makes a provisional one like all others, which goes to the host."""
        if tail.is_provisional and self._uploads is UploadedTails.KEPT:
            self._offer(tail)
        tail.is_provisional = False
        self._tiers.clock += 1
        self.touch(tail, self._tiers.clock)
        self.enqueue(tail)

    def touch(self, tail: Tail, last_used: int) -> None:
        """Sets the time of the last use of an open tail; 0 makes it the next to go."""
        assert tail.is_open, "a tail that was closed is used"
        if tail.last_used != last_used:
            tail.last_used, tail.priority = last_used, tail.node.priority
            self._reorder(tail)

    def see(self, account: bytes) -> None:
        """Records a request of an account."""
        for pool in self._memory.pools:
            pool.shares.see(account)

    def num_to_retain(self, tail: Tail) -> int:
        """Returns the frames that the retention of an open tail adds to those of its account; 0 without a host tier."""
        if tail.retained_until_s:
            return 0
        return self._memory.num_frames(tail) if tail.frames is None else tail.frames.size

    def retain(self, tail: Tail, until_s: int) -> None:
        """Lets others of its account go before an open tail on each tier, until ``expire``, if the quota has room for it."""
        if until_s <= tail.retained_until_s:
            return
        quota, count = self._tiers.retention.quota, self.num_to_retain(tail)
        if count > max(0, quota.room(tail.account)):
            quota.num_ignored += count
            return
        self._begin_retention(tail, until_s)
        self._record_retention(tail)

    def expire(self, now_s: int) -> None:
        """Ends the retention of tails that were retained until now or earlier."""
        for tail in self.ends.take(now_s):
            if 0 < tail.retained_until_s <= now_s:
                self._end_retention(tail)

    def _begin_retention(self, tail: Tail, until_s: int) -> None:
        count = self.num_to_retain(tail)
        self._tiers.retention.quota.charge(tail.account, count)
        tail.num_retained += count
        tail.retained_until_s = until_s
        self.ends.add(tail)
        self._reorder(tail)

    def _end_retention(self, tail: Tail) -> None:
        self._tiers.retention.quota.charge(tail.account, -tail.num_retained)
        tail.retained_until_s = tail.num_retained = 0
        self._reorder(tail)

    def _record_retention(self, tail: Tail) -> None:
        """Tells the records until when the frames of a tail are retained."""
        if tail.retained_until_s and tail.frames is not None:
            self._tiers.retention.host_times.add(tail.frames, tail.retained_until_s)

    def _all(self) -> Iterator[Tail]:
        """Walks the tails of the tree; closed ones may be among them."""
        return (tail for node in self._tiers.tree.nodes() for tail in (node.tails or {}).values())

    def _reorder(self, tail: Tail) -> None:
        """Gives a tail its new place in the order of each tier."""
        for pool, _ in self._memory.held(tail):
            pool.reorder(tail)
        if tail.frames is not None:
            self._tiers.host.eviction.add(tail)

    def assign_account(self, tail: Tail, account: bytes) -> None:
        """See ``TailPools``."""
        num_frames = 0 if tail.frames is None else tail.frames.size
        counts: list[tuple[TenantShares | RetentionQuota, int]] = [
            (pool.shares, held.size) for pool, held in self._memory.held(tail)
        ]
        counts += [(self._tiers.host.shares, num_frames), (self._tiers.retention.quota, tail.num_retained)]
        for shares, count in counts:
            shares.charge(tail.account, -count)
            shares.charge(account, count)
        tail.account = account
        self._reorder(tail)

    def leave_device(self, tail: Tail) -> None:
        """See ``TailPools``; a transfer of the pages and the slot holds them until its end."""
        self._memory.forget(tail)
        self._on_device.remove_tail(tail.digest)
        self._tiers.tree_epoch += 1
        if tail.frames is None:
            self._end_retention(tail)

    def leave_host(self, tail: Tail) -> None:
        """See ``TailPools``; frames that a transfer uses are freed at its end."""
        frames, tail.frames = tail.frames, None
        tail.host_ready_op = 0
        self._on_host.remove_tail(tail.digest)
        assert frames is not None, "a tail without frames leaves the host"
        self._tiers.host.shares.charge(tail.account, -frames.size)
        self._tiers.tree_epoch += 1
        op = self._op_of(tail)
        if op is not None:
            op.deferred_host_frees.append(frames)
        else:
            self._tiers.host.num_evictable -= 0 if tail.is_uploading else frames.size
            self._ops.free_host(frames)
        tail.is_uploading = False
        if tail.pages is None:
            self._end_retention(tail)
        self._reorder(tail)  # the device could not take it while it was on its way
        self._tiers.queue_copy(tail.node)

    # --- to a store ---------------------------------------------------------------------------

    def _offer(self, tail: Tail) -> None:
        self.to_upload[tail] = self._memory.num_frames(tail) if tail.frames is None else tail.frames.size

    @property
    def num_queued(self) -> int:
        """Tails that wait for their offload."""
        return len(self._queue)

    def is_on_its_way(self, tail: Tail) -> bool:
        """Whether a transfer between device and host uses a tail, or its offload is to begin."""
        return tail in self._queue or self._op_of(tail) is not None

    def begin_upload(self, tail: Tail) -> Int32Array:
        """Keeps the frames of a tail that no transfer uses where they are, while an upload reads them; see ``end_upload``."""
        assert tail.frames is not None and tail.is_host_evictable and not self._op_of(tail), "a transfer uses the tail"
        tail.is_uploading = True
        self._tiers.host.num_evictable -= tail.frames.size
        return tail.frames

    def end_upload(self, tail: Tail, frames: Int32Array) -> None:
        """Lets the host evict the frames of an uploaded tail again, if they are still those that were read."""
        if tail.is_uploading and tail.frames is frames:
            tail.is_uploading = False
            self._tiers.host.num_evictable += 0 if self._op_of(tail) else frames.size
            self._reorder(tail)

    # --- to the host --------------------------------------------------------------------------

    @property
    def has_offloads(self) -> bool:
        """Whether ``begin_offloads`` has anything to do."""
        tail = next(iter(self._queue), None)
        return tail is not None and (not self._is_due(tail) or self._may_begin(tail))

    def enqueue(self, tail: Tail) -> None:
        """Queues a tail for its offload, if its history is on the host, which lacks the tail."""
        if self._is_due(tail):
            self._queue[tail] = None

    def enqueue_all(self, node: Node) -> None:
        """Queues the tails of a node whose history has arrived on the host."""
        for tail in (node.tails or {}).values():
            self.enqueue(tail)

    def begin_offloads(self, max_copies: int) -> list[PageCopy]:
        """Begins offloads of queued tails, an order each, while pages may be held that no row was promised."""
        copies: list[PageCopy] = []
        while self._queue and len(copies) < max_copies:
            tail = next(iter(self._queue))
            if self._is_due(tail):
                if not self._may_begin(tail):
                    break
                copies += self._offload(tail)
            del self._queue[tail]
        return copies

    def _may_begin(self, tail: Tail) -> bool:
        """Whether its pages may be held, and the host does not get more room by itself."""
        host = self._tiers.host.pages
        has_room = host.num_ready == host.num_pages or host.num_free > self._memory.num_frames(tail)
        return has_room and self._memory.has_spare(tail)

    def _is_due(self, tail: Tail) -> bool:
        is_here = self._memory.num_frames(tail) > 0 and not tail.is_provisional
        has_history = tail.node.num_pages > 0 and is_ready_on_host(tail.node)
        return is_here and tail.frames is None and has_history and self._op_of(tail) is None

    def _offload(self, tail: Tail) -> list[PageCopy]:
        """Begins an offload; returns its order, or nothing if the host has no room."""
        pages, slots, count = tail.pages, tail.slots, self._memory.num_frames(tail)
        assert pages is not None
        lock = self._locks.lock_host(tail.node)
        if self._tiers.make_host_room(count, keeps_tails=True) < count:
            self.num_without_room += count
            self._locks.drop(lock)
            return []
        frames = self._tiers.allocate_host(count)
        op = self._ops.begin(CopyKind.OFFLOAD, lock, NO_PAGES, num_frames=count)
        op.tail, op.window_pages, op.slots = tail, pages, slots
        for pool, held in self._memory.held(tail):
            pool.pin(held)
        tail.frames, tail.host_ready_op = frames, op.number
        self._tiers.host.shares.charge(tail.account, count)
        self._record_retention(tail)
        return [PageCopy(op.number, op.kind, NO_PAGES, NO_PAGES, 0, None, pages, image_of(tail, frames), slots)]

    # --- to the device --------------------------------------------------------------------------

    def num_to_load(self, tail: Tail | None) -> int:
        """Returns the window pages that a tail needs before its use."""
        if tail is None or tail.frames is None or tail.is_on_device:
            return 0
        return self._memory.num_pages_in(tail.frames.size)

    def has_slot_for(self, tail: Tail | None) -> bool:
        """Whether the load of a tail finds a slot for its snapshot, where it has one."""
        snapshots = self._memory.snapshots
        return tail is None or snapshots is None or tail.is_on_device or snapshots.has_page

    def allocate(self, tail: Tail | None) -> tuple[Int32Array, Int32Array]:
        """Takes the window pages and the slot that a tail needs before its use, each held once; there must be as many."""
        windows, snapshots = self._memory.windows, self._memory.snapshots
        pages = slots = NO_PAGES
        if tail is not None and not tail.is_on_device:
            pages = pages if windows is None else windows.allocate(np.zeros(self.num_to_load(tail), dtype=np.int32))
            slots = slots if snapshots is None else snapshots.allocate(np.zeros(1, dtype=np.int32))
        return pages, slots

    def begin_load(self, tail: Tail, op: TransferOp, pages: Int32Array, slots: Int32Array) -> TailImage:
        """Lets a load fill window pages and a slot, each held once, by the op; the tail has them from now on."""
        self._memory.keep(tail, pages, slots)
        assert tail.frames is not None and self._memory.num_frames(tail) == tail.frames.size
        op.tail, op.window_pages, op.slots = tail, pages, slots
        for pool, held in self._memory.held(tail):
            pool.num_pinned += held.size
        tail.device_ready_op = op.number
        self._tiers.host.num_evictable -= 0 if tail.is_uploading else tail.frames.size
        self._tiers.tree_epoch += 1
        return image_of(tail, tail.frames)

    def last_step(self, tail: Tail) -> int:
        """Returns the last step whose forward may touch what a tail was given on the device."""
        return self._memory.last_step(tail)

    # --- the end of a transfer ------------------------------------------------------------------

    def end(self, op: TransferOp, *, ok: bool) -> int:
        """Ends the part that a tail had in a transfer, which has left ``TransferOps``; returns the frames that arrived."""
        tail = op.tail
        assert tail is not None
        for pool, held in self._memory.parts(op.window_pages, op.slots):
            pool.unpin(held)
        is_here = op.number in (tail.device_ready_op, tail.host_ready_op)
        num_arrived = op.num_pages - op.host_pages.size if ok and is_here else 0
        if tail.frames is not None and not tail.is_uploading and (op.kind is CopyKind.LOAD or is_here):
            self._tiers.host.num_evictable += tail.frames.size
        if is_here:
            tail.device_ready_op = tail.host_ready_op = 0
            self._tiers.tree_epoch += 1
        if not ok and op.kind is CopyKind.LOAD:  # its images may be damaged
            if is_here:
                tail.close()
            else:
                tail.leave_host()
        elif not ok and is_here:
            tail.leave_host()
        elif is_here:
            (self._on_device if op.kind is CopyKind.LOAD else self._on_host).add_tail(tail.digest)
            if op.kind is CopyKind.OFFLOAD and self._uploads is UploadedTails.OFFLOADED:
                self._offer(tail)
        self._reorder(tail)
        return num_arrived

    def recover(self, images: Iterable[TailImage]) -> int:
        """Inserts the tails of a former process, each whole, behind the history that was recovered; returns their frames.

        Args:
            images: Their frames are ready and free; those without history are freed. No tail is retained longer than its
                history; the quota is not asked: the former process kept it.
        """
        tiers, num_recovered = self._tiers, 0
        places = {digest: (node, at) for node in tiers.tree.nodes() for at, digest in enumerate(node.digests, start=1)}
        for image in images:
            taken = tiers.host.pages.allocate(image.frames)
            assert taken is not None and (taken == image.frames).all(), f"host pages {image.frames} are not all free"
            node, at = places.get(image.digest, (None, 0))
            if node is None:
                tiers.free_host(image.frames)
                continue
            num_inserted = self.put_on_host(node, at, image.frames)
            num_recovered += num_inserted
            until_s = min(image.retained_until_s, node.retained_until_s)
            if num_inserted and until_s and node.tails is not None:
                self._begin_retention(node.tails[at], until_s)
        return num_recovered

    def put_on_host(self, node: Node, at: int, frames: Int32Array) -> int:
        """Gives a boundary on the host a tail that came whole from elsewhere, in frames taken for it.

        Returns:
            The frames; 0 if it has a tail there already, or they are not as many as those of a tail: they are freed then.
        """
        tiers, tail = self._tiers, (node.tails or {}).get(at)
        if (tail is not None and tail.frames is not None) or self._memory.num_pages_in(frames.size) < 0:
            tiers.free_host(frames)
            return 0
        if tail is None or not tail.is_open:
            tail = Tail(node, at, node.last_used, self)
            node.tails = {at: tail} if node.tails is None else node.tails | {at: tail}
        tail.frames = frames
        self._on_host.add_tail(tail.digest)
        if not tail.pending_op:  # else at the end of the load
            tiers.host.num_evictable += frames.size
        tiers.host.shares.charge(tail.account, frames.size)
        self._record_retention(tail)
        tiers.host.eviction.add(tail)
        tiers.tree_epoch += 1
        return frames.size

    def _op_of(self, tail: Tail) -> TransferOp | None:
        return next((op for op in self._ops if op.tail is tail), None)
