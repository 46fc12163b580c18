"""Reports leave at once while the scheduler listens, and are merged while it does not."""

from __future__ import annotations

from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse
from hiserve.engine.service import ReportSender
from hiserve.ipc.codec import Frames, MessageDecoder
from hiserve.ipc.messages import CacheFlushed, FromWorker, StepReport, WorkerStats
from hiserve.ipc.updates import RequestUpdates, TokenDelta


class FakeChannel:
    """A peer that listens or not."""

    def __init__(self) -> None:
        self.is_writable = True
        self.sent: list[Frames] = []

    def try_send(self, frames: Frames) -> bool:
        if self.is_writable:
            self.sent.append(frames)
        return self.is_writable

    def messages(self) -> list[FromWorker]:
        return [MessageDecoder[FromWorker](FromWorker).decode(frames).message for frames in self.sent]

    def reports(self) -> list[StepReport]:
        messages = self.messages()
        assert all(isinstance(message, StepReport) for message in messages)
        return messages  # type: ignore[return-value]


def report(
    uid: int, *tokens: int, finish: int = 0, scores: bytes = b"", published: bytes = b"", removed: bytes = b""
) -> RequestUpdates:
    made = RequestUpdates(published=published, removed=removed)
    made.add(TokenDelta(list(tokens), FinishReason(finish), scores, uid, cached=CacheUse()))
    return made


def test_a_listening_scheduler_gets_each_report_as_it_is() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 3)
    sender.report(report(1, 10, 11, scores=b"scores__", published=b"p" * 16), WorkerStats(steps=1))
    sender.report(report(1, 12, finish=1), WorkerStats(steps=2))
    assert not sender.is_pending
    first, second = channel.reports()
    assert (first.incarnation, first.updates.tokens.tolist(), first.updates.published) == (3, [10, 11], b"p" * 16)
    assert (first.updates.score_words, first.updates.scores) == ([2], b"scores__")
    assert second.updates.tokens.tolist() == [12]


def test_reports_for_a_slow_scheduler_become_one() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    a, b, c = b"a" * 16, b"b" * 16, b"c" * 16
    for step in range(500):
        sender.report(report(1, step, scores=step.to_bytes(4, "little")), WorkerStats(steps=step))
    sender.report(report(2, 7, finish=1, published=a + b), WorkerStats(steps=500))
    sender.report(RequestUpdates(failed=[(3, "engine_error", "no")], published=c, removed=a), WorkerStats(steps=501))
    sender.flush()
    assert channel.sent == []
    assert sender.is_pending
    channel.is_writable = True
    sender.flush()
    [message] = channel.reports()
    updates = message.updates
    assert (updates.uids, updates.counts, updates.finishes) == ([1, 2], [500, 1], [0, 1])
    assert updates.tokens.tolist() == [*range(500), 7]
    assert updates.score_words == [500, 0]
    assert updates.scores == b"".join(step.to_bytes(4, "little") for step in range(500))
    assert updates.failed == [(3, "engine_error", "no")]
    assert message.stats.steps == 501
    assert (updates.published, updates.removed) == (b + c, b"")
    assert not sender.is_pending


def test_a_page_lost_and_found_again_while_waiting_is_not_reported() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(RequestUpdates(removed=b"x" * 16), WorkerStats())
    sender.report(RequestUpdates(published=b"x" * 16), WorkerStats())
    channel.is_writable = True
    sender.flush()
    assert channel.reports()[0].updates.published == channel.reports()[0].updates.removed == b""


def test_a_report_does_not_overtake_those_that_wait() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(report(1, 10), WorkerStats())
    channel.is_writable = True
    sender.report(report(1, 11), WorkerStats())
    sender.flush()
    [message] = channel.reports()
    assert message.updates.tokens.tolist() == [10, 11]


def test_answers_wait_and_are_not_merged() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    for ticket in (1, 2):
        sender.answer(CacheFlushed(incarnation=1, ticket=ticket, pages=4))
    sender.report(report(1, 10), WorkerStats())
    channel.is_writable = True
    sender.flush()
    kinds = [type(message).__name__ for message in channel.messages()]
    assert kinds == ["CacheFlushed", "CacheFlushed", "StepReport"]


def test_a_page_that_two_tiers_gained_while_it_waited_is_told_twice_and_one_that_moved_not_at_all() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    a, b = b"a" * 16, b"b" * 16
    sender.report(RequestUpdates(published=a), WorkerStats())  # on the device
    sender.report(RequestUpdates(published=a + b, removed=b), WorkerStats())  # on the host too; another moved there
    channel.is_writable = True
    sender.flush()
    updates = channel.reports()[0].updates
    assert (updates.published, updates.removed) == (a + a, b"")


def test_pages_that_come_and_go_while_the_scheduler_is_slow_take_no_memory() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(RequestUpdates(published=b"a" * 16), WorkerStats())
    for number in range(1_000):
        digest = number.to_bytes(16, "little")
        sender.report(RequestUpdates(published=digest), WorkerStats())
        sender.report(RequestUpdates(removed=digest), WorkerStats())
    assert list(sender._late._pages) == [b"a" * 16]
