"""The contract of the index: every operation, what it changes, and how long its result is valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from hiserve.cache.index.allocator import PADDING_PAGE
from hiserve.cache.index.eviction import ON_DEVICE, ON_HOST, Eviction, EvictionOrder
from hiserve.cache.index.locks import Locks, PrefixLock
from hiserve.cache.index.miss_reasons import Miss, MissReason, explain
from hiserve.cache.index.prefixes import HostAdmission, Match, Prefixes
from hiserve.cache.index.radix import NO_PAGES, STEP_SHIFT, RadixTree
from hiserve.cache.index.reports import PrefixCacheStats, Tier, TierListener, outline
from hiserve.cache.index.store_sync import RunOp, StoreSync, Uploads
from hiserve.cache.index.tiers import CacheTiers, TierPages
from hiserve.cache.index.transfer_ops import SubtreeRemoval, TransferOps
from hiserve.cache.index.transfers import MANY_COPIES, Transfers
from hiserve.core.digest import Chain, chain
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import DEVICE_KINDS, CopyKind, PageCopy, PageRun
from hiserve.ipc.cache_stats import NodeFacts

# All that the rest of the package may name of the index.
__all__ = [
    "NO_PAGES",
    "PADDING_PAGE",
    "HostAdmission",
    "Match",
    "Miss",
    "MissReason",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixLock",
    "RunOp",
    "Tier",
    "TierListener",
]


class PrefixCache:
    """Which page of which tier holds which prefix. Integers only, one thread.

    It copies nothing: ``begin_*`` returns orders, and ``complete`` takes their ends. A digest, a page number or a count that
    an operation returns holds until the next operation that changes the index, unless its docstring says more.

        prefixes    match, lock, insert, release, ensure_backed, explain
        pages       allocate, free
        host        begin_load, begin_offloads, complete
        store       missing, begin_prefetch, abort_prefetch, begin_uploads, complete
        lifecycle   recover, grow_host, begin_after, flush
        reports     stats, outline, take_events, take_freed_host_pages

    Args:
        num_pages: Pages in the device pool, the sink included.
        page_size: Tokens per page.
        namespace: Base digest of everything that keeps caches apart but the tenant.
        eviction: Order in which unlocked leaves leave each tier.
        num_host_pages: Pages in the host pool, page 0 included; 0 without a host tier.
        num_ready_host_pages: Pages below this can be used already; all, unless given. See ``grow_host``.
        host_admission: Which pages are stored on the host.
        max_upload_pages: Host pages that uploads to a store may keep from eviction; 0 without a store.
        listener: Called with every change of the pages that each tier has.
        link: Makes the digests of pages (``core.digest.chain_of``).

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        num_arrived: By kind, LOAD and OFFLOAD, live: pages that ended copies brought to where they can be found.

    The parts (``tree`` to ``uploads``) are for checks: no other package reads them (``tests/test_architecture.py``).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        namespace: bytes,
        eviction: EvictionOrder = "lru",
        num_host_pages: int = 0,
        num_ready_host_pages: int | None = None,
        host_admission: HostAdmission = HostAdmission.WRITE_THROUGH,
        max_upload_pages: int = 0,
        listener: TierListener | None = None,
        link: Chain = chain,
    ) -> None:
        self.page_size = page_size
        self.namespace = namespace
        self._listener = listener
        self._has_host = num_host_pages > 0
        self.tree = RadixTree(page_size, link)
        self.device = TierPages(Tier.DEVICE, num_pages, Eviction(eviction, ON_DEVICE), listener=listener)
        ready = num_ready_host_pages if num_host_pages else 1  # page 0 alone: nothing to hand out
        self.host = TierPages(Tier.HOST, max(num_host_pages, 2), Eviction(eviction, ON_HOST), ready, listener)
        self.tiers = CacheTiers(self.tree, self.device, self.host, has_host=self._has_host)
        self.locks = Locks(self.tiers)
        self.ops = TransferOps(self.tiers)
        self._removal = SubtreeRemoval(self.tiers, self.locks, self.ops)
        self.store_sync = StoreSync(self.tiers, self.locks, self.ops)
        self.uploads = Uploads(self.tiers, self.locks, self.ops, max_upload_pages)
        uploads = self.uploads if max_upload_pages else None
        offloaded, inserted = (uploads, None) if host_admission is HostAdmission.SELECTIVE else (None, uploads)
        self.transfers = Transfers(self.tiers, self.locks, self.ops, self._removal, offloaded)
        admission = host_admission if self._has_host else None
        self._prefixes = Prefixes(namespace, self.tiers, self.locks, self.ops, self.transfers, inserted, admission)
        self.page_owner = self.device.pages.owner
        self.num_arrived = self.transfers.num_arrived

    # --- prefixes -------------------------------------------------------------------------

    def match(self, tenant: bytes, key: bytes) -> Match:
        """Finds the longest cached prefix of a prompt, leaving at least its last token to compute.

        Changes nothing. The result is valid until the tree changes in a way that matters (``Match.tree_epoch``).

        Args:
            tenant: Whose prompt: tenants do not see each other's pages.
            key: The whole prompt, packed int32.
        """
        return self._prefixes.match(tenant, key)

    def lock(
        self, match: Match, num_host_tokens: int = 0, priority: int = 0, account: bytes | None = None
    ) -> PrefixLock:
        """Keeps a matched prefix from eviction on every tier until ``release``, and counts as a use of it.

        The lock stays valid across splits, loads and evictions of others. ``flush`` spares its pages; a load that fails
        shortens it (``complete`` returns it then).

        Args:
            match: Of this epoch.
            num_host_tokens: Whole pages of the host part to lock too: to be loaded before anything is inserted below.
            priority: The request's, which stays with every page it uses; only the eviction order ``priority`` reads it.
            account: Whose share of the pages they take (see ``TenantShares``); None is a share of the tenant's own.
        """
        return self._prefixes.lock(match, num_host_tokens, priority, account)

    def release(self, lock: PrefixLock) -> None:
        """Returns a lock, exactly once. Its pages stay cached and may be evicted from now on."""
        self._prefixes.release(lock)

    def ensure_backed(self, lock: PrefixLock) -> None:
        """Queues a locked prefix for offload, whatever the host admission: the device is about to lose it."""
        if self._has_host:
            self.transfers.enqueue(lock.node)

    def insert(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int = 0) -> Int32Array:
        """Makes computed full pages findable below a locked prefix, and moves the lock to their end.

        Where the device already has the same tokens, the caller's copies are freed and the tree's pages are used instead:
        a relocation of a live request. Where the host alone has them, the caller's pages become their copy on the device.

        Args:
            lock: Lock on the prefix before ``key``; moves on to its end.
            key: Packed tokens of the new pages.
            pages: int32 ``[p]``. Where they were computed; the caller's until now, immutable from now on.
            step: The step whose forward writes the last of them.

        Returns:
            int32 ``[q]``. The pages to use while the lock is held; ``pages`` itself when none moved. ``q < p`` only while
            the page after them is being loaded: the rest is the caller's still, to be inserted again later.
        """
        return self._prefixes.insert(lock, key, pages, step)

    def explain(self, tenant: bytes, key: bytes, num_used: int, *, is_in_store: bool = False) -> Miss:
        """Returns why no more than ``num_used`` tokens of a prompt were taken from the cache. Changes nothing.

        Args:
            tenant: Whose prompt.
            key: The whole prompt, packed.
            num_used: Tokens taken from the cache.
            is_in_store: A store has the page after those that are cached, or may have it.
        """
        return explain(
            self.tree,
            self._prefixes.root(tenant),
            self._prefixes.usable(key),
            num_used=num_used,
            lost=self.tiers.lost,
            is_arriving=self.store_sync.is_arriving,
            is_in_store=is_in_store,
        )

    # --- pages ----------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Device pages that ``allocate`` could return now."""
        return self.device.num_available

    def allocate(self, wanted: Int32Array) -> Int32Array | None:
        """Takes one device page per entry of ``wanted`` (see ``PageAllocator.allocate``), evicting leaves if need be.

        Returns:
            int32 ``[n]`` pages, the caller's until ``free`` or ``insert``; or None when free and evictable pages together
            do not suffice (then nothing was evicted).
        """
        return self.tiers.allocate(wanted)

    def free(self, pages: Int32Array) -> None:
        """Returns device pages that were allocated and never inserted; forwards in flight may still touch them."""
        self.tiers.free(pages)

    @property
    def relocation_version(self) -> int:
        """Grows when the address of bytes that a live request owns changes: its page table is stale then."""
        return self.tiers.relocation_version

    # --- device and host ------------------------------------------------------------------

    def begin_load(self, lock: PrefixLock, pages: Int32Array) -> PageCopy:
        """Begins to load the host part of a lock; every match finds it on the device from now on.

        Args:
            lock: Still has its host part. Waits for the load afterwards (``lock.ops``), until ``complete``.
            pages: int32 ``[h]``. One for each of ``lock.host_pages``, allocated by the caller; the cache's from now on.
        """
        return self.transfers.begin_load(lock, pages)

    @property
    def has_offloads(self) -> bool:
        """Whether ``begin_offloads`` has anything to do."""
        return self.transfers.has_offloads

    @property
    def offload_backlog(self) -> tuple[int, int]:
        """Nodes that wait for their offload, and pages that the device would lose soon and must offload first."""
        return self.transfers.num_to_offload, self.transfers.num_to_save

    def begin_offloads(
        self, max_pages: int, max_copies: int = MANY_COPIES, is_worth: Callable[[int], bool] | None = None
    ) -> list[PageCopy]:
        """Begins offloads: first the pages that the device would lose next, then, while host pages are free, new pages.

        New pages go in the order of their wishes, parents before children; on a full host they stay on the device alone
        until they are among the next to go. Both copies stay until ``complete``. Call it once per step.

        Args:
            max_pages: Of all copies together.
            max_copies: Orders.
            is_worth: Whether that many pages are loaded sooner than computed; others are not offloaded before eviction.
                None is always.
        """
        return self.transfers.begin_offloads(max_pages, max_copies, is_worth)

    def complete(self, op: int, *, ok: bool, num_pages: int = 0) -> list[PrefixLock]:
        """Ends a copy of any kind, each exactly once: nothing of it reads or writes any page from now on.

        Pages that arrived can be found where they are; pages of a load that failed leave the cache.

        Args:
            op: ``PageCopy.op`` or ``RunOp.op``.
            ok: Whether all bytes arrived.
            num_pages: Leading pages of a PREFETCH that arrived.

        Returns:
            The locks that lost pages because a load failed. Their rows must be computed again from where ``lock.pages``
            end now.
        """
        kind = self.ops[op].kind
        if kind in DEVICE_KINDS:
            return self.transfers.complete(op, ok=ok)
        if kind is CopyKind.PREFETCH:
            self.store_sync.end_prefetch(op, num_pages)
        elif kind is CopyKind.STAGE:
            self.uploads.end_stage(op, ok=ok)
        else:
            self.uploads.end_upload(op)
        return []

    def copies_in_flight(self) -> list[int]:
        """Returns the numbers of the copies that have not ended."""
        return [op.number for op in self.ops]

    # --- store ----------------------------------------------------------------------------

    @property
    def num_available_on_host(self) -> int:
        """Host pages that a prefetch could take now."""
        return self.host.num_available

    def missing(self, tenant: bytes, key: bytes) -> tuple[int, list[bytes]]:
        """Returns how many pages of a prompt are cached, and the digests of the next ones. Changes nothing."""
        return self._prefixes.missing(tenant, key)

    def prefetch_of(self, digest: bytes) -> int:
        """Returns the prefetch that brings a page to a place that still exists, or 0. Changes nothing."""
        return self.store_sync.arriving_by(digest)

    def begin_prefetch(self, tenant: bytes, key: bytes, max_pages: int, num_more: int = 0) -> RunOp | None:
        """Takes host pages for up to ``max_pages`` pages that a store has after the cached prefix of a prompt.

        Args:
            tenant: Whose prompt.
            key: The whole prompt, packed.
            max_pages: To fetch.
            num_more: Pages that the store has after those, to be counted as left out when there is no place for these.

        Returns:
            The store's keys and the host pages to fill, which stay taken until ``complete``; or None: the rest of the
            prompt is no page, is on its way, or has no place (``PrefixCacheStats.not_prefetched``).
        """
        rest = self._prefixes.rest_of(tenant, key, max_pages)
        return None if rest is None else self.store_sync.begin_prefetch(*rest, num_more)

    def abort_prefetch(self, op: int) -> None:
        """Unlocks the prefix that a prefetch continues; its pages arrive nowhere, and stay taken until ``complete``."""
        self.store_sync.abort_prefetch(op)

    @property
    def has_uploads(self) -> bool:
        """Whether ``begin_uploads`` has anything to do."""
        return self.uploads.has_uploads

    @property
    def num_to_upload(self) -> int:
        """Pages whose upload has not begun."""
        return self.uploads.num_waiting

    def begin_uploads(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins to give the store new pages, parents before children, each once.

        Returns:
            Uploads from host pages, and copies of pages that a full host lacks to staging pages there. Both keep their
            pages until ``complete``; the end of a copy makes an upload, which a later call returns.
        """
        return self.uploads.take()

    # --- lifecycle ------------------------------------------------------------------------

    def recover(self, runs: Iterable[PageRun]) -> int:
        """Makes pages findable that a former process left on the host; returns how many.

        Args:
            runs: Parents first; their pages are ready and free. Those without a parent, and those cached already, are
                freed.
        """
        return self.store_sync.recover(runs)

    def grow_host(self, num_ready_pages: int) -> None:
        """Makes the host pages below ``num_ready_pages`` usable; fewer than before change nothing."""
        if num_ready_pages > self.host.pages.num_ready:
            self.host.pages.grow(num_ready_pages)

    def begin_after(self, step_id: int) -> None:
        """Records that a step was planned: its forward may still touch every page in use now."""
        self.tiers.clock = max(self.tiers.clock, step_id << STEP_SHIFT)

    def flush(self, tier: Tier | None = None) -> int:
        """Empties a tier, or both, but for locked pages; returns how many pages became free at once.

        Pages that copies use follow when these end.
        """
        num_freed = self._removal.flush(tier)
        self.transfers.sweep()
        if tier is None and self._listener is not None:
            self._listener.cleared()
            self.tiers.notify_all()
        return num_freed

    # --- reports --------------------------------------------------------------------------

    def stats(self) -> PrefixCacheStats:
        """Returns every count as of now. Changes nothing."""
        return PrefixCacheStats(
            device=self.device.stats(),
            host=self.host.stats(),
            num_begun=self.ops.num_begun,
            num_in_flight=self.ops.num_in_flight,
            num_unbacked=self.tiers.num_unbacked,
            num_without_room=self.transfers.num_without_room,
            num_not_uploaded=self.uploads.num_not_uploaded,
            num_prefetches_wanted=self.store_sync.num_wanted,
            num_prefetched=self.store_sync.num_prefetched,
            not_prefetched=self.store_sync.unfulfilled,
        )

    def outline(self, depth: int) -> list[NodeFacts]:
        """Returns the roots and ``depth`` levels of nodes below them, of each level those used last. Changes nothing."""
        return outline(self.tree, depth)

    def take_events(self, tier: Tier = Tier.DEVICE) -> tuple[bytes, bytes]:
        """Returns (published, removed) page digests of a tier since the last call, 16 bytes each."""
        return (self.device if tier is Tier.DEVICE else self.host).events.take()

    def take_freed_host_pages(self) -> Int32Array:
        """Returns the host pages freed since the last call, to be forgotten before any later copy is started."""
        freed, self.tiers.freed_host = self.tiers.freed_host, []
        return np.concatenate(freed) if freed else np.empty(0, dtype=np.int32)
