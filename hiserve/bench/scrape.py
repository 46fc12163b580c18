"""The counters of a server, before and after a run: ``/metrics`` and ``/cache/stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hiserve.bench.http import Pool
from hiserve.ipc.cache_stats import CopyStats

HIDDEN = b"# What tells of requests is shown"  # the first words of our reply to a key that may not see them
Series = dict[str, float]
# Names of the label that holds the tokens of a page: ours and SGLang's, vLLM's.
PAGE_SIZE_LABELS = ("page_size", "block_size")
KINDS = ("loads", "offloads", "prefetches", "uploads")
PATH = "/cache/stats"


async def scrape(pool: Pool) -> bytes:
    """Returns the metrics as text; empty when the server has none, or shows this key none about requests.

    Raises UnavailableError.
    """
    status, body = await pool.read("GET", "/metrics")
    return body if status == 200 and not body.startswith(HIDDEN) else b""


def page_size_of(text: bytes) -> int | None:
    """Returns the tokens per page in a server's ``cache_config_info``, or None."""
    for name, labels, _ in _samples(text):
        if name.endswith("cache_config_info"):
            for label in PAGE_SIZE_LABELS:
                if labels.get(label, "").isdigit():
                    return int(labels[label])
    return None


def increases(before: bytes, after: bytes) -> Series:
    """Returns by how much each counter grew, by its name and labels; those that did not are left out.

    A counter is what ends with ``_total``, ``_sum`` or ``_count``. One that fell was restarted and counts from 0.
    """
    old = _counters(before)
    grown = {}
    for series, value in _counters(after).items():
        past = old.get(series, 0.0)
        grown[series] = value - past if value >= past else value
    return {series: value for series, value in grown.items() if value}


def total(series: Series, name: str, **labels: str) -> float | None:
    """Sums the series of a metric (named without the engine's prefix) that have these labels; None when there are none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [
        value
        for key, value in series.items()
        if key.partition("{")[0].rpartition(":")[2] == name and all(text in key for text in wanted)
    ]
    return sum(found) if found else None


def _counters(text: bytes) -> Series:
    """Returns the counters by name and labels; the model's name, which all of them share, is left out."""
    found: Series = {}
    for name, labels, value in _samples(text):
        if name.endswith(("_total", "_sum", "_count")):
            shown = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels) if label != "model_name")
            found[f"{name}{{{shown}}}"] = value
    return found


def _samples(text: bytes) -> list[tuple[str, Mapping[str, str], float]]:
    """Parses Prometheus' text format; what is none has no samples."""
    with suppress(ValueError):
        families = text_string_to_metric_families(text.decode(errors="replace"))
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
    return []


class ReplicaCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in ``/cache/stats``; fields that a server lacks are empty. ``misses`` are requests by reason."""

    replica: int = 0
    incarnation: int = 0
    tiers: dict[str, dict[str, Any] | None] = {}
    loads: CopyStats = CopyStats()
    offloads: CopyStats = CopyStats()
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
    parts: list[CopyStats] = [getattr(replica, kind) for replica in replicas]
    unfulfilled: Counter[str] = Counter()
    for copies in parts:
        unfulfilled.update(copies.unfulfilled)
    return CopyStats(
        num_wanted=sum(copies.num_wanted for copies in parts),
        num_fulfilled=sum(copies.num_fulfilled for copies in parts),
        num_in_flight=sum(copies.num_in_flight for copies in parts),
        unfulfilled=dict(unfulfilled),
        num_bytes=sum(copies.num_bytes for copies in parts),
        seconds=sum(copies.seconds for copies in parts),
    )


async def read_caches(pool: Pool) -> CacheStatsReply | str:
    """Returns the server's cache statistics, or the reason why they are unknown. Raises UnavailableError."""
    status, body = await pool.read("GET", PATH)
    if status != 200:
        return f"{PATH} answered {status}"
    try:
        return msgspec.json.decode(body, type=CacheStatsReply, strict=False)
    except msgspec.DecodeError as error:
        return f"{PATH} is not as hiserve words it: {error}"


def copied(before: CacheStatsReply, after: CacheStatsReply) -> dict[str, CopyCounts]:
    """Returns the copies between two readings; of a worker that was started between them, those since its start."""
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
