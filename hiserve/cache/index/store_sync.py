"""Pages between host and store: prefetches, recovery at start, and uploads, also past a full host."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hiserve.cache.index.locks import Locks, path, raise_priority
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOps
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, CopyKind, PageCopy, PageRun

MAX_RUN_PAGES = 256  # of one upload
MAX_STAGED_PAGES = 64  # host pages that uploads of pages on the device alone pass through
RESERVED_SHARE = 8  # one in so many host pages is reserved for them, up to ``MAX_STAGED_PAGES``
MAX_LOOKED = 64  # nodes that one call of ``take`` examines

Part = tuple[Node, int, int]  # pages of a node: first, end


@dataclass(frozen=True, slots=True, eq=False)
class RunOp:
    """Pages to read from a store into host pages, or to write there from them."""

    op: int
    run: PageRun  # the pages, and their content


class StoreSync:
    """Begins and ends prefetches, and recovers the pages of a former process.

    Attributes:
        num_wanted: Pages of prefetches that were begun, or could not begin.
        num_prefetched: Of them, inserted pages.
        unfulfilled: Of them, pages neither inserted nor in flight, by reason.
    """

    def __init__(self, tiers: CacheTiers, locks: Locks, ops: TransferOps) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._runs: dict[int, PageRun] = {}
        self._arriving: dict[bytes, int] = {}
        self.num_wanted = 0
        self.num_prefetched = 0
        self.unfulfilled: Counter[str] = Counter()

    def is_arriving(self, digest: bytes) -> bool:
        """Whether a prefetch will insert a page."""
        return self.arriving_by(digest) > 0

    def arriving_by(self, digest: bytes) -> int:
        """Returns the number of the prefetch that will insert a page, or 0."""
        number = self._arriving.get(digest, 0)
        return 0 if number and self._ops[number].lock.is_lost else number

    def begin_prefetch(self, end: Node, key: bytes, num_more: int = 0) -> RunOp | None:
        """Allocates host pages for the pages of ``key``, after node ``end`` of the cached prefix; see ``PrefixCache``.

        Returns:
            The pages to read; None if the host has no room, the end is not on the host, or the first page is in flight.
            ``unfulfilled`` counts pages that were left out.
        """
        digests = self._tiers.tree.chain(end.digests[-1], key)
        self.num_wanted += len(digests)
        path_lock = self._locks.lock_host(end)
        count = min(len(digests), self._tiers.host.num_available)
        refusal = self._refusal(end, digests[0], count)
        self.unfulfilled[refusal or "host_full"] += len(digests) - (0 if refusal else count)
        if refusal:
            self.num_wanted += num_more
            self.unfulfilled[refusal] += num_more
            self._locks.drop(path_lock)
            return None
        pages = self._tiers.allocate_host(count)
        op = self._ops.begin(CopyKind.PREFETCH, path_lock, pages)
        *_, root = path(end)
        run = PageRun(
            pages=pages,
            namespace=root.digests[0],
            parent=end.digests[-1],
            digests=digests[:count],
            key=key[: count * self._tiers.tree.page_bytes],
        )
        self._runs[op.number] = run
        self._arriving.update(dict.fromkeys(run.digests, op.number))
        return RunOp(op.number, run)

    def end_prefetch(self, number: int, num_pages: int) -> int:
        """Ends a prefetch of which so many leading pages arrived; returns how many of them were inserted."""
        op, run = self._ops.end(number), self._runs.pop(number)
        for digest in run.digests:
            if self._arriving.get(digest) == number:
                del self._arriving[digest]
        self.unfulfilled["not_delivered"] += len(run.digests) - num_pages
        num_new = 0
        if op.lock.is_lost or not is_ready_on_host(op.lock.node):
            self.unfulfilled["place_lost"] += num_pages
            self._tiers.free_host(run.pages)
        else:
            self._tiers.free_host(run.pages[num_pages:])
            if num_pages:
                key = run.key[: num_pages * self._tiers.tree.page_bytes]
                num_new = self.insert(op.lock.node, key, run.digests[:num_pages], run.pages[:num_pages])
            self.unfulfilled["here_already"] += num_pages - num_new
        self.num_prefetched += num_new
        self._locks.drop(op.lock)
        return num_new

    def abort_prefetch(self, number: int) -> None:
        """See ``PrefixCache``; ``end_prefetch`` then frees the pages."""
        op = self._ops[number]
        assert op.kind is CopyKind.PREFETCH, f"op {number} is no prefetch"
        *_, root = path(op.lock.node)
        self._locks.drop(op.lock)
        op.lock = self._locks.lock_host(self._tiers.tree.add_root(root))
        op.lock.is_lost = True

    def recover(self, runs: Iterable[PageRun]) -> int:
        """See ``PrefixCache``."""
        tiers = self._tiers
        ends: dict[bytes, Node] = {}
        num_recovered = 0
        for run in runs:
            taken = tiers.host.pages.allocate(run.pages)
            assert taken is not None and (taken == run.pages).all(), f"host pages {run.pages} are not all free"
            parent = ends.get(run.parent)
            if run.parent == run.namespace:
                parent = tiers.tree.add_root(tiers.tree.root(run.namespace))
            if parent is None or not is_ready_on_host(parent):
                tiers.free_host(run.pages)
                continue
            num_recovered += self.insert(parent, run.key, run.digests, run.pages)
            node, _, num_pages = tiers.tree.find(parent, run.key)
            if num_pages == len(run.digests):
                ends[run.digests[-1]] = node
                tiers.retention.restore(node, run.retained_until_s)
        return num_recovered

    def insert(self, node: Node, key: bytes, digests: list[bytes], pages: Int32Array) -> int:
        """Inserts host pages below a node, or into nodes of the device alone, and frees the others; returns how many it inserted."""
        tiers, tree = self._tiers, self._tiers.tree
        start, num_new = 0, 0
        spare: list[Int32Array] = []
        while start < pages.size:
            child = node.children.get(key[start * tree.page_bytes : (start + 1) * tree.page_bytes])
            if child is None:
                self._add(node, key[start * tree.page_bytes :], digests[start:], pages[start:])
                num_new += pages.size - start
                break
            shared = tree.common_pages(child.key, key, start * tree.page_bytes)
            if shared < child.num_pages:
                child = tree.split(child, shared)
            if child.host_pages.size or child.device_ready_op:
                spare.append(pages[start : start + shared])
            else:
                tiers.put_on_host(child, pages[start : start + shared].copy())
                tiers.queue(child)  # its eviction costs less now
                num_new += shared
            if not is_ready_on_host(child):
                spare.append(pages[start + shared :])
                break
            node = child
            start += shared
        for each in spare:
            tiers.free_host(each)
        return num_new

    def _refusal(self, end: Node, digest: bytes, room: int) -> str:
        """Returns the reason why a prefetch cannot begin; empty if it can."""
        if not is_ready_on_host(end):
            return "not_backed"
        if self.is_arriving(digest):
            return "in_flight"
        return "" if room else "host_full"

    def _add(self, parent: Node, key: bytes, digests: list[bytes], pages: Int32Array) -> None:
        tiers = self._tiers
        child = tiers.tree.add_child(Node(key, NO_PAGES, digests, parent))
        tiers.put_on_host(child, pages.copy())
        tiers.clock += 1
        child.last_used = tiers.clock
        self._locks.touch(parent)
        raise_priority(parent, child.priority)
        # The only node of the path that may be waiting for eviction was used just now, too.
        tiers.queue(next(step for step in path(parent) if not step.is_on_host_only))
        tiers.queue(child)
        tiers.tree_epoch += 1


class Uploads:
    """Uploads every offered page to the store, parents before children, each once.

    A page waits (``LostPages.awaited``) until its upload begins, which reads it on the host. A page that a full host lacks
    is staged: copied to a host page that no match finds, and from there to the store.

    Args:
        max_pages: Most host pages locked by uploads; 0 without a store.

    Attributes:
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
        self._stuck_at = -1  # ``num_ended`` of the ops when nothing could begin
        self._num_pages = 0  # of ops in flight
        self._stages: dict[int, PageRun] = {}
        self._staged: dict[int, int] = {}  # staging pages of uploads, by op
        self._uploads: list[RunOp] = []
        self._copies: list[PageCopy] = []
        self.num_not_staged = 0

    @property
    def has_uploads(self) -> bool:
        """Whether ``take`` has anything to begin or to return."""
        is_stuck = self._stuck_at == self._ops.num_ended
        return bool(self._uploads) or (bool(self._queue) and not is_stuck and self._num_pages < self._max_pages)

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
        self._stuck_at = -1
        if len(self._queue) >= self._sweep_at:
            self._queue = OrderedDict.fromkeys(node for node in self._queue if self._waiting(node))
            self._sweep_at = max(1024, 2 * len(self._queue))

    def take(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins the uploads and stages that can begin; see ``PrefixCache.begin_uploads``."""
        for _ in range(min(len(self._queue), MAX_LOOKED)):
            room = min(self._max_pages - self._num_pages, MAX_RUN_PAGES)
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
        self._stuck_at = -1 if uploads or copies else self._ops.num_ended
        return uploads, copies

    def end_stage(self, number: int, *, ok: bool) -> None:
        """Ends a copy to staging pages; begins the upload if it succeeded."""
        tiers, op, run = self._tiers, self._ops.end(number), self._stages.pop(number)
        if ok:
            *_, root = path(op.lock.node)
            upload = self._ops.begin(CopyKind.UPLOAD, self._locks.lock_host(tiers.tree.add_root(root)), run.pages)
            upload.deferred_host_frees.append(run.pages)  # no node has them
            self._staged[upload.number] = run.pages.size
            self._uploads.append(RunOp(upload.number, run))
        else:
            tiers.free_host(run.pages)
            self._num_pages -= run.pages.size
            self.num_not_staged += run.pages.size
        self._locks.drop(op.lock)

    def end_upload(self, number: int) -> None:
        """Ends an upload."""
        op = self._ops.end(number)
        assert op.kind is CopyKind.UPLOAD, f"op {number} is no upload"
        self._staged.pop(number, None)
        self._num_pages -= op.host_pages.size
        self._locks.drop(op.lock)

    @property
    def _num_staged(self) -> int:
        return sum(run.pages.size for run in self._stages.values()) + sum(self._staged.values())

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
        self._copies.append(PageCopy(op.number, CopyKind.OFFLOAD, pages, run.pages, after_step, run))

    def _run_of(self, parts: list[Part], pages: Int32Array) -> PageRun:
        """Removes pages from those that wait, and returns their content."""
        first, start, _ = parts[0]
        assert first.parent is not None
        *_, root = path(first)
        page_bytes = self._tiers.tree.page_bytes
        digests = [digest for node, start, end in parts for digest in node.digests[start:end]]
        self._awaited.difference_update(digests)
        self._num_pages += pages.size
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


def is_ready_on_host(node: Node) -> bool:
    """Whether host pages may follow this node: it is a root, or its host copy is filled."""
    return node.is_root or (node.host_pages.size > 0 and not node.host_ready_op)
