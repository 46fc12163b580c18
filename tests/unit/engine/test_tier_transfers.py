"""The copier tells the gate how loads stand; what a store has to say ends the wait of an idle engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hiserve.cache.storage.sim_store import SimStore
from hiserve.cache.storage.store_transfers import StoreTransfers
from hiserve.core.transfers import CopyKind, PageCopy, StoreLookup
from hiserve.engine.tier_transfers import TierTransfers
from tests.helpers.host import make_run
from tests.helpers.transfers import THREAD, TransferBench, ints
from tests.unit.runners.test_gate import make_plan

BROKEN = 3


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
    deadline = time.monotonic() + 10
    while len(acks) < 4:
        assert time.monotonic() < deadline, acks
        acks += copier.take_acks(0.01)
    assert (copier.loads.open, list(copier.loads.failed), copier.loads.last_started) == (set(), [BROKEN], BROKEN)


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
    assert copier.take_found() == [(7, 0)]
    beyond.close()
