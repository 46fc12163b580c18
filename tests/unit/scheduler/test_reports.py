"""What a worker reports reaches the client whole, with the time the request was queued, once."""

from __future__ import annotations

from hiserve.config.options import Scheduler
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.scheduler.dispatcher import Dispatcher
from hiserve.scheduler.placement import PrefixIndex
from hiserve.scheduler.queue import Fcfs
from tests.helpers.dispatch import PAGE_SIZE, RecordedEvents, generate, prompt, ready, step_updates


class Desk:
    """A dispatcher with a worker of two rows, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.events = RecordedEvents()
        self.dispatcher = Dispatcher(self.events, Fcfs(), PrefixIndex(PAGE_SIZE), Scheduler(), clock=lambda: self.now_s)
        self.dispatcher.worker_ready(0, ready(rows=1))  # holds two: one runs, one waits

    def submit(self, uid: int) -> None:
        self.dispatcher.submit(generate(uid), prompt(1, 2, 3))
        self.dispatcher.dispatch()

    def report(self, *rows: tuple[int, list[int], int]) -> None:
        self.dispatcher.report(0, step_updates(*rows))
        self.dispatcher.dispatch()


def test_scores_are_passed_on_as_they_came() -> None:
    desk = Desk()
    desk.submit(1)
    desk.submit(2)
    updates = RequestUpdates()
    updates.add(TokenDelta(scores=b"01234567", uid=2), TokenDelta([7], scores=b"89ab", uid=1))
    desk.dispatcher.report(0, updates)
    [news] = desk.events.news
    assert (news.uids, news.counts, news.score_words, news.scores) == ([2, 1], [0, 1], [2, 1], b"0123456789ab")


def test_the_time_in_the_queue_is_told_with_the_first_news_and_only_then() -> None:
    desk = Desk()
    desk.submit(1)
    desk.now_s = 100.5
    desk.submit(2)
    desk.submit(3)
    desk.now_s = 103.0
    desk.report((1, [5], 0))
    desk.now_s = 104.0
    desk.report((1, [5], 1), (2, [5], 0))  # 3 gets its place
    desk.now_s = 200.0
    desk.report((2, [5], 0), (3, [5], 0))
    desk.report((2, [5], 0), (3, [5], 1))
    assert [news.queue_s for news in desk.events.news] == [[0], [-1, 0], [-1, 3.5], [-1, -1]]


def test_a_request_that_no_worker_got_has_no_time_in_the_queue() -> None:
    desk = Desk()
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.now_s = 110.0
    desk.dispatcher.abort([3])
    [news] = desk.events.news
    assert (news.uids, news.queue_s, news.score_words, news.scores) == ([3], [-1], [0], b"")
