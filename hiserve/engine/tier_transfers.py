"""The tiers below the device, for the executor: their start on each device, and the copies that plans order."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.prefault import CudaRegistrar, Registrar
from hiserve.cache.storage.segment import Segment
from hiserve.cache.storage.shard_store import ShardStore
from hiserve.cache.storage.store_address import open_store
from hiserve.cache.storage.store_transfers import StoreTransfers
from hiserve.cache.storage.transfer import TransferEngine
from hiserve.config.settings import Settings
from hiserve.core.digest import chain_of
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.plan import BatchPlan
from hiserve.core.transfers import DEVICE_KINDS, CopyAck, CopyKind, StoreEnds
from hiserve.ipc.cache_stats import StoreStats
from hiserve.runners.gate import PendingLoads

MAX_FAILED = 1024  # loads whose failure is remembered: more than plans can be submitted that still wait for one
# The transfer engine of each device: module and class. That of CUDA needs Triton.
_ENGINES = {
    "cpu": ("hiserve.cache.storage.transfer", "ThreadTransfers"),
    "cuda": ("hiserve.cache.storage.cuda_transfer", "CudaTransfers"),
}
# Offloads come last of all copies: those queued beyond this are dropped, and counted. Between the least and the most it
# is a share of the device pool: pages that are being offloaded are locked, so that this bounds the pages that eviction
# cannot take. The most holds the output of a few prefill steps, 0.94 GB each on an H200 with a model of 0.6B; the least
# has room for a long copy where the pool is small.
_LEAST_QUEUED_STORE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
_MAX_QUEUED_STORE_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
_QUEUED_SHARE = 8  # one in so many bytes of the pool
_QUEUED_SNAPSHOTS = 8  # however large: each is an order of its own
_LINGER_S = 1.5  # for checksums at the end, where pages outlive the server; a supervisor waits longer
_MAX_STORE_BYTES_PER_S = {"cpu": 4e9, "cuda": 20e9}


def make_registrar(device: str) -> Registrar | None:
    """Returns the registrar that pins host memory for a device, ``cpu`` or ``cuda``; None for a CPU."""
    return CudaRegistrar(torch.cuda.current_device()) if device == "cuda" else None


def make_host_pool(settings: Settings, segment: Segment, groups: Sequence[CacheGroupSpec]) -> HostPool:
    """Returns the pool of the pages in a segment, of these groups."""
    assert segment.layout.namespace == settings.cache_identity.namespace, "the segment of another identity"
    link = chain_of(is_strong=settings.cache.store is not None)
    registrar = make_registrar(settings.model.device)
    return HostPool(segment, groups, registrar=registrar, verify=settings.cache.cache_verify, link=link)


def make_transfers(device: str, pool: DevicePool, host: HostPool) -> TransferEngine:
    """Returns the engine between both pools; close it before them.

    Args:
        device: ``cpu`` or ``cuda``; there the current device is that of the pool.
        pool: On the device.
        host: With the registrar of the device.
    """
    module, name = _ENGINES[device]
    make = getattr(importlib.import_module(module), name)
    engine: TransferEngine = make(
        pool,
        host,
        max_queued_bytes=max(_max_queued_bytes(device, pool), _QUEUED_SNAPSHOTS * host.snapshot_image.num_bytes),
        max_offload_bytes_per_s=_MAX_STORE_BYTES_PER_S[device],
    )
    return engine


def open_beyond(settings: Settings, host: HostPool, transfers: TransferEngine, rank: int = 0) -> StoreTransfers | None:
    """Opens the store beyond the host, of a rank of a group its share of it; None without one. Close it before both.

    Raises:
        ConfigError: As ``open_store``.
    """
    store, size = open_store(settings.cache), settings.parallel.tp
    if store is None:
        return None
    return StoreTransfers(store if size == 1 else ShardStore(store, rank, size), host, wake=transfers.wake)


def linger_s(settings: Settings) -> float:
    """Returns how long ``TierTransfers.close`` may wait."""
    return 0.0 if settings.cache.host_cache_name is None else _LINGER_S


def _max_queued_bytes(device: str, pool: DevicePool) -> int:
    share = pool.num_bytes // _QUEUED_SHARE
    return max(_LEAST_QUEUED_STORE_BYTES[device], min(_MAX_QUEUED_STORE_BYTES[device], share))


class TierTransfers:
    """The lower tiers, as the executor sees them.

    Args:
        linger_s: Seconds that ``close`` may wait for checksums of host pages: a page without one is not recovered.
    """

    def __init__(
        self, transfers: TransferEngine, host: HostPool, store: StoreTransfers | None = None, *, linger_s: float = 0.0
    ) -> None:
        self._transfers = transfers
        self._host = host
        self._store = store
        self._linger_s = linger_s
        self._open_loads: set[int] = set()
        self._failed_loads: deque[int] = deque(maxlen=MAX_FAILED)
        self._last_load = 0

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this may be copied to and from; it grows while their memory is made ready."""
        return self._host.num_ready_pages

    @property
    def loads(self) -> PendingLoads:
        """How loads stand now."""
        return PendingLoads(self._open_loads, self._failed_loads, self._last_load)

    def start(self, plan: BatchPlan) -> None:
        """Frees the host pages that a plan releases, then starts its copies. Pinning yields to the step."""
        self._host.prefault.throttle.step()
        if plan.host_release.size:
            self._host.free(plan.host_release)
        for copy in plan.copies:
            if copy.kind is CopyKind.LOAD:
                self._open_loads.add(copy.op)
                self._last_load = copy.op
            if copy.kind in DEVICE_KINDS:
                self._transfers.start(copy, by_layer=copy.op in plan.waits)
            else:
                assert self._store is not None, f"copy {copy.op} without a store"
                self._store.start(copy)
        if plan.host_retained.size:  # a copy that begins forgets the retention of its pages
            self._host.retain(plan.host_retained, plan.host_retained_until_s)
        for lookup in plan.lookups:
            assert self._store is not None, f"lookup of request {lookup.uid} without a store"
            self._store.look_up(lookup)

    def wait(self, loads: tuple[int, ...], layer: int | None = None) -> None:
        """Makes the next launch wait for loads that were started, or for their part of one layer."""
        for op in loads:
            self._transfers.wait(op, layer)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within, the caller launches a forward, and offloads pause; they go on however it ends."""
        self._transfers.launch_begins()
        try:
            yield
        finally:
            self._transfers.launch_ends()

    def forward_done(self, step_id: int) -> None:
        """Records that the step's forward has ended, or, on a stream device, was launched."""
        self._transfers.forward_done(step_id)

    def take_acks(self, wait_s: float) -> list[CopyAck]:
        """Returns the copies that have ended since the last call; waits up to ``wait_s`` seconds for one."""
        ended = [] if self._store is None else self._store.poll()
        acks = self._transfers.poll(0.0 if ended else wait_s)
        for ack in acks:
            if ack.op in self._open_loads:
                if not ack.is_ok:
                    self._failed_loads.append(ack.op)
                self._open_loads.discard(ack.op)
        return acks + ended

    def take_found(self) -> list[StoreEnds]:
        """Returns the answers to lookups since the last call."""
        return [] if self._store is None else self._store.take_found()

    def store_stats(self) -> StoreStats | None:
        """Returns the store's counts; None without one."""
        return None if self._store is None else self._store.stats()

    def clear_store(self) -> None:
        """Begins to empty the store."""
        assert self._store is not None, "there is no store to empty"
        self._store.clear()

    def close(self) -> None:
        """Ends the copies and frees all resources."""
        self._transfers.close()
        if self._store is not None:
            self._store.close()
        self._host.wait_checksums(self._linger_s)
        self._host.close()
