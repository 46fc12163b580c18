"""The engine's async client: starts the scheduler process, submits token ids and yields token ids."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from hiserve.config.options import without_secrets
from hiserve.config.settings import Settings
from hiserve.core.plan import Int32Array
from hiserve.core.request import Retain, SamplingParams
from hiserve.errors import EngineError, UnavailableError, to_error
from hiserve.ipc.cache_stats import LOCAL_TIERS, TierName, TreeFacts
from hiserve.ipc.child import ChildProcess, wait_for_event
from hiserve.ipc.codec import Frames, MalformedError, MessageDecoder, Received, encode
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import (
    Abort,
    Failed,
    Flush,
    Flushed,
    Generate,
    Halted,
    Inspect,
    Inspected,
    Query,
    Started,
    StartFailed,
    Status,
    Stop,
    ToClient,
    Watch,
    Watched,
    WorkerBack,
    WorkerLost,
)
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.ipc.watching import Subject, WorkerView
from hiserve.scheduler.request_stream import RequestStream

SCHEDULER_COMMAND = (sys.executable, "-m", "hiserve.scheduler.process")
STOP_TIMEOUT_S = 10.0


class EngineClient:
    """Submits token ids and yields token ids. Made by ``start``; lives in one event loop.

    Attributes:
        started: The workers' reports at start-up.
        num_slow_readers: Streams that were ended because their unread output exceeded the limit.
        num_restarts: Workers that were ready again after one died.
        crash: The latest death of a worker.
    """

    started: Started
    _process: ChildProcess
    _watch: asyncio.Task[None]

    def __init__(self, settings: Settings, max_unread_bytes: int | None = None) -> None:
        self._settings = settings
        self._max_unread_bytes = max_unread_bytes
        self.num_slow_readers = 0
        self.num_restarts = 0
        self.crash: Crash | None = None
        self._streams: dict[int, RequestStream] = {}
        self._uids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count(1)
        self._starting: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed: str | None = None
        self._halted = ""
        self._decoder = MessageDecoder[ToClient](ToClient)

    @classmethod
    async def start(
        cls, settings: Settings, *, command: Sequence[str] = SCHEDULER_COMMAND, max_unread_bytes: int | None = None
    ) -> EngineClient:
        """Starts the scheduler, which starts the workers; returns when all are ready.

        On Linux the processes end with the thread that called this.

        Args:
            settings: Of the engine.
            command: Command line of the scheduler, without its endpoint.
            max_unread_bytes: A stream with more unread output is ended; None is no limit.

        Raises:
            HiserveError: A worker could not start; its trace is a note on the error.
        """
        client = cls(settings, max_unread_bytes)
        client._process = await ChildProcess.start(command, client._receive)
        client._process.send(encode(without_secrets(settings)))
        client._watch = asyncio.create_task(client._watch_process())
        async with AsyncExitStack() as undo:
            undo.push_async_callback(client.stop)
            client.started = await client._starting
            undo.pop_all()
        return client

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent: the engine was not stopped, and its scheduler and a worker may be alive."""
        return self._closed is None and not self._halted

    @property
    def trouble(self) -> str:
        """Reason why no request can be sent; empty when one can."""
        return self._closed or self._halted

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._settings.model.max_model_len

    @property
    def num_inflight(self) -> int:
        """Requests sent and not ended; an aborted one counts until the scheduler confirms it."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Int32Array,
        sampling: SamplingParams,
        *,
        namespace: bytes = b"",
        choice: int = 0,
        priority: int = 0,
        caller: int = 0,
        tag: str = "",
        session: bytes = b"",
        retain: Retain = (),
        num_resumed: int = 0,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields deltas until one has a finish.

        The request is sent at the first ``__anext__``. Closing the generator, or cancelling the
        task that reads it, aborts the request.

        Args:
            prompt: int32 ``[n]``. Prompt, then the resumed tokens.
            sampling: Sampling and stop parameters.
            namespace: Separates tenants' caches.
            choice: Index among the request's choices; part of the random key.
            priority: Larger is sooner, under the priority policy.
            caller: Number of the caller; callers take turns.
            tag: Name by which ``abort`` finds the request; several requests may share it.
            session: Digest that chooses a worker where no prefix does; empty without one.
            retain: Prefixes that the cache evicts last.
            num_resumed: Tokens at the end that another engine generated for the same request, which goes on after them as after
                a replay; they are not yielded.

        Raises:
            ContextLengthError: The prompt leaves no room for output. (``max_tokens`` beyond the context
                are not generated; the front end may refuse them.)
            RequestError: The prompt is invalid.
            EngineError: The engine lost the request.
            SlowReaderError: Too much of it was not read.
            UnavailableError: The engine is stopped, stopping or dead.
        """
        self._require_open()
        uid = next(self._uids)
        stream = self._streams[uid] = RequestStream(tag, self._max_unread_bytes)
        self._idle.clear()
        self._process.send(
            encode(Generate(uid, sampling, namespace, choice, priority, caller, session, retain, num_resumed), prompt)
        )
        try:
            delta = TokenDelta()
            while not delta.finish:
                delta = await stream.take()
                yield delta
        finally:
            if uid in self._streams and self._closed is None:
                self._process.send(encode(Abort([uid])))

    def abort(self, tag: str | None = None) -> int:
        """Aborts requests; each still yields its last delta, with finish ``ABORT``. Returns how many were open.

        ``tag`` is that of ``generate``; None means all requests.
        """
        uids = [uid for uid, stream in self._streams.items() if tag is None or stream.tag == tag]
        if uids and self._closed is None:
            self._process.send(encode(Abort(uids)))
        return len(uids)

    async def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        """Empties tiers of the prefix caches of all workers; returns the pages emptied.

        Raises:
            UnavailableError: The engine is stopped or dead.
        """
        answer: Flushed = await self._ask(lambda ticket: Flush(ticket, tiers))
        return answer.pages

    async def inspect(self, depth: int) -> list[TreeFacts]:
        """Returns the radix trees of all workers, from the roots to ``depth`` levels below them.

        Raises:
            UnavailableError: The engine is stopped or dead.
        """
        answer: Inspected = await self._ask(lambda ticket: Inspect(ticket, depth))
        return answer.trees

    async def watch(self, subject: Subject, since_s: float = 0.0) -> list[WorkerView]:
        """Returns the rows of all workers, or the steps that ended after ``since_s``; they record steps for ``LEASE_S``.

        Raises:
            UnavailableError: The engine is stopped or dead.
        """
        answer: Watched = await self._ask(lambda ticket: Watch(ticket, subject, since_s))
        return answer.views

    async def status(self) -> Status:
        """Returns the state of scheduler and workers.

        Raises:
            UnavailableError: The engine is stopped or dead.
        """
        answer: Status = await self._ask(Query)
        return answer

    async def stop(self, drain_s: float = 0.0, copy_s: float = 0.0) -> None:
        """Ends scheduler and workers; a second call ends them at once.

        Args:
            drain_s: Seconds for requests already sent; those left then fail. The caller refuses new ones meanwhile.
            copy_s: Seconds after that for copies of pages to the host and the store.
        """
        if self._closed is None:
            await wait_for_event(self._idle, drain_s)
        self._close("the engine was stopped; send the request again, later or to another server.")
        self._process.send(encode(Stop(copy_s)))
        try:
            await asyncio.wait_for(asyncio.shield(self._watch), STOP_TIMEOUT_S + copy_s)
        except TimeoutError:
            self._process.kill()
            await self._watch

    async def ended(self) -> str:
        """Waits until scheduler and workers have ended, on request or not, and returns the reason."""
        await asyncio.shield(self._watch)
        return self.trouble

    async def _ask(self, question: Callable[[int], Flush | Inspect | Watch | Query]) -> Any:
        """Sends a question made of its ticket, and waits for the answer."""
        self._require_open()
        ticket = next(self._tickets)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._process.send(encode(question(ticket)))
        try:
            return await answer
        finally:
            self._answers.pop(ticket, None)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise UnavailableError(self._closed)

    async def _watch_process(self) -> None:
        end = await self._process.wait()
        self._close(f"the scheduler process died ({end}).")

    def _close(self, reason: str) -> None:
        """Fails everything that is open; the first reason is kept."""
        if self._closed is not None:
            return
        self._closed = reason
        if not self._starting.done():
            self._starting.set_exception(EngineError(reason))
        for stream in self._streams.values():
            stream.fail(UnavailableError(reason))
        self._streams.clear()
        self._idle.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnavailableError(reason))

    def _receive(self, batch: list[Frames]) -> None:
        for frames in batch:
            if self._closed is not None:
                return
            try:
                self._on_message(self._decoder.decode(frames))
            except MalformedError as error:
                self._close(f"the scheduler process sent a malformed message: {error}")
                self._process.kill()

    def _on_message(self, received: Received[ToClient]) -> None:
        match received.message:
            case RequestUpdates() as updates:
                self._deliver(updates)
            case Failed() as failed:
                self._end(failed.uid).fail(to_error(failed.code, failed.message, retry_after_s=failed.retry_after_s))
            case Flushed() | Inspected() | Watched() | Status() as answer:
                if answer.ticket in self._answers and not self._answers[answer.ticket].done():
                    self._answers[answer.ticket].set_result(answer)
            case WorkerLost(crash):
                self.crash = crash
            case WorkerBack():
                self.num_restarts += 1
            case Halted(reason):
                self._halted = reason
            case Started() as started:
                if not self._starting.done():
                    self._starting.set_result(started)
            case StartFailed(message, code, trace):
                if not self._starting.done():
                    self._starting.set_exception(to_error(code, message, trace))

    def _deliver(self, updates: RequestUpdates) -> None:
        for delta in updates:
            stream = self._end(delta.uid) if delta.finish else self._stream(delta.uid)
            stream.push(delta)
            if stream.is_too_long:
                self.num_slow_readers += 1
                stream.cut()
                self._process.send(encode(Abort([delta.uid])))

    def _stream(self, uid: int) -> RequestStream:
        if uid not in self._streams:
            raise MalformedError(f"output of request {uid}, which is not open")
        return self._streams[uid]

    def _end(self, uid: int) -> RequestStream:
        stream = self._stream(uid)
        del self._streams[uid]
        if not self._streams:
            self._idle.set()
        return stream
