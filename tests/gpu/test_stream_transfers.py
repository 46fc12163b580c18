"""Copies on CUDA streams: after the forwards they must follow, before those that follow them, and never in their way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.core.upload import upload
from hiserve.engine.graph_check import no_sync
from hiserve.kernels.page_copy import copy_pages
from tests.helpers.transfers import DIRECT, LAYERED, PAGE_BYTES, STAGED, WINDOWED, TransferBench, ints

pytestmark = pytest.mark.gpu

LONG = 400_000_000  # cycles: 0.2 s
LARGE = (CacheGroupSpec(name="kv", num_layers=32, num_kv_heads=32, head_dim=128, dtype="bfloat16"),)  # 2 MiB a page
MakeBench = Callable[..., TransferBench]


@pytest.fixture(params=[DIRECT, LAYERED, STAGED])
def make_bench(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    made: list[TransferBench] = []

    def make(**options: Any) -> TransferBench:
        made.append(TransferBench(request.param, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> TransferBench:
    return make_bench()


def test_a_store_takes_what_a_launched_step_will_have_written(bench: TransferBench) -> None:
    torch.cuda._sleep(LONG)
    bench.fill(3, 7.5)
    bench.engine.forward_done(1)
    bench.store(1, [3], [2], after_step=1)
    assert bench.engine.poll(0.02) == []
    assert bench.acks(1)[0].is_ok
    bench.load(2, [5], [2])
    bench.acks(1)
    assert (bench.page(5) == 7.5).all()


def test_a_load_leaves_its_pages_to_a_launched_step(bench: TransferBench) -> None:
    original = bench.page(4)
    bench.store(1, [4], [2])
    bench.acks(1)
    torch.cuda._sleep(LONG)
    bench.fill(5, 1.5)
    bench.engine.forward_done(1)
    bench.load(2, [5], [2], after_step=1)
    bench.engine.wait(2)
    assert torch.equal(bench.page(5), original)


def test_a_step_that_is_long_over_needs_no_event_of_its_own(bench: TransferBench) -> None:
    for step_id in range(1, 100):
        bench.engine.forward_done(step_id)
    bench.store(1, [4], [2], after_step=3)
    bench.store(2, [5], [3], after_step=99)
    assert all(ack.is_ok for ack in bench.acks(2))


def test_the_forward_stream_waits_for_a_load_and_the_host_does_not(bench: TransferBench) -> None:
    original = bench.page(4)
    bench.store(1, [4], [2])
    bench.acks(1)
    bench.fill(5, 0.0)
    bench.engine.forward_done(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        bench.engine.forward_done(2)
    bench.load(2, [5], [2], after_step=2)
    with no_sync():
        bench.engine.wait(2)
        read = [plane.clone() for plane in bench.planes()]
    assert not side.query()
    torch.cuda.current_stream().synchronize()
    for plane, seen in zip(bench.planes(), read, strict=True):
        plane.copy_(seen)
    assert torch.equal(bench.page(5), original)


def test_only_loads_of_much_that_forwards_wait_for_go_layer_by_layer_each_with_an_event() -> None:
    cases = ((LAYERED, None, True, 3), (LAYERED, None, False, 0), (DIRECT, None, True, 0), (STAGED, LARGE, True, 0))
    for make, groups, by_layer, num_events in cases:
        bench = TransferBench(make, **({} if groups is None else {"groups": groups}))
        streams = bench.engine._streams[CopyKind.LOAD]
        copy = PageCopy(1, CopyKind.LOAD, ints([3, 4]), ints([1, 2]), 0)
        flight = streams.begin(copy, None, lambda room: None, by_layer=by_layer)
        assert len(flight.layers) == num_events
        assert {flight.end_of(layer) for layer in (None, 0)} == {flight.end, *flight.layers[:1]}
        flight.end.synchronize()
        assert all(event.query() for event in flight.layers)
        bench.close()


def test_neither_the_planning_thread_nor_the_engine_waits_for_the_device(bench: TransferBench) -> None:
    bench.store(1, [1], [1])
    bench.acks(1)
    with no_sync():
        for step in range(1, 6):
            bench.store(2 * step, [1 + step], [1 + step], after_step=step)
            bench.load(2 * step + 1, [7 + step % 3], [1], after_step=step - 1)
            bench.engine.forward_done(step)
            bench.engine.wait(2 * step + 1)
        assert all(ack.is_ok for ack in bench.acks(10))


def test_time_spent_waiting_for_a_step_is_not_the_link_s(bench: TransferBench) -> None:
    torch.cuda._sleep(LONG)
    bench.engine.forward_done(1)
    bench.store(1, [3], [2], after_step=1)
    (ack,) = bench.acks(1)
    assert 0 < ack.seconds < 0.05
    assert ack.num_bytes == PAGE_BYTES


def test_closing_lets_what_was_enqueued_arrive(bench: TransferBench) -> None:
    torch.cuda._sleep(LONG)
    bench.engine.forward_done(1)
    bench.store(1, [3], [2], after_step=1)
    while not bench.begun:
        assert bench.engine.poll(0.01) == []
    bench.engine.close()
    assert [ack.op for ack in bench.engine.poll()] == [1]


def test_large_orders_cross_pinned_pieces_and_share_little_staging_memory(make_bench: MakeBench) -> None:
    bench = make_bench(groups=LARGE, num_pages=100, staging_bytes=20 << 20)
    assert bench.host.prefault.num_pieces > 2
    before = [bench.page(page) for page in range(100)]
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    host = rng.permutation(99)[:90] + 1
    bench.store(1, list(range(20, 60)), list(range(10, 50)))  # adjacent, across the edge at 32
    bench.store(2, list(range(60, 90)), [int(page) for page in range(50, 80)])
    assert all(ack.is_ok for ack in bench.acks(2))
    bench.host.free(np.arange(10, 80, dtype=np.int32))
    bench.store(3, list(range(10, 100)), host.tolist())
    assert bench.acks(1)[0].num_bytes == 90 * bench.page_bytes
    for page in range(100):
        bench.fill(page, -1.0)
    torch.cuda.current_stream().synchronize()
    bench.load(4, list(range(1, 46)), host[:45].tolist())
    bench.load(5, list(range(46, 91)), host[45:].tolist())
    assert all(ack.is_ok for ack in bench.acks(2))
    assert all(torch.equal(bench.page(page), before[page + 9]) for page in range(1, 91))
    assert (bench.page(91) == -1).all()


def test_a_tail_waits_for_the_steps_that_touch_its_pages(make_bench: MakeBench) -> None:
    bench, frames = make_bench(groups=WINDOWED, num_pages=40), [2, 30, 17]
    torch.cuda._sleep(LONG)
    bench.fill(3, 7.5, Space.WINDOW)
    bench.engine.forward_done(1)
    bench.store_tail(1, [3], frames, after_step=1)
    assert bench.engine.poll(0.02) == []
    assert bench.acks(1)[0].is_ok
    torch.cuda._sleep(LONG)
    bench.fill(5, 1.5, Space.WINDOW)
    bench.engine.forward_done(2)
    bench.load_tail(2, [5], frames, after_step=2, device=[6], host=[4])
    bench.engine.wait(2, 5)  # a layer that the history has not
    assert (bench.page(5, Space.WINDOW) == 7.5).all()


def test_large_tails_cross_pinned_pieces_in_any_order(make_bench: MakeBench) -> None:
    """Images of 5 MiB lie in three frames each, of 2 MiB."""
    swa = CacheGroupSpec(name="swa", num_layers=80, num_kv_heads=32, head_dim=128, dtype="bfloat16", space=Space.WINDOW)
    bench = make_bench(groups=(*LARGE, swa), num_pages=100, staging_bytes=20 << 20)
    assert bench.host.prefault.num_pieces > 2 and bench.host.frames_per_page == 3
    before = bench.pages(Space.WINDOW)
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    frames = (np.random.default_rng(seed).permutation(99)[:90] + 1).tolist()
    for op, order in ((1, frames), (3, sorted(frames))):  # anywhere, and adjacent across the edges
        bench.store_tail(op, range(10, 40), order)
        assert bench.acks(1)[0].num_bytes == 90 * bench.page_bytes
        for page in range(50, 80):
            bench.fill(page, -1.0, Space.WINDOW)
        torch.cuda.current_stream().synchronize()
        bench.load_tail(op + 1, range(50, 80), order)
        assert bench.acks(1)[0].is_ok
        expected = before.clone()
        expected[50:80] = before[10:40]
        assert torch.equal(bench.pages(Space.WINDOW), expected)
        bench.host.free(ints(frames))


def test_others_have_their_turn_at_the_copy_engine_while_a_load_crosses() -> None:
    """It turns to nobody else as long as one stream has copies for it that could begin."""
    bench = TransferBench(STAGED, groups=LARGE, num_pages=250)
    pages = list(range(1, 250))
    bench.store(1, pages, pages)
    assert bench.acks(1)[0].is_ok
    source = torch.ones(200_000, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(source.shape, dtype=torch.uint8, device="cuda").copy_(source).zero_()
    torch.cuda.current_stream().synchronize()
    bench.load(2, pages, pages)
    while 2 not in bench.begun:
        time.sleep(0.0001)
    time.sleep(0.001)  # the engine has more to do now than it can have done
    target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert bench.engine.poll() == [], "the load was over before"
    assert bench.acks(1)[0].is_ok and target.all()
    bench.close()


def test_uploads_of_a_step_wait_for_no_load() -> None:
    """Nor for their turn."""
    array = np.arange(40_000, dtype=np.int32)
    source = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(source.shape, dtype=torch.uint8, device="cuda")
    moved = upload((array,), target.device)[0]
    load = torch.cuda.Stream()
    load.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(load):
        for ours, theirs in zip(target.split(64 << 20), source.split(64 << 20), strict=True):
            ours.copy_(theirs, non_blocking=True)
    moved = upload((array,), target.device)[0]
    torch.cuda.current_stream().synchronize()
    assert not load.query(), "the load was over before"
    assert torch.equal(moved.cpu(), torch.from_numpy(array))


def test_pools_may_have_more_words_than_32_bits_count() -> None:
    num_planes, num_pages, piece = 3, 1 << 20, 1031  # bytes; an odd number, so that a word is a byte
    planes = torch.empty((num_planes, num_pages, piece), dtype=torch.uint8, device="cuda")
    pages = torch.empty((num_pages, num_planes * piece), dtype=torch.uint8, device="cuda")
    assert planes.numel() > 2**31
    last = num_pages - 1
    data = torch.randint(1, 255, (2, num_planes, piece), dtype=torch.uint8, device="cuda")
    planes[:, [0, last]] = data.transpose(0, 1)
    pages[[1, last]] = 0
    indices = torch.tensor([[0, last], [1, last]], dtype=torch.int32, device="cuda")
    copy_pages(planes, pages, indices, to_planes=False, max_programs=64)
    assert torch.equal(pages[[1, last]], data.view(2, -1))
    planes[:, [0, last]] = 0
    copy_pages(planes, pages, indices, to_planes=True, max_programs=64)
    assert torch.equal(planes[:, [0, last]].transpose(0, 1), data)
