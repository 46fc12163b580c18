"""Reports leave at once while the scheduler listens, and are merged while it does not."""

from __future__ import annotations

import numpy as np

from hiserve.core.cache_usage import CacheUse
from hiserve.engine.report_sender import ReportSender
from hiserve.engine.updates import RequestUpdates
from hiserve.ipc.codec import Frames, MessageDecoder, Received
from hiserve.ipc.messages import CacheFlushed, FromWorker, StepReport, WorkerStats


class FakeChannel:
    """A peer that listens or not."""

    def __init__(self) -> None:
        self.is_writable = True
        self.sent: list[Frames] = []

    def try_send(self, frames: Frames) -> bool:
        if self.is_writable:
            self.sent.append(frames)
        return self.is_writable

    def received(self) -> list[Received[FromWorker]]:
        return [MessageDecoder[FromWorker](FromWorker).decode(frames) for frames in self.sent]


def report(
    uid: int, *tokens: int, finish: int = 0, scores: bytes = b"", published: bytes = b"", removed: bytes = b""
) -> RequestUpdates:
    made = RequestUpdates(published=published, removed=removed)
    made.add_tokens([uid], [len(tokens)], [finish], [CacheUse()], [None], np.array(tokens, dtype=np.int32))
    made.add_scores([scores])
    return made


def test_a_listening_scheduler_gets_each_report_as_it_is() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 3)
    sender.report(report(1, 10, 11, scores=b"scores__", published=b"p" * 16), WorkerStats(steps=1))
    sender.report(report(1, 12, finish=1), WorkerStats(steps=2))
    assert not sender.is_pending
    first, second = channel.received()
    assert isinstance(first.message, StepReport)
    assert (first.message.incarnation, first.tokens.tolist(), first.published) == (3, [10, 11], b"p" * 16)
    assert (first.message.score_words, first.scores) == ([2], b"scores__")
    assert second.tokens.tolist() == [12]


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
    [received] = channel.received()
    message = received.message
    assert isinstance(message, StepReport)
    assert (message.uids, message.counts, message.finishes) == ([1, 2], [500, 1], [0, 1])
    assert received.tokens.tolist() == [*range(500), 7]
    assert message.score_words == [500, 0]
    assert received.scores == b"".join(step.to_bytes(4, "little") for step in range(500))
    assert message.failed == [(3, "engine_error", "no")]
    assert message.stats.steps == 501
    assert (received.published, received.removed) == (b + c, b"")
    assert not sender.is_pending


def test_a_page_lost_and_found_again_while_waiting_is_not_reported() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(RequestUpdates(removed=b"x" * 16), WorkerStats())
    sender.report(RequestUpdates(published=b"x" * 16), WorkerStats())
    channel.is_writable = True
    sender.flush()
    assert channel.received()[0].published == channel.received()[0].removed == b""


def test_a_report_does_not_overtake_those_that_wait() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(report(1, 10), WorkerStats())
    channel.is_writable = True
    sender.report(report(1, 11), WorkerStats())
    sender.flush()
    [received] = channel.received()
    assert received.tokens.tolist() == [10, 11]


def test_answers_wait_and_are_not_merged() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    for ticket in (1, 2):
        sender.answer(CacheFlushed(incarnation=1, ticket=ticket, pages=4))
    sender.report(report(1, 10), WorkerStats())
    channel.is_writable = True
    sender.flush()
    kinds = [type(received.message).__name__ for received in channel.received()]
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
    assert (channel.received()[0].published, channel.received()[0].removed) == (a + a, b"")


def test_pages_that_come_and_go_while_the_scheduler_is_slow_take_no_memory() -> None:
    channel = FakeChannel()
    sender = ReportSender(channel, 1)
    channel.is_writable = False
    sender.report(RequestUpdates(published=b"a" * 16), WorkerStats())
    for number in range(1_000):
        digest = number.to_bytes(16, "little")
        sender.report(RequestUpdates(published=digest), WorkerStats())
        sender.report(RequestUpdates(removed=digest), WorkerStats())
    assert list(sender._late_pages) == [b"a" * 16]
