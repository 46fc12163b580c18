"""Uploads of tails to the store: each whole, behind its history, also past a full host."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from hiserve.cache.index.locks import Locks, PathLock, path_digests
from hiserve.cache.index.nodes import Tail, is_ready_on_host
from hiserve.cache.index.store_sync import RunOp
from hiserve.cache.index.tail_pool import TailMemory
from hiserve.cache.index.tails import TailTiers
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOp, TransferOps, image_of
from hiserve.cache.index.transfers import Transfers
from hiserve.cache.index.uploads import MAX_LOOKED, FruitlessLooks, Uploads
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, CopyKind, PageCopy, PageRun, TailImage


class TailUploads:
    """Uploads the tails that a store is to have (``TailTiers.to_upload``), each once.

    A tail waits until the upload of the history before it has begun, so that the store has no tail whose history is to come. It
    is read on the host. If a full host lacks it, it is staged: copied to frames that no match finds, and from there to the
    store, one at a time.

    Args:
        uploads: Of the history; both share a bound on the host pages that uploads lock.

    Attributes:
        num_not_uploaded: Frames of tails that left the cache while they waited, were not staged, or do not fit on the host.
    """

    def __init__(
        self,
        tiers: CacheTiers,
        locks: Locks,
        ops: TransferOps,
        memory: TailMemory,
        tails: TailTiers,
        transfers: Transfers,
        uploads: Uploads,
    ) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._memory = memory
        self._tails = tails
        self._transfers = transfers
        self._uploads = uploads
        self._queue: OrderedDict[Tail, int] = OrderedDict()
        self._fruitless = FruitlessLooks()
        self._read: dict[int, tuple[Tail, Int32Array]] = {}  # by op: the tail that an upload reads, and its frames
        self._stages: dict[int, TailImage] = {}
        self._staged: set[int] = set()  # uploads of what was staged
        self._orders: list[RunOp] = []
        self.num_not_uploaded = 0

    def __contains__(self, op: int) -> bool:
        """Whether an upload or a stage in flight is one of these."""
        return op in self._read or op in self._stages or op in self._staged

    @property
    def has_uploads(self) -> bool:
        """Whether ``take`` has anything to begin or to return."""
        if self._orders or self._tails.to_upload:
            return True
        return bool(self._queue) and not self._fruitless.are_all(len(self._queue), self._state())

    @property
    def num_waiting(self) -> int:
        """Frames whose upload has not begun, those being staged not counted."""
        tails = (*self._queue.items(), *self._tails.to_upload.items())
        staged = sum(order.image.frames.size for order in self._orders if order.image is not None)
        return staged + sum(count for tail, count in tails if tail.is_open)

    def num_frames_before(self, num_pages: int) -> int:
        """Returns the frames of the tail at a boundary behind so many pages of a prompt; 0 at its start."""
        return self._memory.num_frames_before(num_pages) if num_pages else 0

    def take(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins the uploads and stages that can begin, after those of the history; see ``PrefixCache.begin_uploads``."""
        self._queue |= self._tails.to_upload
        self._tails.to_upload.clear()
        copies: list[PageCopy] = []
        num_looked = min(len(self._queue), MAX_LOOKED)
        for _ in range(num_looked):
            tail, count = self._queue.popitem(last=False)
            if not tail.is_open or count >= self._tiers.host.pages.num_pages:  # page 0 holds nothing
                self.num_not_uploaded += count
            elif not self._may_begin(tail, count):
                self._queue[tail] = count
            elif tail.is_host_evictable:
                self._upload(tail)
            else:
                copies.append(self._stage(tail, count))
        orders, self._orders = self._orders, []
        self._fruitless.add(num_looked, self._state(), has_begun=bool(orders or copies))
        return orders, copies

    def end(self, number: int, *, ok: bool) -> None:
        """Ends an upload, or a copy to staging frames, whose upload begins if it succeeded."""
        op, image = self._ops.end(number), self._stages.pop(number, None)
        if image is None:
            self._uploads.num_pages -= op.host_pages.size
            self._staged.discard(number)
            tail, frames = self._read.pop(number, (None, NO_PAGES))
            if tail is not None:
                self._tails.end_upload(tail, frames)
        else:
            for pool, held in self._memory.parts(op.window_pages, op.slots):
                pool.unpin(held)
            if ok:
                self._begin(image).deferred_host_frees.append(image.frames)  # no tail has them
                self._staged.add(self._orders[-1].op)
            else:
                self._tiers.free_host(image.frames)
                self._uploads.num_pages -= image.frames.size
                self.num_not_uploaded += image.frames.size
        self._locks.drop(op.lock)

    def _state(self) -> tuple[int, ...]:
        """Returns numbers of which one changes before a tail may begin that may not now."""
        host, transfers = self._tiers.host, self._transfers
        spare = (pool.num_spare for pool in self._memory.pools)
        num_queued = transfers.num_to_offload + self._tails.num_queued
        return self._ops.num_ended, num_queued, host.pages.num_free, host.num_evictable, *spare

    def _may_begin(self, tail: Tail, count: int) -> bool:
        has_room = self._uploads.has_room(count) or not (self._read or self._stages or self._staged)
        if not has_room or self._uploads.is_awaited(tail.digest) or self._tails.is_on_its_way(tail):
            return False
        return tail.is_host_evictable or self._must_stage(tail, count)

    def _must_stage(self, tail: Tail, count: int) -> bool:
        """Whether a tail is on the device alone, its offload is not next, and there is memory to stage it."""
        host, node = self._tiers.host, tail.node
        is_next = not is_ready_on_host(node) and self._transfers.num_to_offload > 0 and host.num_unused > 0
        if node.pending_op or is_next or self._stages or self._staged or tail.frames is not None:
            return False
        return count <= host.pages.num_free + host.num_evictable and self._memory.has_spare(tail)

    def _upload(self, tail: Tail) -> None:
        frames = self._tails.begin_upload(tail)
        self._uploads.num_pages += frames.size
        self._read[self._begin(_stored_image_of(tail, frames)).number] = tail, frames

    def _stage(self, tail: Tail, count: int) -> PageCopy:
        assert tail.pages is not None
        image = _stored_image_of(tail, self._tiers.allocate_host(count, num_left=0))
        op = self._ops.begin(CopyKind.STAGE, self._lock(image), image.frames)
        op.window_pages, op.slots = tail.pages, tail.slots
        for pool, held in self._memory.held(tail):
            pool.pin(held)
        self._uploads.num_pages += count
        self._stages[op.number] = image
        return PageCopy(op.number, CopyKind.OFFLOAD, NO_PAGES, NO_PAGES, 0, None, tail.pages, image, tail.slots)

    def _begin(self, image: TailImage) -> TransferOp:
        """Begins an upload, which the next call of ``take`` returns."""
        op = self._ops.begin(CopyKind.UPLOAD, self._lock(image), image.frames)
        run = PageRun(NO_PAGES, image.namespace, image.digest, [], b"")
        self._orders.append(RunOp(op.number, run, image))
        return op

    def _lock(self, image: TailImage) -> PathLock:
        """Locks nothing but the root: the image is whole without the nodes that it was made of."""
        return self._locks.lock_host(self._tiers.tree.add_root(self._tiers.tree.root(image.namespace)))


def _stored_image_of(tail: Tail, frames: Int32Array) -> TailImage:
    """Returns the image of a tail in frames, as a store is given it: with its history."""
    return replace(image_of(tail, frames), history=path_digests(tail.node, tail.node.num_pages - tail.at))
