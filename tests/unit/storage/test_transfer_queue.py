"""Stores give way to launches: a piece waits for the queue's news, for a while, and not where somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hiserve.cache.storage import transfer
from hiserve.cache.storage.transfer import TransferQueue
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.host import make_run
from tests.helpers.transfers import THREAD, TransferBench, ints
from tests.helpers.waiting import PATIENCE_S


class News(threading.Condition):
    """Never waits: something happens instead; remembers how long each wait may have been, and whether it ended early."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens
        self.waits: list[tuple[float | None, bool]] = []
        self.num_told = 0

    def notify_all(self) -> None:
        self.num_told += 1

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not (is_there := predicate()):
            self._happens()
            is_there = predicate()
            self.waits.append((timeout, is_there))
        return is_there


@pytest.fixture
def bench() -> TransferBench:
    return TransferBench(THREAD)


def make_queue(bench: TransferBench, happens: Callable[[TransferQueue], object], num_pages: int = 8) -> TransferQueue:
    """A queue without threads that holds so many pages of stores."""
    queue = TransferQueue(bench.host, max_queued_bytes=num_pages * bench.page_bytes, max_offload_bytes_per_s=1e15)
    queue._changed = News(lambda: happens(queue))
    return queue


def waits(queue: TransferQueue) -> list[tuple[float | None, bool]]:
    assert isinstance(queue._changed, News)
    return queue._changed.waits


def store(queue: TransferQueue, op: int, num_pages: int) -> None:
    pages = list(range(op, op + num_pages))
    queue.start(PageCopy(op, CopyKind.OFFLOAD, ints(pages), ints(pages), 0, make_run(pages, pages)))


def load(queue: TransferQueue, op: int, after_step: int = 0) -> None:
    queue.start(PageCopy(op, CopyKind.LOAD, ints([9]), ints([9]), after_step))


@pytest.mark.parametrize(
    "end", [lambda queue: queue.forward_done(1), TransferQueue.launch_ends, TransferQueue.close, lambda q: load(q, 7)]
)
def test_a_piece_of_a_store_waits_until_the_launch_is_over_or_the_queue_closed_or_a_load_there(
    bench: TransferBench, end: Callable[[TransferQueue], object]
) -> None:
    queue = make_queue(bench, end)
    queue.yield_to_launch()
    assert waits(queue) == []
    queue.launch_begins()
    queue.yield_to_launch()
    assert waits(queue) == [(transfer.MAX_YIELD_S, True)]
    queue.yield_to_launch()
    assert len(waits(queue)) == 1
    bench.close()


def test_launches_that_never_end_cost_each_piece_a_moment(bench: TransferBench) -> None:
    assert 0 < transfer.MAX_YIELD_S <= 5e-3
    queue = make_queue(bench, lambda queue: None)
    queue.launch_begins()
    queue.yield_to_launch()
    queue.yield_to_launch()
    assert waits(queue) == [(transfer.MAX_YIELD_S, False)] * 2
    queue.launch_ends()
    queue.launch_begins()
    queue.yield_to_launch()
    assert len(waits(queue)) == 3
    bench.close()


@pytest.mark.parametrize("order", [lambda queue: store(queue, 1, 1), lambda queue: load(queue, 1, after_step=2)])
def test_a_step_wakes_no_thread_unless_an_order_waits_or_is_on_its_way(
    bench: TransferBench, order: Callable[[TransferQueue], object]
) -> None:
    queue = make_queue(bench, lambda queue: None)
    news = queue._changed
    assert isinstance(news, News)
    queue.forward_done(1)
    assert news.num_told == 0
    order(queue)
    before = news.num_told
    queue.forward_done(2)
    assert news.num_told == before + 1
    copy = queue.next()
    assert copy is not None
    queue.forward_done(3)
    assert news.num_told == before + 1 + (copy.kind is CopyKind.OFFLOAD)  # one that gives way may go on
    queue.end(copy, 0.0)
    after = news.num_told
    queue.forward_done(4)
    assert news.num_told == after
    bench.close()


def test_only_a_load_that_may_begin_ends_the_wait(bench: TransferBench) -> None:
    queue = make_queue(bench, lambda queue: load(queue, 7, after_step=1))
    queue.launch_begins()
    queue.yield_to_launch()
    assert waits(queue) == [(transfer.MAX_YIELD_S, False)]
    bench.close()


def test_stores_wait_for_nobody_while_they_fill_more_than_half_of_what_they_may(bench: TransferBench) -> None:
    """Otherwise some would be dropped that were not before."""
    queue = make_queue(bench, lambda queue: None, num_pages=8)
    queue.launch_begins()
    store(queue, 1, num_pages=4)
    queue.yield_to_launch()
    assert len(waits(queue)) == 1
    store(queue, 5, num_pages=1)
    queue.yield_to_launch()
    assert len(waits(queue)) == 1
    bench.close()


def test_a_piece_that_waits_really_wakes(bench: TransferBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken here waits for an hour."""
    monkeypatch.setattr(transfer, "MAX_YIELD_S", 3600.0)
    queue = TransferQueue(bench.host, max_queued_bytes=1 << 30, max_offload_bytes_per_s=1e15)
    store(queue, 1, num_pages=1)  # on its way
    for end in (queue.launch_ends, lambda: queue.forward_done(1), queue.close):
        queue.launch_begins()
        piece = threading.Thread(target=queue.yield_to_launch, daemon=True)
        piece.start()
        end()
        piece.join(PATIENCE_S)
        assert not piece.is_alive()
    bench.close()
