"""The scheduler process: joins client, dispatcher and workers. ``python -m hiserve.scheduler.process ENDPOINT``."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from hiserve.config.settings import Settings
from hiserve.core.digest import chain_of
from hiserve.core.plan import Int32Array
from hiserve.errors import EngineError, HiserveError, RequestError, UnavailableError, trace_of
from hiserve.ipc.cache_stats import TreeFacts
from hiserve.ipc.channel import AsyncChannel, Link
from hiserve.ipc.child import connect_to_parent, log_to_stderr
from hiserve.ipc.codec import Frames, MalformedError, MessageDecoder, Received, encode
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import (
    Abort,
    Admit,
    CacheFlushed,
    CacheInspected,
    EngineWatched,
    Failed,
    Flush,
    Flushed,
    FromWorker,
    Generate,
    Halted,
    Inspect,
    Inspected,
    Query,
    Ready,
    Started,
    StartFailed,
    Status,
    StepReport,
    Stop,
    ToScheduler,
    Watch,
    Watched,
    WorkerBack,
    WorkerLost,
)
from hiserve.ipc.updates import MergedUpdates, RequestUpdates
from hiserve.ipc.watching import WorkerView
from hiserve.scheduler.dispatcher import Dispatcher
from hiserve.scheduler.placement import PrefixIndex
from hiserve.scheduler.queue import POLICIES
from hiserve.scheduler.supervisor import WORKER_COMMAND, Supervisor

logger = logging.getLogger(__name__)

LINGER_MS = 1000
PARENT_DIED = signal.SIGHUP

Question = Flush | Inspect | Watch
Answer = CacheFlushed | CacheInspected | EngineWatched


@dataclass(slots=True)
class _OpenQuestion:
    question: Question
    waiting: set[int]  # workers that have not answered
    answers: dict[int, Answer] = field(default_factory=dict)  # by worker

    def conclusion(self) -> Flushed | Inspected | Watched:
        """Returns the answer for the client."""
        ticket, answers = self.question.ticket, sorted(self.answers.items())
        if isinstance(self.question, Flush):
            return Flushed(ticket, sum(answer.pages for _, answer in answers if isinstance(answer, CacheFlushed)))
        if isinstance(self.question, Watch):
            views = [
                WorkerView(replica, answer.incarnation, answer.until_s, answer.rows, answer.steps)
                for replica, answer in answers
                if isinstance(answer, EngineWatched)
            ]
            return Watched(ticket, views)
        trees = [
            TreeFacts(replica, answer.incarnation, answer.nodes)
            for replica, answer in answers
            if isinstance(answer, CacheInspected)
        ]
        return Inspected(ticket, trees)


class Broadcast:
    """Sends a question to several workers and joins their answers.

    Args:
        send: Sends frames to a worker.
        reply: Sends frames to the client.
    """

    def __init__(self, send: Callable[[int, Frames], None], reply: Callable[[Frames], None]) -> None:
        self._send = send
        self._reply = reply
        self._open: dict[int, _OpenQuestion] = {}

    def ask(self, question: Question, replicas: Iterable[int]) -> None:
        """Sends a question to these workers; without workers, replies at once."""
        self._open[question.ticket] = _OpenQuestion(question, set(replicas))
        for replica in self._open[question.ticket].waiting:
            self._send(replica, encode(question))
        self._conclude()

    def answered(self, replica: int, answer: Answer) -> None:
        """Records the answer of a worker; an answer without an open question is ignored."""
        if answer.ticket in self._open:
            self._open[answer.ticket].answers[replica] = answer
            self._open[answer.ticket].waiting.discard(replica)
            self._conclude()

    def lost(self, replica: int) -> None:
        """Stops waiting for a dead worker."""
        for each in self._open.values():
            each.waiting.discard(replica)
        self._conclude()

    def _conclude(self) -> None:
        for ticket in [ticket for ticket, each in self._open.items() if not each.waiting]:
            self._reply(encode(self._open.pop(ticket).conclusion()))


class SchedulerService:
    """Carries messages between the client's channel, the dispatcher and the supervisor.

    Everything runs in callbacks of one event loop; an exception in any of them ends the process.

    Args:
        settings: Of the engine.
        link: The client's.
        worker_command: Command line of a worker, without its endpoint.
    """

    def __init__(self, settings: Settings, link: Link, worker_command: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.set_exception_handler(self._broken)
        loop.add_signal_handler(PARENT_DIED, self._end, 0)
        self._page_size = settings.cache.page_size
        self._decoder = MessageDecoder[ToScheduler](ToScheduler)
        self._late = MergedUpdates()
        self._num_malformed = 0
        self._abandoned: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        timeouts = settings.scheduler.queue_timeout_s, settings.scheduler.request_timeout_s
        # The shortest time to the deadline of a new request.
        self._soonest_s = min(filter(None, timeouts), default=math.inf)
        self._replicas = settings.parallel.replicas
        self._copy_s = 0.0
        index = PrefixIndex(self._page_size, chain_of(is_strong=settings.cache.store is not None))
        self._dispatcher = Dispatcher(self, POLICIES[settings.scheduler.policy](), index, settings.scheduler)
        self._supervisor = Supervisor(settings, worker_command, self)
        self._client = AsyncChannel(
            link, on_messages=self._receive, on_writable=self._send_late, on_gone=lambda: self._end(0)
        )
        self._broadcast = Broadcast(self._supervisor.send, self._client.send)

    async def run(self) -> int:
        """Serves until the client ends it or is gone; returns the exit code."""
        supervision = asyncio.create_task(self._supervisor.run())
        supervision.add_done_callback(self._supervised)
        self._supervisor.started.add_done_callback(self._started)
        try:
            return await self._ended
        finally:
            await self._supervisor.stop(self._copy_s)
            self._client.close(LINGER_MS)

    # --- from the client ------------------------------------------------------------------

    def _receive(self, batch: list[Frames]) -> None:
        for frames in batch:
            try:
                self._handle(self._decoder.decode(frames))
            except MalformedError as error:
                self._num_malformed += 1
                logger.error("the client sent a malformed message: %s", error)
                if isinstance(error.message, Generate):
                    self.failed(error.message.uid, RequestError(f"malformed request: {error}"))
        self._dispatcher.dispatch()
        self._set_timer()

    def _handle(self, received: Received[ToScheduler]) -> None:
        match received.message:
            case Generate() as message:
                self._dispatcher.submit(message, received.tokens)
            case Abort(uids):
                self._dispatcher.abort(uids)
            case Flush() | Inspect() | Watch() as question:
                self._broadcast.ask(question, self._supervisor.ready_replicas())
            case Query(ticket):
                self._client.send(encode(self._status(ticket)))
            case Stop(copy_s):
                if self._ended.done():
                    self._supervisor.kill()
                self._copy_s = copy_s
                self._end(0)

    def _set_timer(self) -> None:
        """Sets the timer to the next deadline, unless it is set to an earlier time.

        Deadlines are in the order of acceptance: no new request has an earlier deadline than an older one.
        """
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + self._soonest_s:
                return
            self._timer.cancel()
        delay_s = self._dispatcher.seconds_to_deadline()
        self._timer = None if delay_s is None else loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._dispatcher.expire()
        self._set_timer()

    def _status(self, ticket: int) -> Status:
        return Status(
            ticket=ticket,
            queued=len(self._dispatcher.queue),
            queued_tokens=self._dispatcher.queue.num_tokens,
            workers=self._supervisor.facts(),
            stale_messages=self._supervisor.num_stale,
            malformed_messages=self._num_malformed + self._supervisor.num_malformed,
            replays=self._dispatcher.replays.stats(),
            crash=self._supervisor.crash,
            recovery=self._supervisor.recovery_times.last,
        )

    # --- from the dispatcher --------------------------------------------------------------

    def updated(self, updates: RequestUpdates) -> None:
        """Sends output on, or merges it while the client is slow."""
        if self._late or not self._client.try_send(encode(updates)):
            self._late.merge(updates)

    def failed(self, uid: int, error: HiserveError) -> None:
        """Sends the client the error, after all tokens of the request."""
        self._send_late()
        self._client.send(encode(Failed(uid, error.status, error.code, error.message, error.retry_after_s)))

    def admit(self, replica: int, message: Admit, tokens: Int32Array) -> None:
        """Sends a worker a request."""
        self._supervisor.send(replica, encode(message, tokens))

    def drop(self, replica: int, uids: list[int]) -> None:
        """Asks a worker to abort requests."""
        self._supervisor.send(replica, encode(Abort(uids)))

    def _send_late(self) -> None:
        if self._late:
            self._client.send(encode(self._late.take()))

    # --- from the supervisor --------------------------------------------------------------

    def worker_ready(self, replica: int, ready: Ready) -> None:
        """Lets the dispatcher use the worker."""
        assert ready.page_size == self._page_size, f"pages of {ready.page_size} tokens, configured {self._page_size}"
        self._dispatcher.worker_ready(replica, ready)
        if ready.incarnation > 1:
            self._client.send(encode(WorkerBack(replica, ready.incarnation)))

    def worker_sent(self, replica: int, received: Received[FromWorker]) -> None:
        """Passes on its report or answer.

        Raises:
            MalformedError: It contradicts the ledger.
        """
        message = received.message
        if isinstance(message, StepReport):
            self._dispatcher.report(replica, message.updates)
        elif isinstance(message, Answer):
            self._broadcast.answered(replica, message)

    def worker_idle(self) -> None:
        """Dispatches requests for returned credits."""
        self._dispatcher.dispatch()

    def worker_lost(self, replica: int) -> list[int]:
        """Requeues the requests that it held; returns their uids."""
        uids = self._dispatcher.worker_lost(replica)
        self._broadcast.lost(replica)
        self._dispatcher.dispatch()
        self._set_timer()
        return uids

    def worker_reaped(self, crash: Crash) -> None:
        """Reports the death to the client, which may outlive this process."""
        self._client.send(encode(WorkerLost(crash)))

    def worker_abandoned(self, replica: int, error: HiserveError) -> None:
        """Refuses everything once no worker is left."""
        self._abandoned.add(replica)
        self._dispatcher.worker_abandoned(replica)
        if len(self._abandoned) == self._replicas:
            refusal = UnavailableError(f"no worker is left: {error.message}")
            self._dispatcher.close(refusal)
            self._client.send(encode(Halted(refusal.message)))
        self._dispatcher.dispatch()

    # --- the process itself ---------------------------------------------------------------

    def _started(self, started: asyncio.Future[None]) -> None:
        error = started.exception()
        if error is None:
            self._client.send(encode(Started(os.getpid(), self._supervisor.facts())))
        elif isinstance(error, HiserveError):
            self._client.send(encode(StartFailed(error.message, error.code, trace_of(error))))
            self._end(1)

    def _supervised(self, supervision: asyncio.Task[None]) -> None:
        error = supervision.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _end(self, returncode: int) -> None:
        if not self._ended.done():
            self._ended.set_result(returncode)

    def _broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._ended.done():
            self._ended.set_exception(context.get("exception") or EngineError(context["message"]))


async def _serve(settings: Settings, link: Link, worker_command: Sequence[str]) -> int:
    return await SchedulerService(settings, link, worker_command).run()


def main(endpoint: str, worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Runs the process; returns its exit code."""
    link, frames = connect_to_parent(endpoint, PARENT_DIED)
    settings = MessageDecoder[Settings](Settings).decode(frames).message
    log_to_stderr(settings)
    return int(uvloop.run(_serve(settings, link, worker_command)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
