"""The contract of the index: every operation, what it changes, and how long its result is valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from hiserve.cache.index.allocator import PADDING_PAGE
from hiserve.cache.index.eviction import ON_DEVICE, ON_HOST, Eviction
from hiserve.cache.index.locks import Locks, PrefixLock
from hiserve.cache.index.miss_reasons import Miss, MissReason, explain
from hiserve.cache.index.nodes import STEP_SHIFT, Node, Tail
from hiserve.cache.index.prefixes import HostAdmission, Match, Prefixes
from hiserve.cache.index.radix import RadixTree
from hiserve.cache.index.reports import PrefixCacheStats, Tier, TierListener, outline
from hiserve.cache.index.store_prefixes import StorePrefixes
from hiserve.cache.index.store_sync import RunOp, StoreSync
from hiserve.cache.index.tail_pool import NO_TAILS, TailMemory, TailPool, TailSizes
from hiserve.cache.index.tail_uploads import TailUploads
from hiserve.cache.index.tails import TailTiers, UploadedTails
from hiserve.cache.index.tier_pages import TierPages
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import SubtreeRemoval, TransferOps
from hiserve.cache.index.transfers import MANY_COPIES, Transfers
from hiserve.cache.index.uploads import Uploads
from hiserve.config.caching import EvictionOrder
from hiserve.core.digest import Chain, chain
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import DEVICE_KINDS, NO_PAGES, CopyKind, PageCopy, PageRun
from hiserve.ipc.cache_stats import NodeFacts, WindowStats

# All that the rest of the package may name of the index.
__all__ = [
    "PADDING_PAGE",
    "HostAdmission",
    "Match",
    "Miss",
    "MissReason",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixLock",
    "RunOp",
    "Tail",
    "Tier",
    "TierListener",
    "TailPool",
    "TailSizes",
]


class PrefixCache:
    """Which page of which tier holds which prefix. Integers only, one thread.

    It copies nothing: ``begin_*`` returns orders, ``complete`` ends them. A returned digest, page number or count is valid
    until the next operation that changes the index, unless the docstring says otherwise.

        prefixes    match, lock, insert, keep_tail, release, retain, ensure_backed, explain
        pages       allocate, free; ``windows`` and ``snapshots`` (``TailPool``), ``tails`` (``TailTiers``)
        host        begin_load, begin_offloads, complete
        store       ``store`` (``StorePrefixes``), complete
        lifecycle   recover, grow_host, begin_after, expire, flush
        reports     stats, outline, take_events, take_freed_host_pages; ``host_times`` (``HostTimes``)

    Args:
        num_pages: Pages in the device pool, the padding page included.
        page_size: Tokens per page.
        namespace: Digest of everything that separates caches, except the tenant.
        eviction: Order in which each tier evicts unlocked leaves.
        num_host_pages: Pages in the host pool, page 0 included; 0 without a host tier.
        num_ready_host_pages: Usable pages are below this; default: all. See ``grow_host``.
        host_admission: Which pages are offloaded.
        tails: The memory of tails: with any, only boundaries with a tail can be resumed at.
        max_upload_pages: Most host pages locked by uploads to a store; 0 without a store.
        listener: Called with every change of the readable pages of each tier.
        link: Computes the digests of pages (``core.digest.chain_of``).

    Attributes:
        page_owner: int32 ``[num_pages]``, live. Number of each page's last allocation; see ``PageAllocator.owner``.
        store: The operations that concern a store.
        windows, snapshots: The pages of window layers, and the slots of snapshots; None without them.
        tails: Those of both tiers; None where each boundary is a resume point.
        host_times: The host pages retained since they were taken. Take them after the orders of the same plan: the pool
            records them once it has begun its copies.
        num_arrived: By kind, LOAD and OFFLOAD, live: pages made findable by ended copies.

    The parts (``tree`` to ``uploads``) are for tests: no other package reads them (``tests/test_architecture.py``).
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
        tails: TailSizes = NO_TAILS,
        max_upload_pages: int = 0,
        listener: TierListener | None = None,
        link: Chain = chain,
    ) -> None:
        self.page_size, self.namespace = page_size, namespace
        self._listener, self._has_host = listener, num_host_pages > 0
        self.tree = RadixTree(page_size, link)
        self.device = TierPages[Node](Tier.DEVICE, num_pages, Eviction(eviction, ON_DEVICE), listener=listener)
        ready = num_ready_host_pages if num_host_pages else 1  # page 0 alone: none to allocate
        self.host = TierPages[Node | Tail](
            Tier.HOST, max(num_host_pages, 2), Eviction(eviction, ON_HOST), ready, listener
        )
        self.tiers = CacheTiers(self.tree, self.device, self.host, has_host=self._has_host)
        self.locks = Locks(self.tiers)
        self.ops = TransferOps(self.tiers)
        tiers, locks, ops = self.tiers, self.locks, self.ops
        self._removal = SubtreeRemoval(tiers, locks, ops)
        self.uploads = Uploads(tiers, locks, ops, max_upload_pages)
        uploads, admits = self.uploads if max_upload_pages else None, host_admission if self._has_host else None
        offloaded, inserted = (uploads, None) if host_admission is HostAdmission.SELECTIVE else (None, uploads)
        stored = UploadedTails.KEPT if inserted else UploadedTails.OFFLOADED if offloaded else UploadedTails.NONE
        memory = TailMemory(tails, page_size, has_host=self._has_host)
        self.windows, self.snapshots, self._tail_pools = memory.windows, memory.snapshots, memory.pools
        self.tails = None if memory.is_empty else TailTiers(tiers, locks, ops, memory, stored)
        self.store_sync = StoreSync(tiers, locks, ops, self.tails)
        self.transfers = Transfers(tiers, locks, ops, self._removal, offloaded, self.tails)
        self._prefixes = Prefixes(namespace, tiers, locks, ops, self.transfers, inserted, admits, self.tails)
        of_tails = None
        if self.tails is not None and uploads is not None:
            of_tails = TailUploads(tiers, locks, ops, memory, self.tails, self.transfers, uploads)
        self.store = StorePrefixes(self._prefixes, self.host, self.store_sync, self.uploads, of_tails)
        self.page_owner, self.num_arrived = self.device.pages.owner, self.transfers.num_arrived
        self.host_times = self.tiers.retention.host_times

    # --- prefixes -------------------------------------------------------------------------

    def match(self, tenant: bytes, key: bytes) -> Match:
        """Finds the longest cached prefix that a prompt can be resumed behind, leaving at least its last token to compute.

        Changes nothing. The result is valid until the tree changes in a way that matters (``Match.tree_epoch``).

        Args:
            tenant: Of the prompt; tenants do not share pages.
            key: The whole prompt, packed int32.
        """
        return self._prefixes.match(tenant, key)

    def lock(
        self, match: Match, num_host_tokens: int = 0, priority: int = 0, account: bytes | None = None
    ) -> PrefixLock:
        """Locks a matched prefix on every tier until ``release``, and counts as a use of it.

        It stays valid across splits, loads and evictions. ``flush`` keeps its pages; a failed load shortens it (``complete``).

        Args:
            match: Of the present ``tree_epoch``.
            num_host_tokens: Tokens of the host part to lock too, in whole pages; load them before the first insert.
            priority: Of the request; its pages keep it, for the eviction order ``priority``.
            account: Charged for the pages (see ``TenantShares``); None is the tenant's own.
        """
        return self._prefixes.lock(match, num_host_tokens, priority, account)

    def release(self, lock: PrefixLock) -> None:
        """Returns a lock, exactly once. Its pages stay cached, and may be evicted."""
        self._prefixes.release(lock)

    def retain(self, lock: PrefixLock, num_tokens: int, until_s: int) -> None:
        """Lets the whole pages of the first tokens of a locked prefix be evicted after all others, until ``expire``.

        An account may retain a quarter of the host, or of the device without a host; more is counted and not retained. The
        last tail among them is retained too; with a host, its frames count.
        """
        self._prefixes.retain(lock, num_tokens, until_s)

    def ensure_backed(self, lock: PrefixLock) -> None:
        """Queues a locked prefix for offload under any host admission, before the device evicts it."""
        if self._has_host:
            self.transfers.enqueue(lock.node)

    def insert(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int = 0) -> Int32Array:
        """Makes computed full pages findable below a locked prefix, and moves the lock to their end.

        Where the device already has the same tokens, the caller's pages are freed and the tree's pages are used instead:
        a relocation of a live request. Where the host alone has them, the caller's pages become their copy on the device.

        Args:
            lock: On the prefix before ``key``; extended to the end of ``key``.
            key: Packed tokens of the new pages.
            pages: int32 ``[p]``. Owned by the caller until this call, immutable after it.
            step: The step whose forward writes the last of them.

        Returns:
            int32 ``[q]``. The pages to use while the lock is held; ``pages`` itself when none moved. ``q < p`` only while
            the next page is being loaded: the caller keeps the rest, to insert it later.
        """
        return self._prefixes.insert(lock, key, pages, step)

    def keep_tail(self, lock: PrefixLock, num_behind: int, pages: Int32Array, slots: Int32Array = NO_PAGES) -> Tail:
        """Makes a boundary of a locked prefix a resume point, until the pages are needed or the history before it leaves.

        Args:
            lock: Its prefix includes the boundary.
            num_behind: Pages of the prefix behind it.
            pages: int32 ``[n]``. The window pages before it, held by the caller; immutable, and the tail holds them too.
            slots: int32 ``[1]``. The slot of its snapshot, likewise; empty of a model without snapshots.

        Returns:
            The tail; the one that the boundary had, if any, which counts as used. A new one with a snapshot is provisional.
        """
        return self._prefixes.keep_tail(lock, num_behind, pages, slots)

    def explain(self, tenant: bytes, key: bytes, num_used: int, *, is_in_store: bool = False) -> Miss:
        """Returns the reason why only ``num_used`` tokens of a prompt were taken from the cache. Changes nothing.

        Args:
            tenant: Of the prompt.
            key: The whole prompt, packed.
            num_used: Tokens taken from the cache.
            is_in_store: A store has, or may have, the page after the cached ones.
        """
        return explain(
            self.tree,
            self._prefixes.root(tenant),
            self._prefixes.usable(key),
            num_used=num_used,
            num_resumable=None if self.tails is None else self._prefixes.num_resumable(tenant, key),
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
        """Takes one device page per entry of ``wanted`` (see ``PageAllocator.allocate``), and evicts leaves for them.

        Returns:
            int32 ``[n]`` pages, owned by the caller until ``free`` or ``insert``; None, and nothing evicted, when free and
            evictable pages do not suffice.
        """
        return self.tiers.allocate(wanted)

    def free(self, pages: Int32Array) -> None:
        """Returns device pages that were allocated and never inserted; forwards in flight may still touch them."""
        self.tiers.free(pages)

    @property
    def relocation_version(self) -> int:
        """Grows when a page of a live request moves: its page table is then stale."""
        return self.tiers.relocation_version

    # --- device and host ------------------------------------------------------------------

    def begin_load(
        self, lock: PrefixLock, pages: Int32Array, window_pages: Int32Array = NO_PAGES, slots: Int32Array = NO_PAGES
    ) -> PageCopy:
        """Begins to load the host part of a lock, its tail included; later matches find it on the device.

        Args:
            lock: With a host part; waits for the load (``lock.ops``) until ``complete``.
            pages: int32 ``[h]``. One for each of ``lock.host_pages``, allocated by the caller; owned by the cache after this.
            window_pages: int32 ``[w]``. From ``tails.allocate(lock.tail)``, each held once by the caller; likewise.
            slots: int32 ``[s]``. Likewise.
        """
        return self.transfers.begin_load(lock, pages, window_pages, slots)

    @property
    def has_offloads(self) -> bool:
        """Whether ``begin_offloads`` has anything to do."""
        return self.transfers.has_offloads

    @property
    def offload_backlog(self) -> tuple[int, int]:
        """Nodes that wait for their offload, and pages to offload because the device will evict them soon."""
        return self.transfers.num_to_offload, self.transfers.num_to_save

    def begin_offloads(
        self, max_pages: int, max_copies: int = MANY_COPIES, is_worth: Callable[[int], bool] | None = None
    ) -> list[PageCopy]:
        """Begins offloads: first of the next pages to evict from the device, then, while host pages are free, of new pages.

        New pages are offloaded in the order of insertion, parents before children; on a full host, only when they are
        among the next to evict. Both copies stay until ``complete``. Call it once per step.

        Args:
            max_pages: Most pages of all copies together.
            max_copies: Most orders; a few of tails may come on top.
            is_worth: Whether loading that many pages is faster than computing them; others are evicted without an
                offload. None is always.
        """
        return self.transfers.begin_offloads(max_pages, max_copies, is_worth)

    def complete(self, op: int, *, ok: bool, num_pages: int = 0) -> list[PrefixLock]:
        """Ends a copy of any kind, each exactly once: it no longer reads or writes any page.

        Pages that arrived can be matched; pages of a failed load leave the cache.

        Args:
            op: ``PageCopy.op`` or ``RunOp.op``.
            ok: Whether all bytes arrived.
            num_pages: Leading pages of a PREFETCH that arrived, and the frames of its tail, if this arrived behind them.

        Returns:
            The locks that lost pages by a failed load. Their rows must be computed again from the end of ``lock.pages``.
        """
        kind = self.ops[op].kind
        if kind in DEVICE_KINDS:
            return self.transfers.complete(op, ok=ok)
        if kind is CopyKind.PREFETCH:
            self.store_sync.end_prefetch(op, num_pages)
        else:
            self.store.end_upload(op, is_stage=kind is CopyKind.STAGE, ok=ok)
        return []

    def copies_in_flight(self) -> list[int]:
        """Returns the numbers of the copies that have not ended."""
        return [op.number for op in self.ops]

    # --- lifecycle ------------------------------------------------------------------------

    def recover(self, runs: Iterable[PageRun]) -> int:
        """Inserts host pages of a former process; returns how many.

        Args:
            runs: Parents first; their pages are ready and free. Pages without a parent, or cached already, are freed.
        """
        return self.store_sync.recover(runs)

    def grow_host(self, num_ready_pages: int) -> None:
        """Makes the host pages below ``num_ready_pages`` usable; a smaller number than before has no effect."""
        if num_ready_pages > self.host.pages.num_ready:
            self.host.pages.grow(num_ready_pages)

    def begin_after(self, step_id: int) -> None:
        """Records that a step was planned: its forward may still touch every page in use now."""
        self.tiers.clock = max(self.tiers.clock, step_id << STEP_SHIFT)
        for pool in self._tail_pools:
            pool.step = step_id

    @property
    def is_retaining(self) -> bool:
        """Whether anything may be retained, so that ``expire`` is to be called."""
        return len(self.tiers.retention.ends) > 0

    def expire(self, now_s: int) -> None:
        """Ends what is retained until ``now_s`` or earlier, by any clock that ``retain`` has its times from."""
        self.tiers.retention.expire(now_s)
        if self.tails is not None:
            self.tails.expire(now_s)

    def flush(self, tier: Tier | None = None) -> int:
        """Empties a tier, or both, except locked pages; returns how many pages became free at once.

        Pages that copies use become free when the copies end.
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
            windows=WindowStats() if self.windows is None else self.windows.stats(),
            snapshots=WindowStats() if self.snapshots is None else self.snapshots.stats(),
            num_begun=self.ops.num_begun,
            num_in_flight=self.ops.num_in_flight,
            num_unbacked=self.tiers.num_unbacked,
            num_retained=sum(self.tiers.retention.quota.held.values()),
            num_not_retained=self.tiers.retention.quota.num_ignored,
            num_without_room=self.transfers.num_without_room + (self.tails.num_without_room if self.tails else 0),
            num_not_uploaded=self.store.num_not_uploaded,
            num_prefetches_wanted=self.store_sync.num_wanted,
            num_prefetched=self.store_sync.num_prefetched,
            not_prefetched=self.store_sync.unfulfilled,
        )

    def outline(self, depth: int) -> list[NodeFacts]:
        """Returns the roots and ``depth`` levels of nodes below them, of each level the latest used. Changes nothing."""
        return outline(self.tree, depth)

    def take_events(self, tier: Tier = Tier.DEVICE) -> tuple[bytes, bytes]:
        """Returns (published, removed) page digests of a tier since the last call, 16 bytes each."""
        return (self.device if tier is Tier.DEVICE else self.host).events.take()

    def take_freed_host_pages(self) -> Int32Array:
        """Returns the host pages freed since the last call; the pool must free them before it starts later copies."""
        freed, self.tiers.freed_host = self.tiers.freed_host, []
        return np.concatenate(freed) if freed else NO_PAGES
