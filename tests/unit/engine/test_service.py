"""The worker's loop obeys, steps and reports; it sleeps when idle and never waits for a slow scheduler."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine import service
from hiserve.engine.service import WorkerService
from hiserve.ipc.cache_stats import LOCAL_TIERS
from hiserve.ipc.channel import Link, PeerGoneError, PollingChannel
from hiserve.ipc.codec import MalformedError, MessageDecoder, Received, encode
from hiserve.ipc.messages import (
    Abort,
    Admit,
    CacheFlushed,
    CacheInspected,
    Configure,
    EngineWatched,
    Flush,
    FromWorker,
    Inspect,
    Ready,
    StepReport,
    Stop,
    Watch,
    WorkerStats,
)
from hiserve.ipc.updates import RequestUpdates
from tests.helpers.fake_engine import FakeEngine, reply
from tests.helpers.settings import settings_of
from tests.helpers.waiting import wait_until

PROMPT = np.arange(40, dtype=np.int32)


class CountingEngine(FakeEngine):
    num_step_calls = 0
    is_quiet = False
    extra_stats: Mapping[str, int] = MappingProxyType({})

    def stats(self) -> WorkerStats:
        return msgspec.structs.replace(super().stats(), **self.extra_stats)

    def step(self) -> RequestUpdates | None:
        self.num_step_calls += 1
        updates = super().step()
        return None if self.is_quiet else updates


class Harness:
    """A service in a thread, and the scheduler's end of its channel."""

    def __init__(self) -> None:
        config = settings_of(
            max_model_len=100_000, kv_pages=100, max_running_requests=4, max_batched_tokens=64, page_size=16
        )
        self.engine = CountingEngine(config, step_s=0.0)
        self.link = Link.bind()
        self._worker_link = Link.connect(self.link.endpoint)
        self._service = WorkerService(self.engine, PollingChannel(self._worker_link), incarnation=2)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._decoder = MessageDecoder[FromWorker](FromWorker)
        assert isinstance(self.receive().message, Ready)
        first = self.receive().message
        assert isinstance(first, StepReport) and not first.updates.uids

    def _run(self) -> None:
        try:
            self._service.run()
        except (PeerGoneError, MalformedError) as error:
            self.error = error
        self._worker_link.close()

    def send(self, *frames: bytes) -> None:
        while not self.link.try_send(list(frames)):
            self.link.wait(until_writable=True)

    def admit(self, uid: int, max_tokens: int = 3) -> None:
        admit = Admit(uid, len(PROMPT), SamplingParams(max_tokens=max_tokens, seed=1), b"", 0)
        self.send(*encode(admit, PROMPT))

    def receive(self) -> Received[FromWorker]:
        while (frames := self.link.try_receive()) is None:
            self.link.wait()
        return self._decoder.decode(frames)

    def until(self, is_enough: Callable[[list[StepReport]], bool]) -> tuple[list[StepReport], list[int]]:
        reports: list[StepReport] = []
        tokens: list[int] = []
        while not is_enough(reports):
            received = self.receive()
            assert isinstance(received.message, StepReport)
            reports.append(received.message)
            tokens += received.message.updates.tokens.tolist()
        return reports, tokens

    def stop(self) -> None:
        if self._thread.is_alive():
            self.send(*encode(Stop()))
            self.join()

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        self.link.close()


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(service, "HEARTBEAT_S", 3600.0)
    built = Harness()
    yield built
    built.stop()


def is_over(reports: list[StepReport]) -> bool:
    return any(any(report.updates.finishes) for report in reports)


def test_a_request_is_run_and_reported(harness: Harness) -> None:
    harness.admit(5)
    reports, tokens = harness.until(is_over)
    assert tokens == reply(PROMPT, 3)
    assert [report.incarnation for report in reports] == [2, 2, 2]
    assert [report.updates.uids for report in reports] == [[5], [5], [5]]
    assert reports[-1].updates.finishes == [FinishReason.LENGTH]


def test_an_abort_is_reported_once(harness: Harness) -> None:
    harness.admit(5, max_tokens=90_000)
    harness.until(bool)
    harness.send(*encode(Abort([5, 77])))
    reports, _ = harness.until(is_over)
    assert reports[-1].updates.finishes[-1] == FinishReason.ABORT
    harness.send(*encode(Flush(9, LOCAL_TIERS)))
    assert isinstance(harness.receive().message, CacheFlushed), "the aborted request was reported again"


def test_a_flush_of_an_idle_worker_also_reports_the_removed_pages(harness: Harness) -> None:
    harness.admit(5)
    harness.until(is_over)
    harness.send(*encode(Flush(1, LOCAL_TIERS)))
    assert isinstance(harness.receive().message, CacheFlushed)
    report = harness.receive().message
    assert isinstance(report, StepReport)
    assert len(report.updates.removed) == 2 * 16


