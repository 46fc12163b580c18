"""Cache statistics of a worker: counters in every report, and the radix tree on request."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["device", "host", "store"]
LOCAL_TIERS: tuple[TierName, ...] = ("device", "host")  # those of one worker alone


class TierStats(msgspec.Struct, frozen=True):
    """The pages of one tier.

    Attributes:
        num_pages: Usable pages; on the host they grow while its memory is prepared.
        num_free: Of them, empty ones.
        num_evictable: Of them, those that eviction could free.
        num_evicted: Freed by eviction so far.
    """

    num_pages: int = 0
    num_free: int = 0
    num_evictable: int = 0
    num_evicted: int = 0


class CopyStats(msgspec.Struct, frozen=True):
    """Copies of one kind, in pages. Always ``num_wanted == num_fulfilled + sum(unfulfilled) + num_in_flight``.

    Attributes:
        num_wanted: Hits of a load or a prefetch; pages selected for an offload or an upload.
        num_fulfilled: Of them, those that arrived.
        num_in_flight: Of them, those being copied.
        unfulfilled: The others, by reason.
        num_bytes: Copied.
        seconds: Time of the copies, without waits.
    """

    num_wanted: int = 0
    num_fulfilled: int = 0
    num_in_flight: int = 0
    unfulfilled: dict[str, int] = {}
    num_bytes: int = 0
    seconds: float = 0.0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a store, and the operations of one process on it since it was opened. All counts are of pages.

    Attributes:
        num_pages: Present now, as far as this process knows; other processes may share the store.
        num_bytes: Their size.
        num_hits: Returned by ``get``.
        num_misses: Requested from ``get`` and not returned.
        num_stored: Written by ``put``.
        num_refused: Given to ``put``, not present before, and not written.
        num_evicted: Removed to stay within the cap.
        num_corrupt: Removed because they were truncated, damaged or of another key.
        num_errors: Reads, writes and removals that failed (of operations, not of pages).
        last_error: Text of the last of them; empty without one.
    """

    num_pages: int = 0
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_refused: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    last_error: str = ""


class CacheStats(msgspec.Struct, frozen=True):
    """The cache of one worker. All but the tiers' pages and copies in flight are counters, which never decrease.

    Attributes:
        device: Pages on the device.
        host: Pages on the host; all 0 without a host tier.
        store: None without a store.
        loads: From host to device.
        stores: From device to host.
        prefetches: From a store to the host.
        uploads: From the host to a store.
        cached_tokens: Prompt tokens that were not computed, by the tier that had them.
        misses: Requests by the reason why no more of their prompts was cached.
        num_unbacked: Pages evicted from the device that were on no other tier.
    """

    device: TierStats = TierStats()
    host: TierStats = TierStats()
    store: StoreStats | None = None
    loads: CopyStats = CopyStats()
    stores: CopyStats = CopyStats()
    prefetches: CopyStats = CopyStats()
    uploads: CopyStats = CopyStats()
    cached_tokens: dict[str, int] = {}
    misses: dict[str, int] = {}
    num_unbacked: int = 0


class NodeFacts(msgspec.Struct, frozen=True):
    """A node of the radix tree, without its tokens, which are a user's text.

    Attributes:
        digest: First half of the chain digest of its last page, for a root that of its namespace; hex.
        parent: The parent's; empty for a root.
        depth: Nodes above it.
        num_tokens: Tokens beyond its parent's prefix.
        state: Location of its pages: D on the device, H on the host, DH on both, DW on the device and being copied to
            the host, HL on the host and being loaded to the device, L only being loaded; empty for a root.
        num_locks: Locks on it or on a descendant, on the device.
        num_host_locks: The same on the host.
        last_step: Number of the last step when it was last used.
        num_children: Its children, shown or not.
    """

    digest: str
    parent: str
    depth: int
    num_tokens: int
    state: str
    num_locks: int
    num_host_locks: int
    last_step: int
    num_children: int


class TreeFacts(msgspec.Struct, frozen=True):
    """The upper levels of one worker's radix tree.

    Attributes:
        replica: Index of the worker, from 0.
        incarnation: Number of the worker process.
        nodes: Parents first; within a level, the latest used first.
    """

    replica: int
    incarnation: int
    nodes: list[NodeFacts]
