"""What a worker tells of its cache: counts that travel with every report, and the tree for whoever asks."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["device", "host", "store"]
LOCAL_TIERS: tuple[TierName, ...] = ("device", "host")  # those of one worker alone


class TierStats(msgspec.Struct, frozen=True):
    """The pages of one tier.

    Attributes:
        num_pages: Those that can be used; on the host they grow while its memory is made ready.
        num_free: Of them, those that hold nothing.
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
        num_wanted: Hits of a load or a prefetch; of a store or an upload, pages that were to be kept.
        num_fulfilled: Of them, those that arrived.
        num_in_flight: Of them, those on their way.
        unfulfilled: The others, by reason.
        num_bytes: Copied.
        seconds: Spent on it, waits not included.
    """

    num_wanted: int = 0
    num_fulfilled: int = 0
    num_in_flight: int = 0
    unfulfilled: dict[str, int] = {}
    num_bytes: int = 0
    seconds: float = 0.0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds, and what one process did with it since it was opened. All counts are of pages.

    Attributes:
        num_pages: Held now, as far as this process knows; others may share them.
        num_bytes: They take.
        num_hits: Delivered by ``get``.
        num_misses: Asked of ``get`` and not delivered.
        num_stored: Written by ``put``.
        num_refused: Given to ``put`` and neither written nor there before.
        num_evicted: Removed to stay within the cap.
        num_corrupt: Found short, garbled or of another key, and removed.
        num_errors: Reads, writes and removals that failed (of operations, not of pages).
        last_error: The last of them in words; empty without one.
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
    """The cache of one worker. All but what the tiers hold and what is in flight are counters, which never fall.

    Attributes:
        device: Its pages.
        host: Likewise; all 0 without a host tier.
        store: What lies beyond the host; None without a store.
        loads: From host to device.
        stores: From device to host.
        prefetches: From a store to the host.
        uploads: From the host to a store.
        cached_tokens: Prompt tokens that were not computed, by the tier that had them.
        misses: Requests by the reason why no more of their prompts was cached.
        num_unbacked: Pages evicted from the device that were nowhere else.
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
    """A node of the radix tree, without its tokens: they are a user's text.

    Attributes:
        digest: First half of the chain digest of its last page, of a root that of its namespace; hex.
        parent: The parent's; empty of a root.
        depth: Nodes above it.
        num_tokens: That it adds to its parent's prefix.
        state: Where its pages lie: D on the device, H on the host, DH on both, DW on the device and on the way to the
            host, HL on the host and on the way to the device, L on the way alone; empty of a root.
        num_locks: What holds it, or part of what follows it, on the device.
        num_host_locks: Likewise on the host.
        last_step: The step that was the last when it was used last.
        num_children: Nodes right below it, shown or not.
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
        incarnation: Its life.
        nodes: Parents first, of each level those used last first.
    """

    replica: int
    incarnation: int
    nodes: list[NodeFacts]
