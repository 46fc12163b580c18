"""What ``hiserve top`` reads from a server, and how fast it grows."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from hiserve.bench.cache.copy_counts import CacheStatsReply, ReplicaCacheStats, sum_copies
from hiserve.bench.scrape import Series, increases, total
from hiserve.errors import UnavailableError
from hiserve.ipc.cache_stats import CopyStats

TIERS = ("device", "host", "store")
# What a replica tells of the store as a whole.
SHARED = ("num_pages", "num_bytes")
# Rates are those of so many seconds.
WINDOW_S = 10.0
_T = TypeVar("_T")


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in ``/server_info``.

    Attributes:
        replica: Index from 0.
        pid: Process id.
        incarnation: Grows with each restart.
        num_pages: KV pages.
        stats: Gauges and counters by name.
    """

    replica: int = 0
    pid: int = 0
    incarnation: int = 0
    num_pages: int = 0
    stats: dict[str, Any] = {}


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """As much of ``/server_info`` as is shown."""

    version: str = ""
    served_model_name: str = ""
    not_ready_because: str | None = None
    engine_error: str | None = None
    num_queued: int = 0
    config: dict[str, dict[str, Any] | None] = {}
    memory_bytes: dict[str, float] = {}
    workers: list[WorkerInfo] = []


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/get_load``."""

    num_reqs: int = 0
    num_waiting_reqs: int = 0
    num_tokens: int = 0


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read at one time; what the server does not show is empty.

    Attributes:
        at_s: When, by ``time.monotonic``.
        info: What ``/server_info`` says, or None.
        load: What ``/get_load`` says.
        caches: What ``/cache/stats`` says.
        counters: Those of ``/metrics``.
        hidden: HTTP status of each path that gave nothing.
    """

    at_s: float
    info: ServerStatus | None
    load: list[WorkerLoad]
    caches: list[ReplicaCacheStats]
    counters: Series
    hidden: dict[str, int]

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers, if the server shows them."""
        return self.info.workers if self.info else []

    def stat(self, name: str) -> float:
        """Sums a gauge or counter of all workers."""
        return sum(number(worker.stats, name) for worker in self.workers)

    def counter(self, name: str, **labels: str) -> float:
        """Sums a counter of ``/metrics``; one that is not there is 0."""
        return total(self.counters, name, **labels) or 0.0

    def tier(self, name: str) -> Mapping[str, float]:
        """Sums the numbers of a tier over all replicas; empty for a tier that is not there.

        What a store holds is not summed: all replicas share it. Without ``/cache/stats``, the device's are those that the workers tell.
        """
        found: dict[str, float] = defaultdict(float)
        for replica in self.caches:
            tier = replica.tiers.get(name) or {}
            for key in tier:
                is_shared = name == "store" and key in SHARED
                found[key] = max(found[key], number(tier, key)) if is_shared else found[key] + number(tier, key)
        if not found and name == "device" and self.workers:
            names = {"num_free": "free_pages", "num_evictable": "evictable_pages", "num_evicted": "evicted_pages"}
            found.update({key: self.stat(stat) for key, stat in names.items()})
            found["num_pages"] = sum(worker.num_pages for worker in self.workers)
        return found

    def copies(self, kind: str) -> CopyStats:
        """Sums the copies of one kind over all replicas."""
        return sum_copies(self.caches, kind)

    def store_errors(self) -> list[str]:
        """Returns the last error that each replica met in the store, if it met any."""
        stores = [replica.tiers.get("store") or {} for replica in self.caches]
        return [error for store in stores if (error := str(store.get("last_error", "")))]

    def verdicts(self, verdict: str) -> Counter[str]:
        """Sums the steps of all workers with this verdict of the gate, by reason."""
        found: Counter[str] = Counter()
        for worker in self.workers:
            found.update(worker.stats.get("graph_gate", {}).get(verdict, {}))
        return found

    def misses(self) -> Counter[str]:
        """Sums the requests that missed over all replicas, by reason."""
        found: Counter[str] = Counter()
        for replica in self.caches:
            found.update(replica.misses)
        return found


class FrameReader:
    """Asks a server.

    Args:
        client: Bound to it, with the key if one is needed.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def read(self) -> Frame:
        """Asks for everything once.

        Raises:
            UnavailableError: The server cannot be reached, or is none of ours.
        """
        hidden: dict[str, int] = {}
        info = self._ask("/server_info", ServerStatus, hidden)
        load = self._ask("/get_load", list[WorkerLoad], hidden)
        caches = self._ask("/cache/stats", CacheStatsReply, hidden)
        metrics = self._get("/metrics")
        if info is None and load is None:
            raise UnavailableError(
                f"{self._client.base_url} shows neither /server_info (status {hidden['/server_info']}) nor /get_load "
                f"({hidden['/get_load']}). Give a key with --api-key-file, or another --url."
            )
        return Frame(
            at_s=time.monotonic(),
            info=info,
            load=load or [],
            caches=caches.replicas if caches else [],
            counters=increases(b"", metrics.content if metrics.status_code == 200 else b""),
            hidden=hidden,
        )

    def _ask(self, path: str, kind: type[_T], hidden: dict[str, int]) -> _T | None:
        answer = self._get(path)
        if answer.status_code == 200:
            try:
                return msgspec.json.decode(answer.content, type=kind, strict=False)
            except msgspec.DecodeError as error:
                raise UnavailableError(
                    f"{path} of {self._client.base_url} is not as hiserve words it: {error}."
                ) from None
        hidden[path] = answer.status_code
        return None

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except httpx.HTTPError as error:
            raise UnavailableError(f"cannot reach the server at {self._client.base_url}: {error}.") from None


class FrameHistory:
    """The frames of the last seconds.

    Attributes:
        newest: The last one.
    """

    def __init__(self, first: Frame) -> None:
        self.newest = first
        self._frames = deque([first])

    def add(self, frame: Frame) -> None:
        """Adds a frame; forgets those that are too old, but for one."""
        self.newest = frame
        self._frames.append(frame)
        while len(self._frames) > 2 and self._frames[1].at_s <= frame.at_s - WINDOW_S:
            self._frames.popleft()

    def growth(self, value: Callable[[Frame], float]) -> float | None:
        """Returns by how much something grew in the last seconds; None with a single frame, 0 when it fell."""
        if len(self._frames) < 2:
            return None
        return max(0.0, value(self.newest) - value(self._frames[0]))

    def rate(self, value: Callable[[Frame], float]) -> float | None:
        """Returns the same per second."""
        grown = self.growth(value)
        return None if grown is None else grown / max(self.newest.at_s - self._frames[0].at_s, 1e-9)


def number(found: dict[str, Any], name: str) -> float:
    """Returns a number by name; 0 when there is none."""
    value = found.get(name)
    return value if isinstance(value, int | float) else 0
