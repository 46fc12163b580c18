"""Cache statistics of a worker: counters in every report, and the radix tree on request."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["device", "host", "store"]
LOCAL_TIERS: tuple[TierName, ...] = ("device", "host")  # those of one worker alone


class TierStats(msgspec.Struct, frozen=True):
    """The pages of one tier."""

    num_pages: int = 0  # usable pages; on the host they grow while its memory is prepared
    num_free: int = 0  # of them, free ones
    num_evictable: int = 0  # of them, those that eviction could free
    num_evicted: int = 0  # freed by eviction so far


class WindowStats(TierStats, frozen=True):
    """The pages of layers with a window, or the slots of snapshots: evictable ones are held by tails alone."""

    num_tails: int = 0  # boundaries that keep their window pages, or their snapshots
    num_evicted_tails: int = 0  # tails that gave them to requests


class CopyStats(msgspec.Struct, frozen=True):
    """Copies of one kind, in pages. Always ``num_wanted == num_fulfilled + sum(unfulfilled) + num_in_flight``."""

    num_wanted: int = 0  # hits of a load or a prefetch; pages selected for an offload or an upload
    num_fulfilled: int = 0  # of them, those that arrived
    num_in_flight: int = 0  # of them, those being copied
    unfulfilled: dict[str, int] = {}  # the others, by reason
    num_bytes: int = 0
    seconds: float = 0.0  # time of the copies, without waits


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a store, and the operations of one process on it since it was opened.

    All counts are of pages; a tail, which the store keeps as one object, is one of them.
    """

    num_pages: int = 0  # present now, as far as this process knows; other processes may share the store
    num_bytes: int = 0  # their size
    num_hits: int = 0  # returned by ``get``
    num_misses: int = 0  # requested from ``get`` and not returned
    num_stored: int = 0  # written by ``put``
    num_refused: int = 0  # given to ``put``, not present before, and not written
    num_evicted: int = 0  # removed to stay within the cap
    num_corrupt: int = 0  # removed because they were truncated, damaged or of another key
    num_errors: int = 0  # reads, writes and removals that failed (of operations, not of pages)
    num_timeouts: int = 0  # of these, those that took too long
    num_paused: int = 0  # calls that were not made, because those before failed
    last_error: str = ""  # text of the last error; empty without one


class CacheStats(msgspec.Struct, frozen=True):
    """The cache of one worker. All but the tiers' pages and copies in flight are counters, which never decrease."""

    device: TierStats = TierStats()  # pages on the device
    host: TierStats = TierStats()  # pages on the host; all 0 without a host tier
    store: StoreStats | None = None  # None without a store
    loads: CopyStats = CopyStats()  # from host to device
    offloads: CopyStats = CopyStats()  # from device to host
    prefetches: CopyStats = CopyStats()  # from a store to the host
    uploads: CopyStats = CopyStats()  # from the host to a store
    cached_tokens: dict[str, int] = {}  # prompt tokens that were not computed, by the tier that had them
    misses: dict[str, int] = {}  # requests by the reason why no more of their prompts was cached
    num_unbacked: int = 0  # pages evicted from the device that were on no other tier
    num_retained: int = 0  # gauge: pages that are evicted after all others, as their requests asked
    num_not_retained: int = 0  # pages that were not, because their caller had its quota
    windows: WindowStats = WindowStats()  # all 0 where layers with a window share the pages of the others
    snapshots: WindowStats = WindowStats()  # slots of snapshots; all 0 of a model without recurrent states


class NodeFacts(msgspec.Struct, frozen=True):
    """A node of the radix tree, without its tokens, which are a user's text."""

    digest: str  # first half of the chain digest of its last page, for a root that of its namespace; hex
    parent: str  # the parent's; empty for a root
    depth: int  # nodes above it
    num_tokens: int  # tokens beyond its parent's prefix
    # Location of its pages: D on the device, H on the host, DH on both, DW on the device and being copied to the
    # host, HL on the host and being loaded to the device, L only being loaded; empty for a root
    state: str
    num_locks: int  # locks on it or on a descendant, on the device
    num_host_locks: int  # likewise on the host
    last_step: int  # number of the latest planned step at its last use
    num_children: int  # its children, shown or not


class TreeFacts(msgspec.Struct, frozen=True):
    """The upper levels of one worker's radix tree."""

    replica: int
    incarnation: int
    nodes: list[NodeFacts]  # parents first; within a level, the latest used first
