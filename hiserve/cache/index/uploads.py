"""Uploads of history to the store: new pages, parents before children, also past a full host."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hiserve.cache.index.locks import Locks, path
from hiserve.cache.index.nodes import Node, is_ready_on_host
from hiserve.cache.index.store_sync import RunOp
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOps
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import CopyKind, PageCopy, PageRun

MAX_RUN_PAGES = 256  # of one upload
MAX_STAGED_PAGES = 64  # host pages that uploads of pages on the device alone pass through
RESERVED_SHARE = 8  # one in so many host pages is reserved for them, up to ``MAX_STAGED_PAGES``
MAX_LOOKED = 64  # nodes that one call of ``take`` examines

Part = tuple[Node, int, int]  # pages of a node: first, end


class FruitlessLooks:
    """Counts what was examined and could not begin, at one state of the cache: all of a queue, or a part of it."""

    def __init__(self) -> None:
        self._state: tuple[int, ...] = ()
        self._count = 0

    def add(self, count: int, state: tuple[int, ...], *, has_begun: bool) -> None:
        """Adds one call that examined so many, of which some or none could begin."""
        self._count = 0 if has_begun else count + (self._count if state == self._state else 0)
        self._state = state

    def are_all(self, num_queued: int, state: tuple[int, ...]) -> bool:
        """Whether all that is queued was examined in vain, and nothing has changed since."""
        return state == self._state and self._count >= num_queued


class Uploads:
    """Uploads every offered page to the store, parents before children, each once.

    A page waits (``LostPages.awaited``) until its upload begins, which reads it on the host. A page that a full host lacks
    is staged: copied to a host page that no match finds, and from there to the store.

    Args:
        max_pages: Most host pages locked by uploads; 0 without a store.

    Attributes:
        num_pages: Host pages of uploads and stages in flight, those of tails included.
        num_not_staged: Pages whose copy to a staging page failed.
    """

    def __init__(self, tiers: CacheTiers, locks: Locks, ops: TransferOps, max_pages: int) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._max_pages = max_pages
        num_reserved = max(1, min(MAX_STAGED_PAGES, max_pages, tiers.host.pages.num_pages // RESERVED_SHARE))
        tiers.host.num_reserved = num_reserved if max_pages else 0
        self._awaited = tiers.lost.awaited
        self._queue: OrderedDict[Node, None] = OrderedDict()
        self._sweep_at = 1024
        self._fruitless = FruitlessLooks()
        self.num_pages = 0
        self._stages: dict[int, PageRun] = {}
        self._staging: set[bytes] = set()  # the pages of stages
        self._staged: dict[int, int] = {}  # staging pages of uploads, by op
        self._uploads: list[RunOp] = []
        self._copies: list[PageCopy] = []
        self.num_not_staged = 0

    @property
    def has_uploads(self) -> bool:
        """Whether ``take`` has anything to begin or to return."""
        if self._uploads:
            return True
        has_room = self.num_pages < self._max_pages
        return has_room and bool(self._queue) and not self._fruitless.are_all(len(self._queue), self._state())

    def is_awaited(self, digest: bytes) -> bool:
        """Whether the upload of a page is to begin."""
        return digest in self._awaited or digest in self._staging

    def has_room(self, count: int) -> bool:
        """Whether uploads may lock so many host pages more."""
        return self.num_pages + count <= self._max_pages

    @property
    def num_waiting(self) -> int:
        """Pages whose upload has not begun, those being staged not counted."""
        return len(self._awaited) + sum(upload.run.pages.size for upload in self._uploads)

    @property
    def num_not_uploaded(self) -> int:
        """Offered pages whose upload will never begin."""
        return self._tiers.lost.num_awaited_lost + self.num_not_staged

    def offer(self, end: Node, digests: list[bytes]) -> None:
        """Queues new pages: the last ones of the path that ends with a node."""
        self._awaited.update(digests)
        self._queue[end] = None
        self._fruitless = FruitlessLooks()
        if len(self._queue) >= self._sweep_at:
            self._queue = OrderedDict.fromkeys(node for node in self._queue if self._waiting(node))
            self._sweep_at = max(1024, 2 * len(self._queue))

    def take(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins the uploads and stages that can begin; see ``PrefixCache.begin_uploads``."""
        num_looked = min(len(self._queue), MAX_LOOKED)
        for _ in range(num_looked):
            room = min(self._max_pages - self.num_pages, MAX_RUN_PAGES)
            if room <= 0:
                break
            node, _ = self._queue.popitem(last=False)
            parts = self._waiting(node)
            if not parts:
                continue
            if is_ready_on_host(parts[0][0]):
                self._upload(_leading(parts, room, on_host=True))
            elif self._must_stage(node, parts[0][0]):
                host = self._tiers.host
                room = min(room, host.pages.num_free + host.num_evictable, MAX_STAGED_PAGES - self._num_staged)
                if room > 0:
                    self._stage(_leading(parts, room, on_host=False))
            if self._waiting(node):
                self._queue[node] = None
        uploads, copies = self._uploads, self._copies
        self._uploads, self._copies = [], []
        self._fruitless.add(num_looked, self._state(), has_begun=bool(uploads or copies))
        return uploads, copies

    def end_stage(self, number: int, *, ok: bool) -> None:
        """Ends a copy to staging pages; begins the upload if it succeeded."""
        tiers, op, run = self._tiers, self._ops.end(number), self._stages.pop(number)
        self._staging.difference_update(run.digests)
        if ok:
            *_, root = path(op.lock.node)
            upload = self._ops.begin(CopyKind.UPLOAD, self._locks.lock_host(tiers.tree.add_root(root)), run.pages)
            upload.deferred_host_frees.append(run.pages)  # no node has them
            self._staged[upload.number] = run.pages.size
            self._uploads.append(RunOp(upload.number, run))
        else:
            tiers.free_host(run.pages)
            self.num_pages -= run.pages.size
            self.num_not_staged += run.pages.size
        self._locks.drop(op.lock)

    def end_upload(self, number: int) -> None:
        """Ends an upload."""
        op = self._ops.end(number)
        assert op.kind is CopyKind.UPLOAD, f"op {number} is no upload"
        self._staged.pop(number, None)
        self.num_pages -= op.host_pages.size
        self._locks.drop(op.lock)

    @property
    def _num_staged(self) -> int:
        return sum(run.pages.size for run in self._stages.values()) + sum(self._staged.values())

    def _state(self) -> tuple[int, ...]:
        """Returns numbers of which one changes before an upload may begin that may not now."""
        host = self._tiers.host
        return self._ops.num_ended, host.pages.num_free, host.num_evictable

    def _waiting(self, node: Node) -> list[Part]:
        """Returns the pages that wait at the end of a path, or of the rest of it, first to last."""
        while not node.num_pages and node.parent is not None:
            node = node.parent
        parts: list[Part] = []
        while node.parent is not None and node.digests[-1] in self._awaited:
            start = node.num_pages - 1
            while start and node.digests[start - 1] in self._awaited:
                start -= 1
            parts.append((node, start, node.num_pages))
            if start:
                break
            node = node.parent
        return parts[::-1]

    def _must_stage(self, end: Node, node: Node) -> bool:
        """Whether a node is on the device alone, and its offload is not next."""
        host = self._tiers.host
        is_next = end.is_queued and host.pages.num_free > host.num_reserved
        return not (node.pending_op or node.host_pages.size or is_next)

    def _upload(self, parts: list[Part]) -> None:
        run = self._run_of(parts, np.concatenate([node.host_pages[start:end] for node, start, end in parts]))
        op = self._ops.begin(CopyKind.UPLOAD, self._locks.lock_host(parts[-1][0]), run.pages)
        self._uploads.append(RunOp(op.number, run))

    def _stage(self, parts: list[Part]) -> None:
        pages = np.concatenate([node.pages[start:end] for node, start, end in parts])
        after_step = max(node.written_step for node, _, _ in parts)
        path_lock = self._locks.lock(parts[-1][0], is_use=False)
        run = self._run_of(parts, self._tiers.allocate_host(pages.size, num_left=0))
        op = self._ops.begin(CopyKind.STAGE, path_lock, run.pages, pages)
        self._stages[op.number] = run
        self._staging.update(run.digests)
        self._copies.append(PageCopy(op.number, CopyKind.OFFLOAD, pages, run.pages, after_step, run))

    def _run_of(self, parts: list[Part], pages: Int32Array) -> PageRun:
        """Removes pages from those that wait, and returns their content."""
        first, start, _ = parts[0]
        assert first.parent is not None
        *_, root = path(first)
        page_bytes = self._tiers.tree.page_bytes
        digests = [digest for node, start, end in parts for digest in node.digests[start:end]]
        self._awaited.difference_update(digests)
        self.num_pages += pages.size
        return PageRun(
            pages=pages,
            namespace=root.digests[0],
            parent=first.digests[start - 1] if start else first.parent.digests[-1],
            digests=digests,
            key=b"".join(node.key[start * page_bytes : end * page_bytes] for node, start, end in parts),
        )


def _leading(parts: list[Part], room: int, *, on_host: bool) -> list[Part]:
    """Returns up to ``room`` leading pages that are all on the host, or all on the device alone."""
    leading: list[Part] = []
    for node, start, end in parts:
        is_there = is_ready_on_host(node) if on_host else not (node.host_pages.size or node.pending_op)
        if not (room and is_there):
            break
        end = min(end, start + room)
        leading.append((node, start, end))
        room -= end - start
    return leading
