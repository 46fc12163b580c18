"""Copies between tiers: every byte arrives, in the order that the fences and kinds demand; nothing is answered twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.cache.pools.device import DevicePool
from hiserve.cache.pools.host import HostPool
from hiserve.cache.pools.page_layout import PageLayout
from hiserve.cache.pools.records import PageState
from hiserve.cache.pools.segment import Segment
from hiserve.cache.pools.transfer import DROPPED, ThreadTransfers
from hiserve.core.copies import CopyAck, CopyKind, PageCopy
from hiserve.core.groups import CacheGroupSpec
from tests.helpers.host import PAGE_SIZE, make_layout, make_run

NUM_PAGES = 12
GROUPS = (
    CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32"),
    CacheGroupSpec(name="draft", num_layers=1, num_kv_heads=1, head_dim=6, dtype="bfloat16"),
)


class Bench:
    """Both pools, an engine between them, and a hand on the stream."""

    def __init__(self, **options: Any) -> None:
        layout = PageLayout(GROUPS, PAGE_SIZE)
        self.page_bytes = layout.page_bytes
        self.segment = Segment.anonymous(make_layout(NUM_PAGES, layout.page_bytes))
        self.host = HostPool(self.segment, GROUPS, num_threads=1)
        self.host.clear()
        self.device = DevicePool(GROUPS, NUM_PAGES, PAGE_SIZE, "cpu")
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.begun: list[int] = []
        options = {"max_queued_bytes": 1 << 30, "max_store_bytes_per_s": 1e12} | options
        self.engine = ThreadTransfers(self.device, self.host, GROUPS, hold=self._hold, **options)
        generator = torch.Generator().manual_seed(5)
        for plane in self.planes():
            plane.copy_(torch.randn(plane.shape, generator=generator))

    def _hold(self, copy: PageCopy) -> None:
        self.begun.append(copy.op)
        self.may_copy.wait()

    def planes(self) -> Iterator[torch.Tensor]:
        for group in GROUPS:
            for layer in self.device.layers(group.name):
                yield from (layer.k, layer.v)

    def page(self, page: int) -> torch.Tensor:
        return torch.cat(
            [plane[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].float().flatten() for plane in self.planes()]
        )

    def store(self, op: int, device: Sequence[int], host: Sequence[int], after_step: int = 0) -> None:
        run = make_run(host, [100 + page for page in device])
        self.engine.start(PageCopy(op, CopyKind.STORE, ints(device), ints(host), after_step, run))

    def load(self, op: int, device: Sequence[int], host: Sequence[int], after_step: int = 0) -> None:
        self.engine.start(PageCopy(op, CopyKind.LOAD, ints(device), ints(host), after_step))

    def acks(self, count: int) -> list[CopyAck]:
        found: list[CopyAck] = []
        deadline = time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < deadline, f"{found} of {count}"
            found += self.engine.poll()
            time.sleep(0.001)
        return found

    def close(self) -> None:
        self.may_copy.set()
        self.engine.close()
        self.host.close()
        self.segment.close()


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_what_was_stored_and_loaded_elsewhere_is_the_same_bytes(bench: Bench) -> None:
    pages = [bench.page(page).clone() for page in range(NUM_PAGES)]
    bench.store(1, [3, 7, 4], [2, 9, 1])
    (ack,) = bench.acks(1)
    assert (ack.op, ack.reason, ack.num_bytes) == (1, "", 3 * bench.page_bytes)
    bench.load(2, [5, 6, 8], [9, 1, 2])
    assert bench.acks(1)[0].is_ok
    for target, origin in ((5, 7), (6, 4), (8, 3)):
        assert torch.equal(bench.page(target), pages[origin])
    for page in set(range(NUM_PAGES)) - {5, 6, 8}:
        assert torch.equal(bench.page(page), pages[page])


def test_a_stored_page_is_valid_when_its_bytes_have_arrived_and_not_before(bench: Bench) -> None:
    bench.may_copy.clear()
    bench.store(1, [3], [2])
    assert bench.host.records.state(2) == PageState.WRITING
    bench.may_copy.set()
    bench.acks(1)
    assert bench.host.records.state(2) == PageState.VALID
    assert bench.host.wait_checksums(5)
    assert bench.host.verify(2)


def test_loads_overtake_stores_and_each_kind_keeps_its_order(bench: Bench) -> None:
    bench.may_copy.clear()
    bench.store(1, [1], [1])
    while not bench.begun:
        time.sleep(0.001)
    for op, page in ((2, 2), (3, 3)):
        bench.store(op, [page], [page])
    for op in (4, 5):
        bench.load(op, [8 + op % 2], [1])
    bench.may_copy.set()
    assert [ack.op for ack in bench.acks(5)] == [1, 4, 5, 2, 3]


def test_a_copy_waits_for_the_step_that_could_touch_its_pages(bench: Bench) -> None:
    bench.store(1, [1], [1], after_step=7)
    bench.load(2, [4], [5], after_step=6)
    time.sleep(0.05)
    assert bench.begun == []
    bench.engine.forward_done(6)
    assert [ack.op for ack in bench.acks(1)] == [2]
    bench.engine.forward_done(7)
    assert [ack.op for ack in bench.acks(1)] == [1]


def test_stores_are_dropped_while_the_link_is_behind_and_loads_never() -> None:
    bench = Bench(max_queued_bytes=2 * PageLayout(GROUPS, PAGE_SIZE).page_bytes)
    try:
        bench.may_copy.clear()
        bench.store(1, [1, 2], [1, 2])
        bench.store(2, [3], [3])
        for op in range(3, 9):
            bench.load(op, [5], [6])
        assert [(ack.op, ack.reason) for ack in bench.acks(1)] == [(2, DROPPED)]
        assert bench.host.records.state(3) == PageState.FREE
        bench.may_copy.set()
        assert {ack.op for ack in bench.acks(7)} == {1, 3, 4, 5, 6, 7, 8}
        bench.store(9, [3], [3])
        assert bench.acks(1)[0].is_ok
    finally:
        bench.close()


def test_stores_take_no_more_of_the_link_than_they_may() -> None:
    page_bytes = PageLayout(GROUPS, PAGE_SIZE).page_bytes
    bench = Bench(max_store_bytes_per_s=page_bytes / 0.05)  # a page takes 50 ms
    try:
        begin = time.monotonic()
        for op in range(1, 5):
            bench.store(op, [op], [op])
        bench.load(5, [9], [8])
        assert len(bench.acks(5)) == 5
        assert time.monotonic() - begin >= 0.15
        assert bench.begun.index(5) <= 1
    finally:
        bench.close()


def test_a_forward_waits_for_a_load_that_it_reads(bench: Bench) -> None:
    bench.may_copy.clear()
    bench.load(1, [4], [5])
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (bench.engine.wait(1), waited.set()))
    waiter.start()
    assert not waited.wait(0.05)
    bench.may_copy.set()
    waiter.join(5)
    assert waited.is_set()


def test_closing_ends_while_orders_wait() -> None:
    bench = Bench()
    bench.store(1, [1], [1], after_step=99)
    bench.close()
    assert bench.engine.poll() == []
