"""Traces of requests, for OpenTelemetry: noted in the event loop, sent by a process that may die of its collector."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from hiserve.errors import ConfigError, HiserveError
from hiserve.ipc.child import JobProcess
from hiserve.server.http.errors import CLIENT_CLOSED_REQUEST, describe
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.generation import Generation

COMMAND = (sys.executable, "-m", "hiserve.server.http.tracing_process")
PACKAGE = "opentelemetry.exporter.otlp.proto.http"
PATH = "/v1/traces"
# ``gen_ai.operation.name``
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
GONE = "client_disconnected"
MAX_WAITING = 2048
MAX_BATCH = 128
BATCH_S = 1.0  # a batch is collected for this time
PAUSE_S = 5.0  # after a batch that the collector did not take
CLOSE_S = 3.0
MAX_CHOICES = 16  # with spans of their own
MAX_HEADER_CHARS = 512

logger = logging.getLogger(__name__)


class Setup(msgspec.Struct, frozen=True):
    """First message to the process: the collector's URL, and the name of the model."""

    url: str
    model: str


class ChoiceTrace(msgspec.Struct, frozen=True, array_like=True):
    """One choice. Times are seconds since the request began, -1 if it was not reached.

    Attributes:
        index: In the reply.
        queued_s: The engine got it.
        admitted_s: A worker got it.
        first_s: Its first token.
        ended_s: Its end.
        num_generated: Tokens.
        reason: OpenAI's ``finish_reason``; empty if it was cut.
        cached: Prompt tokens from device, host and store.
    """

    index: int
    queued_s: float
    admitted_s: float
    first_s: float
    ended_s: float
    num_generated: int
    reason: str
    cached: tuple[int, int, int]


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The choices of a request, together."""

    name: str
    num_prompt: int
    num_cached: int
    num_generated: int
    num_choices: int
    max_tokens: int | None
    temperature: float
    top_p: float
    streams: bool
    choices: list[ChoiceTrace]  # the first ``MAX_CHOICES``


class RequestTrace(msgspec.Struct, frozen=True, array_like=True):
    """One request. It has no text of a prompt or a reply.

    Attributes:
        operation: ``gen_ai.operation.name``.
        route: Its path.
        request_id: As in ``x-request-id``.
        traceparent: The header; empty without one.
        tracestate: Likewise.
        server: Address and port that it came to; the port is None where there is no socket.
        began_ns: Nanoseconds since 1970.
        took_s: Until its last byte was sent.
        status: Of HTTP; 0 if it was not answered.
        error: Code of its error, or ``GONE``; empty without one.
        reply: None before the engine.
    """

    operation: str
    route: str
    request_id: str
    traceparent: str
    tracestate: str
    server: tuple[str, int | None]
    began_ns: int
    took_s: float
    status: int
    error: str
    reply: Reply | None


class OpenTrace:
    """A request that runs.

    Attributes:
        began: ``time.monotonic()``.
        choices: None before the engine.
        streams: The reply is sent as events.
    """

    __slots__ = ("began", "choices", "streams")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.choices: Choices | None = None
        self.streams = False


class Traces:
    """Records requests that ended, and sends them in batches. Used in one event loop, which it never blocks.

    Args:
        process: Sends a batch a job; the answer is empty if the collector did not take it, None if the process ended.

    Attributes:
        counts: Requests by outcome: exported; dropped, when too many waited; failed, when the collector did not take them.
    """

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._waiting: deque[RequestTrace] = deque()
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._is_failing = False
        self.counts = {"exported": 0, "dropped": 0, "failed": 0}

    def open(self) -> None:
        """Begins to send."""
        self._sending = asyncio.create_task(self._send())

    async def close(self) -> None:
        """Sends what waits, for ``CLOSE_S`` at most, and ends the process."""
        self._closing.set()
        self._news.set()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_S)
            self._sending.cancel()
            await asyncio.wait([self._sending])
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        await self._process.end()

    def begin(self, scope: Scope) -> OpenTrace | None:
        """Returns the trace of a request that has just come; None if it is not one that generates."""
        if scope["method"] != "POST" or scope["path"] not in OPERATIONS:
            return None
        trace = scope["state"]["trace"] = OpenTrace()
        return trace

    def end(self, trace: OpenTrace, scope: Scope, status: int, failure: Exception | None) -> None:
        """Notes the end of a request.

        Args:
            trace: Its trace.
            scope: Of the request.
            status: Of its answer; 0 if none began.
            failure: The error that it was answered with.
        """
        if len(self._waiting) >= MAX_WAITING:
            self.counts["dropped"] += 1
            return
        took_s = time.monotonic() - trace.began
        reply = None if trace.choices is None else _reply(trace, trace.choices)
        noted = RequestTrace(
            operation=OPERATIONS[scope["path"]],
            route=scope["path"],
            request_id=scope["state"]["request_id"],
            traceparent=_header(scope, b"traceparent"),
            tracestate=_header(scope, b"tracestate"),
            server=tuple(scope["server"]),
            began_ns=time.time_ns() - int(took_s * 1e9),
            took_s=took_s,
            status=status,
            error=_error(trace, status, failure),
            reply=reply,
        )
        self._waiting.append(noted)
        self._news.set()

    async def _send(self) -> None:
        """Sends batches until the end."""
        while True:
            if not self._waiting:
                if self._closing.is_set():
                    return
                self._news.clear()
                await self._news.wait()
            if len(self._waiting) < MAX_BATCH:
                await self._rest(BATCH_S)
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            if not await self._try(batch):
                await self._rest(PAUSE_S)

    async def _try(self, batch: Sequence[RequestTrace]) -> bool:
        """Sends a batch and counts it; returns whether the collector took it."""
        try:
            answer = await self._process.do([msgspec.msgpack.encode(batch)])
        except asyncio.CancelledError:
            self.counts["failed"] += len(batch)
            raise
        except HiserveError as error:
            answer = None
            logger.warning("a process to send traces cannot be started: %s", error)
        is_taken = answer is not None and answer[0] == b"taken"
        self.counts["exported" if is_taken else "failed"] += len(batch)
        if self._is_failing is is_taken:
            self._is_failing = not is_taken
            logger.warning("the OpenTelemetry collector %s", "takes traces again" if is_taken else "takes no traces")
        return is_taken

    async def _rest(self, seconds: float) -> None:
        """Waits, unless it is closing."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)


