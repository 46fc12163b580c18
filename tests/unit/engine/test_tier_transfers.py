"""The copier tells the gate how loads stand; which engine copies for each device; a store's answer ends the wait of an idle engine."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hiserve.cache.storage.store_transfers import StoreTransfers
from hiserve.core.transfers import CopyKind, PageCopy, StoreLookup
from hiserve.engine import tier_transfers
from hiserve.engine.tier_transfers import TierTransfers
from tests.helpers.host import make_run
from tests.helpers.plans import make_plan
from tests.helpers.sim_store import SimStore
from tests.helpers.transfers import GROUPS, THREAD, TransferBench, ints
from tests.helpers.waiting import PATIENCE_S

BROKEN = 3
GIB = 1 << 30


@pytest.fixture
def may_copy() -> threading.Event:
    return threading.Event()


@pytest.fixture
def bench(may_copy: threading.Event) -> Iterator[TransferBench]:
    def hold(copy: PageCopy) -> str | None:
        may_copy.wait()
        return "broken" if copy.op == BROKEN else None

    bench = TransferBench(THREAD, hold=hold)
    yield bench
    may_copy.set()
    bench.close()


@pytest.fixture
def copier(bench: TransferBench) -> TierTransfers:
    return TierTransfers(bench.engine, bench.host)


def start(copier: TierTransfers, *ops: int, kind: CopyKind = CopyKind.LOAD) -> None:
    run = make_run([1], [101]) if kind is CopyKind.OFFLOAD else None
    copies = tuple(PageCopy(op, kind, ints([op]), ints([1]), 0, run) for op in ops)
    copier.start(replace(make_plan([]), copies=copies))


def test_loads_are_open_from_their_start_until_their_end_is_taken(
    copier: TierTransfers, may_copy: threading.Event
) -> None:
    assert copier.loads.last_started == 0
    start(copier, 1, 2)
    start(copier, BROKEN)
    start(copier, 4, kind=CopyKind.OFFLOAD)
    assert (copier.loads.open, list(copier.loads.failed), copier.loads.last_started) == ({1, 2, BROKEN}, [], BROKEN)
    may_copy.set()
    acks = []
    deadline = time.monotonic() + PATIENCE_S
    while len(acks) < 4:
        assert time.monotonic() < deadline, acks
        acks += copier.take_acks(0.01)
    assert (copier.loads.open, list(copier.loads.failed), copier.loads.last_started) == (set(), [BROKEN], BROKEN)


def test_a_plan_frees_pages_then_begins_its_copies_then_records_until_when_pages_are_retained(
    copier: TierTransfers, bench: TransferBench
) -> None:
    start(copier, 4, kind=CopyKind.OFFLOAD)
    again = PageCopy(5, CopyKind.OFFLOAD, ints([2]), ints([1]), 0, make_run([1], [102]))
    plan = replace(make_plan([]), host_release=ints([1]), copies=(again,))
    copier.start(replace(plan, host_retained=ints([1]), host_retained_until_s=np.array([60])))
    assert bench.host.records.digest(1) == make_run([1], [102]).digests[0]
    assert bench.segment.records["retained_until_s"][1] == 60


def test_each_step_tells_pinning_to_leave_the_device_to_it(copier: TierTransfers, bench: TransferBench) -> None:
    throttle = bench.host.prefault.throttle
    throttle.pinned(1e6)
    assert throttle.pause_s(0) == 0
    start(copier)
    assert throttle.pause_s(0) > 0


def test_an_answer_of_the_store_ends_the_wait_for_copies(bench: TransferBench) -> None:
    """Whoever is not woken here waits for an hour."""
    beyond = StoreTransfers(SimStore(), bench.host, wake=bench.engine.wake)
    copier = TierTransfers(bench.engine, bench.host, beyond)
    assert copier.take_acks(0.0) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(copier.take_acks, 3600.0)
        beyond.look_up(StoreLookup(7, [b"d" * 16]))
        try:
            assert waiting.result(60.0) == []
        finally:
            bench.engine.wake()
    assert copier.take_found() == [(7, ())]
    beyond.close()


@pytest.mark.parametrize(
    ("device", "pool_gib", "queued_gib"), [("cuda", 1, 1), ("cuda", 16, 2), ("cuda", 100, 4), ("cpu", 100, 0.25)]
)
def test_stores_that_wait_lock_an_eighth_of_the_device_pool_or_what_a_long_order_takes(
    monkeypatch: pytest.MonkeyPatch, device: str, pool_gib: int, queued_gib: float
) -> None:
    told: dict[str, Any] = {}

    def make(pool: object, host: object, **options: Any) -> object:
        told.update(options)
        return object()

    monkeypatch.setattr(tier_transfers.importlib, "import_module", lambda name: SimpleNamespace(Engine=make))
    host = SimpleNamespace(snapshot_image=SimpleNamespace(num_bytes=0))
    monkeypatch.setitem(tier_transfers._ENGINES, device, ("anywhere", "Engine"))
    tier_transfers.make_transfers(device, SimpleNamespace(num_bytes=pool_gib * GIB), host)  # type: ignore[arg-type]
    assert told["max_queued_bytes"] == queued_gib * GIB


@pytest.mark.parametrize("device", tier_transfers._ENGINES)
def test_the_engine_of_each_device_exists(device: str) -> None:
    module, name = tier_transfers._ENGINES[device]
    assert callable(getattr(importlib.import_module(module), name))


def test_a_pool_knows_its_bytes() -> None:
    bench = TransferBench(THREAD)
    slots = bench.num_pages * bench.host.layout.page_size
    assert bench.device.num_bytes == slots * sum(group.slot_bytes for group in GROUPS)
    bench.close()
