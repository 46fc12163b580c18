"""What every transfer engine does: every byte arrives, in the order that fences and kinds demand, answered once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hiserve.cache.storage.records import PageState
from hiserve.cache.storage.transfer import DROPPED, NOT_READY
from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.errors import InvariantError
from tests.helpers.host import PAGE_SIZE
from tests.helpers.transfers import (
    CARRIED,
    DIRECT,
    GROUPS,
    LAYERED,
    NUM_PAGES,
    PAGE_BYTES,
    STAGED,
    THREAD,
    WINDOWED,
    TransferBench,
    ints,
)
from tests.helpers.waiting import PATIENCE_S

MakeBench = Callable[..., TransferBench]


@pytest.fixture(params=[THREAD, *(pytest.param(make, marks=pytest.mark.gpu) for make in (DIRECT, LAYERED, STAGED))])
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


def test_what_was_stored_and_loaded_elsewhere_is_the_same_bytes(bench: TransferBench) -> None:
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


def test_a_resume_point_that_was_stored_is_loaded_elsewhere_whole(make_bench: MakeBench) -> None:
    """H10: history and tail are one order with one answer; frames lie anywhere, three to a window page."""
    bench = make_bench(groups=WINDOWED, num_pages=40)
    assert bench.host.frames_per_page == 3
    history, windows = bench.pages(), bench.pages(Space.WINDOW)
    frames = [30, 2, 3, 17, 16, 39, 5, 6, 7]
    bench.store(1, [3, 4], [9, 8])
    bench.store_tail(2, [11, 3, 20], frames)
    assert sorted((ack.op, ack.reason, ack.num_bytes) for ack in bench.acks(2)) == [
        (1, "", 2 * bench.page_bytes),
        (2, "", 9 * bench.page_bytes),
    ]
    assert all(bench.host.records.state(frame) == PageState.VALID for frame in frames)
    bench.load_tail(3, [25, 26, 1], frames, device=[5, 6], host=[8, 9])
    bench.engine.wait(3, 4)  # a layer that has no pages of history
    (ack,) = bench.acks(1)
    assert (ack.reason, ack.num_bytes) == ("", 11 * bench.page_bytes)
    history[[5, 6]], windows[[25, 26, 1]] = history[[4, 3]], windows[[11, 3, 20]]
    assert torch.equal(bench.pages(), history) and torch.equal(bench.pages(Space.WINDOW), windows)
    bench.load_tail(4, [30, 31, 32], frames)  # a tail alone
    assert bench.acks(1)[0].is_ok
    windows[30:33] = windows[[25, 26, 1]]
    assert torch.equal(bench.pages(), history) and torch.equal(bench.pages(Space.WINDOW), windows)


@pytest.mark.parametrize(("groups", "windows"), [(GROUPS, 0), (WINDOWED, 2)])
def test_a_snapshot_arrives_with_the_window_pages_of_its_tail(
    make_bench: MakeBench, groups: tuple[CacheGroupSpec, ...], windows: int
) -> None:
    """H10: states and the newest rows of rings, behind the images of window pages; other slots keep what they have."""
    bench = make_bench(groups=(*groups, *CARRIED), num_pages=40)
    num_frames = windows * bench.host.frames_per_page + bench.host.frames_per_snapshot
    assert bench.host.frames_per_snapshot == 2
    frames = [30, 2, 3, 17, 16, 39, 5, 6][:num_frames]
    pages, snapshots = bench.pages(Space.WINDOW) if windows else None, bench.snapshots()
    bench.store(1, [3, 4], [9, 8])
    bench.store_tail(2, [11, 20][:windows], frames, slots=[7])
    assert all(ack.is_ok for ack in bench.acks(2))
    bench.load_tail(3, [25, 1][:windows], frames, device=[5, 6], host=[8, 9], slots=[1])
    assert bench.acks(1)[0].is_ok
    snapshots[1] = snapshots[7]
    assert torch.equal(bench.snapshots(), snapshots)
    if pages is not None:
        pages[[25, 1]] = pages[[11, 20]]
        assert torch.equal(bench.pages(Space.WINDOW), pages)


def test_a_tail_whose_copy_fails_is_answered_with_its_reason_and_leaves_pages_alone(make_bench: MakeBench) -> None:
    bench = make_bench(groups=WINDOWED, num_pages=40, hold=lambda copy: "broken" if copy.op < 3 else None)
    history, windows = bench.pages(), bench.pages(Space.WINDOW)
    bench.load_tail(1, [5], [1, 2, 3], device=[7], host=[8])
    bench.engine.wait(1)
    bench.store_tail(2, [6], [10, 11, 12])
    assert sorted((ack.op, ack.reason, ack.num_bytes) for ack in bench.acks(2)) == [(1, "broken", 0), (2, "broken", 0)]
    assert torch.equal(bench.pages(), history) and torch.equal(bench.pages(Space.WINDOW), windows)
    assert all(bench.host.records.state(frame) == PageState.WRITING for frame in (10, 11, 12))
    bench.store_tail(3, [6], [20, 21, 22])
    assert bench.acks(1)[0].is_ok


def test_a_stored_page_is_valid_when_its_bytes_have_arrived_and_not_before(bench: TransferBench) -> None:
    bench.may_copy.clear()
    bench.store(1, [3], [2])
    assert bench.host.records.state(2) == PageState.WRITING
    bench.may_copy.set()
    bench.acks(1)
    assert bench.host.records.state(2) == PageState.VALID
    assert bench.host.wait_checksums(PATIENCE_S)
    assert bench.host.verify(2)


def test_loads_overtake_stores_and_each_kind_keeps_its_order(bench: TransferBench) -> None:
    bench.may_copy.clear()
    bench.store(1, [1], [1])
    while not bench.begun:
        time.sleep(0.001)
    for op, page in ((2, 2), (3, 3)):
        bench.store(op, [page], [page])
    for op in (4, 5):
        bench.load(op, [8 + op % 2], [1])
    bench.may_copy.set()
    ops = [ack.op for ack in bench.acks(5)]
    assert bench.begun == [1, 4, 5, 2, 3]
    assert [op for op in ops if op > 3] == [4, 5]
    assert [op for op in ops if op < 4] == [1, 2, 3]


def test_a_copy_waits_for_the_step_that_could_touch_its_pages(bench: TransferBench) -> None:
    bench.store(1, [1], [1], after_step=7)
    bench.load(2, [4], [5], after_step=6)
    time.sleep(0.05)
    assert bench.begun == []
    bench.engine.forward_done(6)
    assert [ack.op for ack in bench.acks(1)] == [2]
    bench.engine.forward_done(7)
    assert [ack.op for ack in bench.acks(1)] == [1]


def test_stores_are_dropped_while_the_link_is_behind_and_loads_never(make_bench: MakeBench) -> None:
    bench = make_bench(max_queued_bytes=2 * PAGE_BYTES)
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


def test_stores_take_no_more_of_the_link_than_they_may(make_bench: MakeBench) -> None:
    bench = make_bench(max_offload_bytes_per_s=PAGE_BYTES / 0.05)  # a page takes 50 ms
    bench.may_copy.clear()
    for op in range(1, 5):
        bench.store(op, [op], [op])
    bench.load(5, [9], [8])
    begin = time.monotonic()
    bench.may_copy.set()
    assert len(bench.acks(5)) == 5
    assert time.monotonic() - begin >= 0.15
    assert bench.begun.index(5) <= 1


@dataclass(frozen=True)
class HalfTouched:
    """Stands in for ``Prefault`` while it is at work."""

    num_ready_pages: int


def test_nothing_is_copied_to_or_from_a_page_that_is_not_ready(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.host, "prefault", HalfTouched(5))
        bench.store(1, [1, 2], [4, 5])
        bench.load(2, [3], [5])
        bench.engine.wait(2)
        assert [(ack.op, ack.reason, ack.num_bytes) for ack in bench.acks(2)] == [(1, NOT_READY, 0), (2, NOT_READY, 0)]
        assert bench.host.records.state(4) == PageState.FREE
    bench.store(3, [1], [4])
    assert bench.acks(1)[0].is_ok
    assert bench.begun == [3]


def test_a_forward_waits_for_a_load_that_it_reads(bench: TransferBench) -> None:
    bench.may_copy.clear()
    bench.load(1, [4], [5])
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (bench.engine.wait(1), waited.set()))
    waiter.start()
    assert not waited.wait(0.05)
    bench.may_copy.set()
    waiter.join(PATIENCE_S)
    assert waited.is_set()


def test_a_layer_may_be_read_behind_its_part_of_a_load(bench: TransferBench) -> None:
    bench.store(1, [4], [5])
    bench.acks(1)
    bench.fill(7, 0.0)
    bench.engine.forward_done(1)
    bench.load(2, [7], [5], after_step=1)
    for index, layer in enumerate(bench.device.layers("kv")):
        bench.engine.wait(2, index)
        for plane in (layer.k, layer.v):
            loaded, original = (plane[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] for page in (7, 4))
            assert torch.equal(loaded, original)
    assert bench.acks(1)[0].is_ok
    assert torch.equal(bench.page(7), bench.page(4))


def test_a_forward_does_not_wait_for_a_load_that_waits_for_it(bench: TransferBench) -> None:
    """It would wait forever; that is an error of whoever plans."""
    bench.load(1, [4], [5], after_step=3)
    with pytest.raises(AssertionError, match="load 1 waits for a step"):
        bench.engine.wait(1)
    bench.engine.forward_done(3)
    bench.engine.wait(1)
    assert bench.acks(1)[0].is_ok


def test_poll_waits_for_an_answer_no_longer_than_told(bench: TransferBench) -> None:
    begin = time.monotonic()
    assert bench.engine.poll(0.05) == []
    assert time.monotonic() - begin > 0.04
    bench.store(1, [1], [1])
    assert [ack.op for ack in bench.engine.poll(PATIENCE_S)] == [1]
    assert bench.engine.poll() == []


def test_many_orders_at_once_move_the_right_pages(bench: TransferBench) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = [bench.page(page) for page in range(NUM_PAGES)]
    op = 0
    for _ in range(20):
        there = rng.sample(range(1, NUM_PAGES), 8)
        sources, targets = rng.sample(range(1, NUM_PAGES), 8), rng.sample(range(1, NUM_PAGES), 8)
        for part in (slice(0, 1), slice(1, 8)):
            bench.store(op := op + 1, sources[part], there[part])
        assert all(ack.is_ok for ack in bench.acks(2))
        for part in (slice(0, 3), slice(3, 8)):
            bench.load(op := op + 1, targets[part], there[part])
        assert all(ack.is_ok for ack in bench.acks(2))
        bench.host.free(ints(there))
        copied = [expected[source] for source in sources]
        for target, page in zip(targets, copied, strict=True):
            expected[target] = page
    assert all(torch.equal(bench.page(page), expected[page]) for page in range(NUM_PAGES))


def test_a_copy_that_fails_is_answered_with_its_reason_and_nobody_waits_for_it(make_bench: MakeBench) -> None:
    bench = make_bench(hold=lambda copy: "broken" if copy.op < 3 else None)
    before = bench.page(4)
    bench.load(1, [4], [5])
    bench.engine.wait(1)
    bench.store(2, [3], [2])
    assert sorted((ack.op, ack.reason, ack.num_bytes) for ack in bench.acks(2)) == [(1, "broken", 0), (2, "broken", 0)]
    assert torch.equal(bench.page(4), before)
    assert bench.host.records.state(2) == PageState.WRITING  # until whoever ordered it gives the page back
    bench.store(3, [3], [6])
    assert bench.acks(1)[0].is_ok


def test_a_copy_for_which_memory_runs_out_fails_and_those_after_it_do_not(make_bench: MakeBench) -> None:
    def hold(copy: PageCopy) -> None:
        if copy.op < 3:
            torch.empty(1 << 55, dtype=torch.uint8)

    bench = make_bench(hold=hold)
    bench.load(1, [4], [5])
    bench.engine.wait(1)
    bench.store(2, [3], [2])
    assert sorted((ack.op, ack.reason) for ack in bench.acks(2)) == [(1, "out_of_memory"), (2, "out_of_memory")]
    bench.store(3, [3], [6])
    assert bench.acks(1)[0].is_ok


def test_what_kills_the_thread_is_told_to_whoever_asks(make_bench: MakeBench) -> None:
    def hold(copy: PageCopy) -> None:
        if copy.kind is CopyKind.LOAD:
            raise ValueError("the stream broke")

    bench = make_bench(hold=hold)
    bench.load(1, [4], [5])
    for ask in (lambda: bench.engine.wait(1), lambda: bench.engine.poll(PATIENCE_S)):
        with pytest.raises(InvariantError, match="copies between tiers have stopped") as caught:
            ask()
        assert str(caught.value.__cause__) == "the stream broke"


def test_closing_ends_while_orders_wait(bench: TransferBench) -> None:
    bench.store(1, [1], [1], after_step=99)
    bench.engine.close()
    assert bench.engine.poll() == []
