"""What a worker reports reaches the client whole, with the time the request was queued, once."""

from __future__ import annotations

from hiserve.ipc.updates import RequestUpdates, TokenDelta
from tests.helpers.dispatch import Desk


def make_desk() -> Desk:
    """One row: the worker holds two requests, one runs and one waits."""
    return Desk(rows=1)


def test_scores_are_passed_on_as_they_came() -> None:
    desk = make_desk()
    desk.submit(1)
    desk.submit(2)
    updates = RequestUpdates()
    updates.add(TokenDelta(scores=b"01234567", uid=2), TokenDelta([7], scores=b"89ab", uid=1))
    desk.dispatcher.report(0, updates)
    [news] = desk.events.news
    assert (news.uids, news.counts, news.score_words, news.scores) == ([2, 1], [0, 1], [2, 1], b"0123456789ab")


def test_the_time_in_the_queue_is_told_with_the_first_news_and_only_then() -> None:
    desk = make_desk()
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
    desk = make_desk()
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.now_s = 110.0
    desk.dispatcher.abort([3])
    [news] = desk.events.news
    assert (news.uids, news.queue_s, news.score_words, news.scores) == ([3], [-1], [0], b"")


def test_each_request_keeps_its_own_tokens_of_a_report_of_many() -> None:
    """By which it goes on with another worker."""
    desk = Desk(rows=4)
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.report((1, [5, 6, 7], 0), (2, [], 0), (3, [8, 9], 0))
    desk.report((3, [4], 0), (1, [3], 0))
    generated = {entry.uid: list(entry.generated) for entry in desk.dispatcher.ledger}
    assert generated == {1: [5, 6, 7, 3], 2: [], 3: [8, 9, 4]}
