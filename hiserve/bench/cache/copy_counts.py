"""What a server copied between its tiers, by ``/cache/stats`` before and after a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from hiserve.bench.http import Pool
from hiserve.ipc.cache_stats import CopyStats

KINDS = ("loads", "stores", "prefetches", "uploads")
PATH = "/cache/stats"


class ReplicaCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in ``/cache/stats``; fields that a server lacks are empty. ``misses`` are requests by reason."""

    replica: int = 0
    incarnation: int = 0
    tiers: dict[str, dict[str, Any] | None] = {}
    loads: CopyStats = CopyStats()
    stores: CopyStats = CopyStats()
    prefetches: CopyStats = CopyStats()
    uploads: CopyStats = CopyStats()
    misses: dict[str, int] = {}


class CacheStatsReply(msgspec.Struct, frozen=True, kw_only=True):
    """``/cache/stats``."""

    replicas: list[ReplicaCacheStats] = []


class CopyCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of one kind during a run; ``seconds`` leave waits out, and ``unfulfilled`` pages did not arrive, by reason."""

    num_pages: int
    num_bytes: int
    seconds: float
    bytes_per_s: float | None
    unfulfilled: dict[str, int]


def sum_copies(replicas: Sequence[ReplicaCacheStats], kind: str) -> CopyStats:
    """Sums the copies of one of ``KINDS`` over all replicas of a server."""
    told: list[CopyStats] = [getattr(replica, kind) for replica in replicas]
    unfulfilled: Counter[str] = Counter()
    for copies in told:
        unfulfilled.update(copies.unfulfilled)
    return CopyStats(
        num_wanted=sum(copies.num_wanted for copies in told),
        num_fulfilled=sum(copies.num_fulfilled for copies in told),
        num_in_flight=sum(copies.num_in_flight for copies in told),
        unfulfilled=dict(unfulfilled),
        num_bytes=sum(copies.num_bytes for copies in told),
        seconds=sum(copies.seconds for copies in told),
    )


async def read_caches(pool: Pool) -> CacheStatsReply | str:
    """Returns the server's cache statistics, or the reason why they are unknown.

    Raises:
        UnavailableError: The server cannot be reached.
    """
    status, body = await pool.read("GET", PATH)
    if status != 200:
        return f"{PATH} answered {status}"
    try:
        return msgspec.json.decode(body, type=CacheStatsReply, strict=False)
    except msgspec.DecodeError as error:
        return f"{PATH} is not as hiserve words it: {error}"


def copied(before: CacheStatsReply, after: CacheStatsReply) -> dict[str, CopyCounts]:
    """Returns what was copied between two readings; of a worker that began again, since it did."""
    begun = {(each.replica, each.incarnation): each for each in before.replicas}
    found = {}
    for kind in KINDS:
        old = [begun.get((each.replica, each.incarnation), ReplicaCacheStats()) for each in after.replicas]
        found[kind] = _difference(sum_copies(old, kind), sum_copies(after.replicas, kind))
    return found


def _difference(old: CopyStats, new: CopyStats) -> CopyCounts:
    num_bytes, seconds = new.num_bytes - old.num_bytes, new.seconds - old.seconds
    unfulfilled = {reason: count - old.unfulfilled.get(reason, 0) for reason, count in new.unfulfilled.items()}
    return CopyCounts(
        num_pages=new.num_fulfilled - old.num_fulfilled,
        num_bytes=num_bytes,
        seconds=seconds,
        bytes_per_s=num_bytes / seconds if seconds > 0 else None,
        unfulfilled={reason: count for reason, count in unfulfilled.items() if count},
    )