def test_stats_that_changed_without_news_of_a_request_are_told_once_the_worker_rests(harness: Harness) -> None:
    harness.engine.extra_stats = {"preemptions": 1}
    harness.send(*encode(Abort([77])))
    report = harness.receive().message
    assert isinstance(report, StepReport)
    assert (report.updates.uids, report.stats.preemptions) == ([], 1)
    before, deadline = harness.engine.num_step_calls, time.monotonic() + 60
    harness.send(*encode(Abort([77])))
    while harness.engine.num_step_calls == before:  # else one turn may take both messages
        assert time.monotonic() < deadline, "nothing was done about it"
        time.sleep(0.001)
    harness.send(*encode(Inspect(3, 5)))
    answer = harness.receive().message
    assert isinstance(answer, CacheInspected), "stats that had not changed were told again"
    assert (answer.incarnation, answer.ticket, [node.depth for node in answer.nodes]) == (2, 3, [5])


def test_rows_and_steps_are_shown_to_whom_asks(harness: Harness) -> None:
    harness.admit(5)
    harness.until(is_over)
    for ticket, subject in enumerate(("rows", "steps")):
        harness.send(*encode(Watch(ticket, subject)))  # type: ignore[arg-type]
        answer = harness.receive().message
        assert isinstance(answer, EngineWatched)
        assert (answer.incarnation, answer.ticket, len(answer.rows), len(answer.steps)) == (2, ticket, 0, ticket)
        assert answer.until_s <= time.monotonic()


def test_a_flush_empties_the_tiers_it_names(harness: Harness) -> None:
    harness.admit(5)
    harness.until(is_over)
    pages = []
    for ticket, tiers in enumerate((("host",), ("device",))):
        harness.send(*encode(Flush(ticket, tiers)))  # type: ignore[arg-type]
        answer = harness.receive().message
        assert isinstance(answer, CacheFlushed)
        pages.append(answer.pages)
    assert pages == [0, 2]


def test_an_idle_worker_sleeps(harness: Harness) -> None:
    harness.admit(5)
    harness.until(is_over)
    for _ in range(20):  # in the first of them its last steps may still run
        before, begin_s = harness.engine.num_step_calls, time.monotonic()
        time.sleep(0.3)
        if harness.engine.num_step_calls - before <= 1 + (time.monotonic() - begin_s) / service.IDLE_S:
            return
    pytest.fail("it never sleeps")


def test_an_idle_worker_tells_what_changes_meanwhile_by_itself(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory that is made ready, or a store that is emptied, is shown without a request that wakes the worker."""
    monkeypatch.setattr(service, "IDLE_S", 0.02)
    harness.admit(5)  # the wait that has begun is longer
    harness.until(is_over)
    harness.engine.extra_stats = {"preemptions": 1}
    deadline = time.monotonic() + 60
    while (frames := harness.link.try_receive()) is None:
        assert time.monotonic() < deadline, "nothing was told"
        time.sleep(0.01)
    report = MessageDecoder[FromWorker](FromWorker).decode(frames).message
    assert isinstance(report, StepReport)
    assert (report.updates.uids, report.stats.preemptions) == ([], 1)
    before = harness.engine.num_step_calls
    while harness.engine.num_step_calls < before + 3:
        assert time.monotonic() < deadline, "it does not look any more"
        time.sleep(0.01)
    assert harness.link.try_receive() is None, "what had not changed was told again"


def test_a_worker_says_every_second_that_it_lives(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest, and in steps without news."""
    monkeypatch.setattr(service, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(service, "IDLE_S", 0.02)
    harness.admit(5)
    harness.until(is_over)
    harness.engine.is_quiet = True
    harness.admit(6, max_tokens=90_000)
    deadline = time.monotonic() + 60
    steps: set[int] = set()
    while len(steps) < 3:
        assert time.monotonic() < deadline, "nothing was told"
        if (frames := harness.link.try_receive()) is None:
            time.sleep(0.005)
            continue
        report = MessageDecoder[FromWorker](FromWorker).decode(frames).message
        assert isinstance(report, StepReport)
        assert not report.updates.uids
        steps.add(report.stats.steps)


def has_made(engine: CountingEngine, num_steps: int) -> bool:
    return engine.stats().steps >= num_steps


def test_a_scheduler_that_does_not_read_never_holds_up_the_steps(harness: Harness) -> None:
    num_tokens = 12_000  # more than the buffers of the socket hold
    harness.admit(5, max_tokens=num_tokens)
    for least in range(1_000, num_tokens + 1, 1_000):
        wait_until(partial(has_made, harness.engine, least), harness.engine.stats)
    reports, tokens = harness.until(is_over)
    assert tokens == reply(PROMPT, num_tokens)
    assert len(reports) < num_tokens / 10, "nothing was merged"


def test_a_scheduler_that_dies_ends_the_loop(harness: Harness) -> None:
    harness.link.close()
    harness.join()
    assert isinstance(harness.error, PeerGoneError)


def test_a_malformed_message_ends_the_loop_with_its_own_error(harness: Harness) -> None:
    harness.send(b"\xc1 nonsense")
    harness.join()
    assert isinstance(harness.error, MalformedError)


def test_a_second_configuration_ends_the_loop_as_a_breach_of_the_protocol(harness: Harness) -> None:
    harness.send(*encode(Configure(settings_of(), 0, 3)))
    harness.join()
    assert isinstance(harness.error, MalformedError)
    assert "a second Configure, for incarnation 3" in str(harness.error)
