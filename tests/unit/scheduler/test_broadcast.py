"""Questions to all workers are answered once, by those that live."""

from __future__ import annotations

from hiserve.ipc.cache_stats import NodeFacts, TreeFacts
from hiserve.ipc.codec import Frames, MessageDecoder
from hiserve.ipc.messages import (
    CacheFlushed,
    CacheInspected,
    EngineWatched,
    Flush,
    Flushed,
    Inspect,
    Inspected,
    ToClient,
    ToWorker,
    Watch,
    Watched,
)
from hiserve.ipc.watching import StepRecord, WorkerView
from hiserve.scheduler.process import Broadcast

STEP = StepRecord(7, 1.0, 2.0, 3, 9, 8, 2, 1, 0, "eager", "width", 0.0, 0, "")
NODES = [NodeFacts("ab", "", 0, 0, "", 0, 0, 1, 0)]


class Asked:
    """Rounds, and what they sent."""

    def __init__(self) -> None:
        self.told: list[ToClient] = []
        self.sent: list[tuple[int, ToWorker]] = []
        self.broadcast = Broadcast(self._send, self._tell)

    def _send(self, replica: int, frames: Frames) -> None:
        self.sent.append((replica, MessageDecoder[ToWorker](ToWorker).decode(frames).message))

    def _tell(self, frames: Frames) -> None:
        self.told.append(MessageDecoder[ToClient](ToClient).decode(frames).message)


def test_the_client_is_answered_when_the_last_worker_has_answered() -> None:
    asked = Asked()
    asked.broadcast.ask(Flush(4, ("host",)), [0, 1])
    assert asked.sent == [(0, Flush(4, ("host",))), (1, Flush(4, ("host",)))]
    asked.broadcast.answered(1, CacheFlushed(1, 4, 5))
    assert asked.told == []
    asked.broadcast.answered(0, CacheFlushed(1, 4, 7))
    assert asked.told == [Flushed(4, 12)]


def test_a_worker_that_dies_is_waited_for_no_more_and_what_it_said_counts() -> None:
    asked = Asked()
    asked.broadcast.ask(Inspect(5, 3), [0, 1, 2])
    asked.broadcast.answered(2, CacheInspected(7, 5, NODES))
    asked.broadcast.answered(0, CacheInspected(1, 5, []))
    asked.broadcast.lost(2)
    asked.broadcast.lost(1)
    assert asked.told == [Inspected(5, [TreeFacts(0, 1, []), TreeFacts(2, 7, NODES)])]


def test_each_worker_answers_what_is_asked_of_its_steps() -> None:
    asked = Asked()
    asked.broadcast.ask(Watch(3, "steps", 1.5), [0, 1])
    assert asked.sent == [(0, Watch(3, "steps", 1.5)), (1, Watch(3, "steps", 1.5))]
    asked.broadcast.answered(1, EngineWatched(4, 3, 2.5, [], [STEP]))
    asked.broadcast.answered(0, EngineWatched(1, 3, 2.0, [], []))
    assert asked.told == [Watched(3, [WorkerView(0, 1, 2.0), WorkerView(1, 4, 2.5, [], [STEP])])]


def test_questions_do_not_wait_for_each_other() -> None:
    asked = Asked()
    asked.broadcast.ask(Flush(1, ("device",)), [0])
    asked.broadcast.ask(Inspect(2, 3), [0])
    asked.broadcast.answered(0, CacheInspected(1, 2, []))
    assert asked.told == [Inspected(2, [TreeFacts(0, 1, [])])]
    asked.broadcast.answered(0, CacheFlushed(1, 1, 0))
    assert asked.told[1:] == [Flushed(1, 0)]


def test_without_workers_the_answer_is_empty_and_immediate() -> None:
    asked = Asked()
    asked.broadcast.ask(Flush(1, ("device",)), [])
    asked.broadcast.ask(Inspect(2, 1), [])
    assert asked.told == [Flushed(1, 0), Inspected(2, [])]


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    asked = Asked()
    asked.broadcast.answered(0, CacheFlushed(1, 9, 3))
    asked.broadcast.ask(Flush(9, ("device",)), [0])
    asked.broadcast.answered(0, CacheFlushed(1, 9, 3))
    asked.broadcast.answered(0, CacheFlushed(1, 9, 3))
    assert asked.told == [Flushed(9, 3)]
