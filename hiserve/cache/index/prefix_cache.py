"""The only door to the index: match, lock, take, publish, copy between tiers, release, flush."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hiserve.cache.index.detach import SubtreeRemoval
from hiserve.cache.index.eviction import ON_HOST, Eviction, LruEviction
from hiserve.cache.index.locks import Locks, PrefixLock, path
from hiserve.cache.index.miss_reasons import Miss, explain
from hiserve.cache.index.node import Node
from hiserve.cache.index.radix import RadixTree
from hiserve.cache.index.store_sync import RunOp, StoreSync
from hiserve.cache.index.tier import Tier, TierListener, TierPages
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOps
from hiserve.cache.index.transfers import MANY_COPIES, Transfers
from hiserve.cache.index.uploads import Uploads
from hiserve.core.digest import Chain, chain, namespace_digest
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import PageCopy, PageRun

__all__ = ["HostAdmission", "Match", "PrefixCache", "PrefixLock"]


class HostAdmission(StrEnum):
    """Which pages are stored on the host."""

    WRITE_THROUGH = "write_through"  # every published page
    SELECTIVE = "write_through_selective"  # those that a second request uses


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached prefix of a prompt. Valid while ``tree_epoch`` stands.

    Attributes:
        num_tokens: Tokens covered on the device, or on their way there: a whole number of pages.
        num_host_tokens: Tokens after those that the host alone has, likewise.
        tree_epoch: Epoch of the tree at the time of the match.
    """

    num_tokens: int
    num_host_tokens: int
    tree_epoch: int
    _node: Node
    _num_beyond: int  # pages of the node after the match: a split leaves a node's end where it is


