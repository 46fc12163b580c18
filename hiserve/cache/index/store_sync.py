"""Pages and tails that come to the host: prefetches from a store, and the recovery of a former process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hiserve.cache.index.locks import Locks, path, path_digests, raise_priority
from hiserve.cache.index.nodes import Node, is_ready_on_host
from hiserve.cache.index.tails import TailTiers
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOps
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, CopyKind, PageRun, TailImage


@dataclass(frozen=True, slots=True, eq=False)
class RunOp:
    """Pages and a tail to read from a store into host pages, or to write there from them."""

    op: int
    run: PageRun  # the pages, and their content; none where the tail is copied alone
    image: TailImage | None = None  # the tail at their end


class StoreSync:
    """Begins and ends prefetches, and recovers the pages of a former process.

    Args:
        tails: Those of the pages; None where each boundary is a resume point.

    Attributes:
        num_wanted: Pages of prefetches that were begun, or could not begin; frames of tails are pages here.
        num_prefetched: Of them, inserted pages.
        unfulfilled: Of them, pages neither inserted nor in flight, by reason.
    """

    def __init__(self, tiers: CacheTiers, locks: Locks, ops: TransferOps, tails: TailTiers | None) -> None:
        self._tiers = tiers
        self._locks = locks
        self._ops = ops
        self._tails = tails
        self._begun: dict[int, RunOp] = {}
        self._arriving: dict[bytes, int] = {}
        self._arriving_tails: dict[bytes, int] = {}  # by the digest of the page before the boundary
        self.num_wanted = 0
        self.num_prefetched = 0
        self.unfulfilled: Counter[str] = Counter()

    def is_arriving(self, digest: bytes) -> bool:
        """Whether a prefetch will insert a page."""
        return self.arriving_by(digest) > 0

    def arriving_by(self, digest: bytes, *, of_tail: bool = False) -> int:
        """Returns the number of the prefetch that will insert a page, or the tail behind it; 0 without one."""
        number = (self._arriving_tails if of_tail else self._arriving).get(digest, 0)
        return 0 if number and self._ops[number].lock.is_lost else number

    def begin_prefetch(self, end: Node, key: bytes, num_more: int = 0, *, num_frames: int = 0) -> RunOp | None:
        """Allocates host pages for the pages of ``key``, after node ``end`` of the cached prefix; see ``PrefixCache``.

        Args:
            end: The last node of the prefix.
            key: Packed tokens; may be empty where a tail is fetched.
            num_more: Pages that the store has after those.
            num_frames: Of the tail behind the last page; 0 fetches none. Then all is fetched, or nothing.

        Returns:
            The pages to read; None if the host has no room, the end is not on the host, or the first page is in flight.
            ``unfulfilled`` counts pages that were left out.
        """
        digests = self._tiers.tree.chain(end.digests[-1], key)
        num_wanted = len(digests) + num_frames
        self.num_wanted += num_wanted
        path_lock = self._locks.lock_host(end)
        count = min(num_wanted, self._tiers.host.num_available)
        if num_frames and count < num_wanted:
            count = 0
        refusal = self._refusal(end, digests, count)
        self.unfulfilled[refusal or "host_full"] += num_wanted - (0 if refusal else count)
        if refusal:
            self.num_wanted += num_more
            self.unfulfilled[refusal] += num_more
            self._locks.drop(path_lock)
            return None
        pages = self._tiers.allocate_host(count)
        count -= num_frames
        op = self._ops.begin(CopyKind.PREFETCH, path_lock, pages)
        *_, root = path(end)
        run = PageRun(
            pages=pages[:count],
            namespace=root.digests[0],
            parent=end.digests[-1],
            digests=digests[:count],
            key=key[: count * self._tiers.tree.page_bytes],
        )
        image = None
        if num_frames:
            history = (*path_digests(end), *run.digests)
            image = TailImage(pages[count:], root.digests[0], history[-1], history=history)
            self._arriving_tails[image.digest] = op.number
        begun = self._begun[op.number] = RunOp(op.number, run, image)
        self._arriving.update(dict.fromkeys(run.digests, op.number))
        return begun

    def end_prefetch(self, number: int, num_pages: int) -> int:
        """Ends a prefetch of which so many leading pages arrived, those of a tail last; returns how many of them were inserted."""
        op, begun = self._ops.end(number), self._begun.pop(number)
        run, image = begun.run, begun.image
        for digest in run.digests:
            if self._arriving.get(digest) == number:
                del self._arriving[digest]
        if image is not None and self._arriving_tails.get(image.digest) == number:
            del self._arriving_tails[image.digest]
        self.unfulfilled["not_delivered"] += op.num_pages - num_pages
        num_new = 0
        if op.lock.is_lost or not is_ready_on_host(op.lock.node):
            self.unfulfilled["place_lost"] += num_pages
            self._tiers.free_host(op.host_pages)
        else:
            self._tiers.free_host(op.host_pages[num_pages:])
            num_history = min(num_pages, run.pages.size)
            if num_history:
                key = run.key[: num_history * self._tiers.tree.page_bytes]
                num_new = self.insert(op.lock.node, key, run.digests[:num_history], run.pages[:num_history])
            if image is not None and num_pages == op.num_pages:
                num_new += self._insert_tail(op.lock.node, run, image)
            self.unfulfilled["here_already"] += num_pages - num_new
        self.num_prefetched += num_new
        self._locks.drop(op.lock)
        return num_new

    def _insert_tail(self, node: Node, run: PageRun, image: TailImage) -> int:
        """Inserts a tail behind a run that follows a node; returns its frames, or 0 if it is not of use."""
        assert self._tails is not None
        end, at, num_pages = self._tiers.tree.find(node, run.key)
        if num_pages < len(run.digests) or not is_ready_on_host(end):
            self._tiers.free_host(image.frames)
            return 0
        num_new = self._tails.put_on_host(end, at, image.frames)
        if num_new and end.tails is not None:  # it has no lock yet: behind old history it would be the next to go
            self._use(end)
            self._tails.touch(end.tails[at], self._tiers.clock)
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

    def _refusal(self, end: Node, digests: list[bytes], room: int) -> str:
        """Returns the reason why a prefetch cannot begin; empty if it can."""
        if not is_ready_on_host(end):
            return "not_backed"
        if self.arriving_by(digests[0]) if digests else self.arriving_by(end.digests[-1], of_tail=True):
            return "in_flight"
        return "" if room else "host_full"

    def _add(self, parent: Node, key: bytes, digests: list[bytes], pages: Int32Array) -> None:
        tiers = self._tiers
        child = tiers.tree.add_child(Node(key, NO_PAGES, digests, parent))
        tiers.put_on_host(child, pages.copy())
        raise_priority(parent, child.priority)
        self._use(parent)
        child.last_used = tiers.clock
        tiers.queue(child)
        tiers.tree_epoch += 1

    def _use(self, node: Node) -> None:
        """Counts as a use of the path to a node."""
        self._tiers.clock += 1
        self._locks.touch(node)
        # The only nodes of the path that may be waiting for eviction, each from a tier, were used just now, too.
        on_device = next(step for step in path(node) if not step.is_on_host_only)
        for step in (on_device,) if node is on_device else (on_device, node):
            self._tiers.queue(step)