def open_traces(endpoint: str | None, model: str) -> Traces | None:
    """Returns the traces of ``--otel-endpoint``; None without one.

    Raises:
        ConfigError: It is not the URL of a collector, or the packages are missing.
    """
    if endpoint is None:
        return None
    url = collector_url(endpoint)
    if not _is_installed():
        raise ConfigError(
            "--otel-endpoint needs the packages of OpenTelemetry. Install them: pip install 'hiserve[otel]'.",
            param="otel_endpoint",
        )
    return Traces(JobProcess(COMMAND, msgspec.msgpack.encode(Setup(url, model))))


def collector_url(endpoint: str) -> str:
    """Returns where traces go; the path is appended to the address of a collector.

    Raises:
        ConfigError: It is not a plain URL.
    """
    try:
        parts = urlsplit(endpoint)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
    if not is_plain or parts.username is not None or parts.query or parts.fragment or not endpoint.isprintable():
        raise ConfigError(
            "--otel-endpoint must be the URL of a collector, such as http://localhost:4318, without user and query. "
            "Headers are given by OTEL_EXPORTER_OTLP_HEADERS.",
            param="otel_endpoint",
        )
    return endpoint if parts.path.endswith(PATH) else endpoint.rstrip("/") + PATH


def note_choices(request: Request, choices: Choices, *, streams: bool) -> None:
    """Adds the choices of a request to its trace, if it has one."""
    trace: OpenTrace | None = request.scope["state"].get("trace")
    if trace is not None:
        trace.choices, trace.streams = choices, streams


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _header(scope: Scope, wanted: bytes) -> str:
    """Returns a header as one text; empty without it, and if it is too long to be one."""
    found = [value for name, value in scope["headers"] if name == wanted]
    text = b",".join(found).decode("latin-1")
    return text if len(text) <= MAX_HEADER_CHARS else ""


def _error(trace: OpenTrace, status: int, failure: Exception | None) -> str:
    generations = trace.choices.generations if trace.choices else ()
    failure = failure or next((each.failure for each in generations if each.failure is not None), None)
    if failure is not None:
        return describe(failure)[2]
    if status in (0, CLIENT_CLOSED_REQUEST) or any(not each.finish for each in generations):
        return GONE
    return str(status) if status >= 400 else ""


def _reply(trace: OpenTrace, choices: Choices) -> Reply:
    first = choices.generations[0]
    sampling = first.sampling
    return Reply(
        name=first.name,
        num_prompt=choices.num_prompt,
        num_cached=choices.cached.num_tokens,
        num_generated=choices.num_generated,
        num_choices=len(choices.generations),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        streams=trace.streams,
        choices=[_choice(each, trace.began) for each in choices.generations[:MAX_CHOICES]],
    )


def _choice(generation: Generation, began: float) -> ChoiceTrace:
    """Returns the times of a choice, each within those around it: a worker's clock is not this process's."""
    timer, cached, queue_s = generation.timer, generation.cached, generation.facts.queue_s
    start = timer.arrived - began
    ended_s = time.monotonic() - began if timer.e2e_s is None else start + timer.e2e_s
    queued_s = ended_s if timer.queued is None else timer.queued - began
    first_s = -1.0 if timer.ttft_s is None else start + timer.ttft_s
    admitted_s = -1.0
    if queue_s >= 0:
        admitted_s = min(queued_s + queue_s, ended_s if first_s < 0 else first_s)
    reason = generation.reason or ""
    by_tier = cached.device, cached.host, cached.store
    num_generated = len(generation.tokens)
    return ChoiceTrace(generation.choice, queued_s, admitted_s, first_s, ended_s, num_generated, reason, by_tier)
