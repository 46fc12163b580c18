"""Pages that come to the host from beyond it: prefetched from a store, or adopted at start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hiserve.cache.index.locks import Locks, path, raise_priority
from hiserve.cache.index.node import NO_PAGES, Node
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferKind, TransferOps
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import PageRun


@dataclass(frozen=True, slots=True, eq=False)
class RunOp:
    """Pages to read from a store into host pages, or to write there from them.

    Attributes:
        op: Its number.
        run: Which pages, and where they are or go.
    """

    op: int
    run: PageRun


class StoreSync:
    """Begins and ends prefetches, and adopts what a former process left.

    Args:
        tiers: What lies where.
        locks: Keep the place that a prefetch continues.
        ops: The copies in flight.

    Attributes:
        num_wanted: Pages that prefetches were begun, or could not be begun, for.
        num_prefetched: Of them, those that can be found now.
        unfulfilled: Of them, the others that were settled, by reason.
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
        """Whether a page is on its way, and there will be a place for it."""
        return self.arriving_by(digest) > 0

    def arriving_by(self, digest: bytes) -> int:
        """Returns the prefetch that a page is on its way with, if there will be a place for it, or 0."""
        number = self._arriving.get(digest, 0)
        return 0 if number and self._ops[number].lock.is_lost else number

    def count_unfulfilled(self, num_pages: int, reason: str) -> None:
        """Counts pages that were wanted from a store and that nobody began to prefetch."""
        self.num_wanted += num_pages
        self.unfulfilled[reason] += num_pages

    def begin_prefetch(self, end: Node, key: bytes, num_more: int = 0) -> RunOp | None:
        """Makes room for pages that a store has.

        Args:
            end: Where the prefix ends that is here already.
            key: Packed tokens of the pages that follow.
            num_more: Pages that the store has after those; left out with them when it cannot begin.

        Returns:
            What to read, or None: the host has no room, the end is not on the host, or the first page is on its
            way already. ``unfulfilled`` counts pages that were left out.
        """
        digests = self._tiers.tree.chain(end.digests[-1], key)
        self.num_wanted += len(digests)
        path_lock = self._locks.lock_host(end)
        count = min(len(digests), self._tiers.host.num_available)
        refusal = self._refusal(end, digests[0], count)
        self.unfulfilled[refusal or "host_full"] += len(digests) - (0 if refusal else count)
        if refusal:
            self.count_unfulfilled(num_more, refusal)
            self._locks.drop(path_lock)
            return None
        pages = self._tiers.allocate_host(count)
        op = self._ops.begin(TransferKind.PREFETCH, path_lock, pages)
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
        """Takes in how many leading pages of a prefetch arrived; nobody writes to the others any more.

        Returns:
            Pages that can be found now and could not before.
        """
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
        """Lets go of the place that a prefetch continues. Its pages stay taken until ``end_prefetch``, which drops them."""
        op = self._ops[number]
        assert op.kind is TransferKind.PREFETCH, f"op {number} is no prefetch"
        *_, root = path(op.lock.node)
        self._locks.drop(op.lock)
        op.lock = self._locks.lock_host(self._tiers.tree.keep_root(root))
        op.lock.is_lost = True

    def recover(self, runs: Iterable[PageRun]) -> int:
        """Makes pages findable that a former process left on the host; see ``PrefixCache.recover``."""
        tiers = self._tiers
        ends: dict[bytes, Node] = {}
        num_adopted = 0
        for run in runs:
            taken = tiers.host.pages.allocate(run.pages)
            assert taken is not None and (taken == run.pages).all(), f"host pages {run.pages} are not all free"
            parent = ends.get(run.parent)
            if run.parent == run.namespace:
                parent = tiers.tree.keep_root(tiers.tree.root(run.namespace))
            if parent is None or not is_ready_on_host(parent):
                tiers.free_host(run.pages)
                continue
            num_adopted += self.insert(parent, run.key, run.digests, run.pages)
            node, _, num_pages = tiers.tree.find(parent, run.key)
            if num_pages == len(run.digests):
                ends[run.digests[-1]] = node
        return num_adopted

    def insert(self, node: Node, key: bytes, digests: list[bytes], pages: Int32Array) -> int:
        """Adds host pages below a node, or to nodes that are on the device alone; gives back those that are there.

        Returns:
            How many were added.
        """
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
                tiers.queue(child)  # it may go sooner now
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
        """Returns why a prefetch cannot begin, or nothing."""
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
        tiers.versions.tree_epoch += 1


def is_ready_on_host(node: Node) -> bool:
    """Whether host pages may follow this node: it is a root, or its host copy is filled."""
    return node.is_root or (node.host_pages.size > 0 and not node.host_ready_op)