class PrefixCache:
    """Owns the pages and the tree; the planner sees nothing below it.

    Args:
        num_pages: Pages in the device pool, the sink included.
        page_size: Tokens per page.
        namespace: Base digest of everything that keeps caches apart but the tenant.
        eviction: Decides which unlocked leaf goes first on the device.
        num_host_pages: Pages in the host pool, page 0 included; 0 without a host tier.
        num_ready_host_pages: Pages below this can be used already; all, unless given. See ``grow_host``.
        host_admission: Which pages are stored on the host.
        host_eviction: Decides which goes first there (``LruEviction(ON_HOST)`` unless given).
        max_upload_pages: Host pages that uploads to a store may keep from eviction; 0 without a store.
        listener: Hears which pages each tier has.
        link: Makes the digests of pages (``core.digest.chain_of``).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        namespace: bytes,
        eviction: Eviction,
        num_host_pages: int = 0,
        num_ready_host_pages: int | None = None,
        host_admission: HostAdmission = HostAdmission.WRITE_THROUGH,
        host_eviction: Eviction | None = None,
        max_upload_pages: int = 0,
        listener: TierListener | None = None,
        link: Chain = chain,
    ) -> None:
        self.page_size = page_size
        self.namespace = namespace
        self.tree = RadixTree(page_size, link)
        self._listener = listener
        self.device = TierPages(Tier.DEVICE, num_pages, eviction, listener=listener)
        ready = num_ready_host_pages if num_host_pages else 1  # page 0 alone: nothing to hand out
        self.host = TierPages(Tier.HOST, max(num_host_pages, 2), host_eviction or LruEviction(ON_HOST), ready, listener)
        self.tiers = CacheTiers(self.tree, self.device, self.host, has_host=num_host_pages > 0)
        self.locks = Locks(self.tiers)
        self.ops = TransferOps(self.tiers)
        self.store_sync = StoreSync(self.tiers, self.locks, self.ops)
        self.uploads = Uploads(self.tiers, self.locks, self.ops, max_upload_pages)
        self._removal = SubtreeRemoval(self.tiers, self.locks, self.ops)
        uploads = self.uploads if host_admission is HostAdmission.SELECTIVE else None
        self.transfers = Transfers(self.tiers, self.locks, self.ops, self._removal, uploads)
        self.pages = self.device.pages
        self.versions = self.tiers.versions
        self._has_host = num_host_pages > 0
        self._writes_through = num_host_pages > 0 and host_admission is HostAdmission.WRITE_THROUGH
        self._offloads_hits = num_host_pages > 0 and host_admission is HostAdmission.SELECTIVE

    @property
    def num_evictable(self) -> int:
        """Device pages that ``allocate`` could free."""
        return self.device.num_evictable

    @property
    def num_evicted(self) -> int:
        """Device pages freed so far."""
        return self.device.num_evicted

    # --- prefixes -------------------------------------------------------------------------

    def match(self, tenant: bytes, key: bytes) -> Match:
        """Finds the longest cached prefix, leaving at least the last token to compute.

        Changes nothing. ``key`` is the whole prompt, packed.
        """
        node, node_pages, num_pages = self.tree.find(self._root(tenant), self._usable(key))
        num_beyond = node.num_pages - node_pages
        num_host_pages = -num_beyond
        step: Node | None = node
        while step is not None and step.is_on_host_only:
            num_host_pages += step.num_pages
            step = step.parent
        num_host_pages = max(0, num_host_pages)
        return Match(
            num_tokens=(num_pages - num_host_pages) * self.page_size,
            num_host_tokens=num_host_pages * self.page_size,
            tree_epoch=self.versions.tree_epoch,
            _node=node,
            _num_beyond=num_beyond,
        )

    def lock(
        self, match: Match, num_host_tokens: int = 0, priority: int = 0, account: bytes | None = None
    ) -> PrefixLock:
        """Keeps a matched prefix from eviction until the receipt is released.

        Args:
            match: Of this epoch.
            num_host_tokens: Whole pages of the host part to hold: to be loaded before anything is published below.
            priority: The request's, which stays with all it uses; only ``PriorityEviction`` looks at it.
            account: Whose share of the pages they take (see ``TenantShares``); None is a share of the tenant's own.
        """
        assert match.tree_epoch == self.versions.tree_epoch, "the tree changed since the match; match again"
        assert 0 <= num_host_tokens <= match.num_host_tokens and num_host_tokens % self.page_size == 0
        node = self._end_of(match, (match.num_host_tokens - num_host_tokens) // self.page_size)
        *_, root = path(node)
        self.tiers.hand_over(root, root.digests[0] if account is None else account)
        self.device.shares.see(root.owner)
        self.host.shares.see(root.owner)
        lock = self.locks.issue(node, self.release, priority)
        if self.ops.num_loads:
            for number in {step.device_ready_op for step in path(node)} - {0}:
                self.transfers.wait(lock, self.ops[number])
        if self._offloads_hits:
            self.transfers.enqueue(node)
        return lock

    def release(self, lock: PrefixLock) -> None:
        """Returns a lock. Exactly once per receipt."""
        assert lock.is_open, "this lock was released before"
        lock.is_open = False
        self.locks.drop(lock.path_lock)

    def ensure_backed(self, lock: PrefixLock) -> None:
        """Wishes what a receipt holds on the host, whatever the host admission: its row is about to lose it."""
        if self._has_host:
            self.transfers.enqueue(lock.node)

    def allocate(self, wanted: Int32Array) -> Int32Array | None:
        """Takes one page per entry of ``wanted`` (see ``PageAllocator.allocate``), evicting if need be.

        Returns:
            int32 ``[n]`` pages, or None when free and evictable pages together do not suffice
            (then nothing was evicted).
        """
        return self.tiers.allocate(wanted)

    def free(self, pages: Int32Array) -> None:
        """Returns pages that were never published."""
        self.tiers.free(pages)

    def insert(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int = 0) -> Int32Array:
        """Makes computed full pages findable, below what ``lock`` holds.

        Where the device already has the same tokens, the caller's copies are freed and the tree's pages are used instead:
        a relocation of a live request. Where the host alone has them, the caller's pages become their copy on the device.

        Args:
            lock: Lock on the prefix before ``key``; moves on to its end.
            key: Packed tokens of the new pages.
            pages: int32 ``[p]``. Where they were computed; owned by the caller until now.
            step: The step whose forward writes the last of them.

        Returns:
            int32 ``[q]``. The pages to use from now on; ``pages`` itself when none moved. ``q < p`` only while
            the page after them is being loaded: the rest is the caller's still, to be published again later.
        """
        page_bytes = self.tree.page_bytes
        assert lock.is_open and len(key) == pages.size * page_bytes
        assert not lock.host_pages.size, f"{lock.host_pages.size} host pages were neither loaded nor released"
        canonical = pages
        moved: list[Int32Array] = []
        done = 0
        while done < canonical.size:
            children = lock.node.children
            child = children.get(key[done * page_bytes : (done + 1) * page_bytes]) if children else None
            if child is None:
                self._insert_pages(lock, key[done * page_bytes :], canonical[done:], step)
                break
            if child.device_ready_op:
                canonical = canonical[:done]
                break
            shared = self.tree.common_pages(child.key, key, done * page_bytes)
            if shared < child.num_pages:
                child = self.tree.split(child, shared)
            self.locks.move_on(lock.path_lock, child)
            ours = canonical[done : done + shared]
            if child.is_on_host_only:
                self.tiers.put_on_device(child, ours.copy(), step=step)
            else:
                moved.append(ours)
                canonical = np.concatenate((canonical[:done], child.pages, canonical[done + shared :]))
            if self._offloads_hits:
                self.transfers.enqueue(child)
            done += shared
        if moved:
            self.tiers.free(np.concatenate(moved))
            self.versions.relocation_version += 1
        return canonical

    def explain(self, tenant: bytes, key: bytes, num_used: int, *, is_in_store: bool = False) -> Miss:
        """Returns why a prompt was not found any further than the ``num_used`` tokens that were taken from the cache.

        Args:
            tenant: Whose prompt.
            key: The whole prompt, packed.
            num_used: Tokens taken from the cache.
            is_in_store: A store has the page after those that are cached, or may have it.
        """
        return explain(
            self.tree,
            self._root(tenant),
            self._usable(key),
            num_used=num_used,
            lost=self.tiers.lost,
            is_arriving=self.store_sync.is_arriving,
            is_in_store=is_in_store,
        )

    # --- tiers ----------------------------------------------------------------------------

    def begin_after(self, step_id: int) -> None:
        """Tells that a step was planned: what is freed from now on may be touched by its forward still."""
        self.tiers.begin_after(step_id)

    def begin_load(self, lock: PrefixLock, pages: Int32Array) -> PageCopy:
        """Loads the host part of a receipt to device pages that were taken for it; see ``Transfers.begin_load``."""
        return self.transfers.begin_load(lock, pages)

    @property
    def has_offloads(self) -> bool:
        """Whether ``begin_offloads`` has anything to do."""
        return self.transfers.has_offloads

    def begin_offloads(
        self, max_pages: int, max_copies: int = MANY_COPIES, is_worth: Callable[[int], bool] | None = None
    ) -> list[PageCopy]:
        """Begins to store up to ``max_pages`` pages on the host; see ``Transfers.begin_offloads``."""
        return self.transfers.begin_offloads(max_pages, max_copies, is_worth)

    def complete(self, op: int, *, ok: bool) -> list[PrefixLock]:
        """Takes in the end of a load or a store; returns the receipts that lost pages. See ``Transfers.complete``."""
        return self.transfers.complete(op, ok=ok)

    def missing(self, tenant: bytes, key: bytes) -> tuple[int, list[bytes]]:
        """Returns how many pages of a prompt are cached, and the digests of those after them that might be."""
        match = self.match(tenant, key)
        node, num_cached = match._node, (match.num_tokens + match.num_host_tokens) // self.page_size
        used = node.num_pages - match._num_beyond
        rest = self._usable(key)[num_cached * self.tree.page_bytes :]
        return num_cached, self.tree.chain(node.digests[used - 1 if used else 0], rest)

    def begin_prefetch(self, tenant: bytes, key: bytes, max_pages: int, num_more: int = 0) -> RunOp | None:
        """Makes room on the host for up to ``max_pages`` pages that a store has after the cached prefix of a prompt.

        Args:
            tenant: Whose prompt.
            key: The whole prompt, packed.
            max_pages: To fetch.
            num_more: Pages that the store has after those, to be counted as left out when there is no place for these.

        Returns:
            What to read where, or None when there is nothing to read or no place for it.
        """
        usable = self._usable(key)
        match = self.match(tenant, key)
        start = match.num_tokens + match.num_host_tokens
        wanted = usable[4 * start :][: max_pages * self.tree.page_bytes]
        return self.store_sync.begin_prefetch(self._end_of(match, 0), wanted, num_more) if wanted else None

    def end_prefetch(self, op: int, num_pages: int) -> int:
        """Takes in how many leading pages arrived; returns how many can be found now that could not before."""
        return self.store_sync.end_prefetch(op, num_pages)

    def abort_prefetch(self, op: int) -> None:
        """Gives a prefetch up; ``end_prefetch`` must still tell when nobody writes to its pages any more."""
        self.store_sync.abort_prefetch(op)

    def take_uploads(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins uploads, and copies to the host for those of pages that it lacks; see ``Uploads.take``."""
        return self.uploads.take()

    def end_stage(self, op: int, *, ok: bool) -> None:
        """Takes in how a copy to the host ended that is to be uploaded from there."""
        self.uploads.end_stage(op, ok=ok)

    def end_upload(self, op: int) -> None:
        """Takes in that nobody reads the pages of an upload any more."""
        self.uploads.end_upload(op)

    def recover(self, runs: Iterable[PageRun]) -> int:
        """Makes pages findable that a former process left on the host.

        Args:
            runs: Parents first; their pages are ready and free.

        Returns:
            Pages adopted. Those whose parents are missing, or that are here already, are given back.
        """
        return self.store_sync.recover(runs)

    def grow_host(self, num_ready_pages: int) -> None:
        """Makes the host pages below ``num_ready_pages`` usable."""
        self.host.pages.grow(num_ready_pages)

    def flush(self, tier: Tier | None = None) -> int:
        """Empties a tier, or both, but for what receipts hold; returns how many pages became free at once."""
        num_freed = self._removal.flush(tier)
        self.transfers.sweep()
        if tier is None and self._listener is not None:
            self._listener.cleared()
            self.tiers.notify_all()
        return num_freed

    def take_events(self, tier: Tier = Tier.DEVICE) -> tuple[bytes, bytes]:
        """Returns (published, removed) page digests of a tier since the last call, 16 bytes each."""
        return (self.device if tier is Tier.DEVICE else self.host).events.take()

    def take_freed_host_pages(self) -> Int32Array:
        """Returns the host pages given back since the last call, to be forgotten before any later copy is started."""
        freed, self.tiers.freed_host = self.tiers.freed_host, []
        return np.concatenate(freed) if freed else np.empty(0, dtype=np.int32)

    # --- inside ---------------------------------------------------------------------------

    def _root(self, tenant: bytes) -> Node:
        return self.tree.root(namespace_digest(self.namespace, tenant))

    def _usable(self, key: bytes) -> bytes:
        """Returns the whole pages of a prompt that leave its last token out."""
        usable = max(0, len(key) // 4 - 1) // self.page_size * self.tree.page_bytes
        return key[:usable]

    def _end_of(self, match: Match, num_less: int) -> Node:
        """Returns the node that ends ``num_less`` pages before the match does, cutting one if need be."""
        node, num_beyond = match._node, match._num_beyond + num_less
        while node.parent is not None and num_beyond >= node.num_pages:  # or another lock cut this node since
            num_beyond -= node.num_pages
            node = node.parent
        if node.is_root:
            return self.tree.keep_root(node)
        return self.tree.split(node, node.num_pages - num_beyond) if num_beyond else node

    def _insert_pages(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int) -> None:
        path_lock = lock.path_lock
        node = path_lock.node
        is_chosen = self._offloads_hits and node.is_wanted  # what is new below it was not used twice
        in_place = not is_chosen and node.priority == path_lock.priority
        end, _ = self.tree.extend(node, key, pages, in_place=in_place)
        if end is not node:
            end.num_locks = 1
            end.priority = path_lock.priority
            path_lock.node = end
            self.tiers.clock += 1
            self.locks.touch(end)
        self.device.shares.charge(end.owner, pages.size)
        end.written_step = step
        self.device.insert(end, end.num_pages - pages.size)
        self.versions.tree_epoch += 1
        if self._writes_through:
            self.transfers.enqueue(end)
            self.uploads.offer(end, end.digests[-pages.size :])
