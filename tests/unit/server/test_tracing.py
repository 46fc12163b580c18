"""A trace of each request, whatever becomes of it, and of its collector."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse
from hiserve.errors import ConfigError, EngineError, HiserveError, InvariantError, OverloadedError
from hiserve.server.http import tracing, tracing_process
from hiserve.server.http.tracing import RequestTrace, Setup, collector_url, open_traces
from tests.helpers.asgi import Call
from tests.helpers.collector import InMemory, broken, sink
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.waiting import PATIENCE_S, until
from tests.unit.server.conftest import NUM_STEPS, Server, make_server, reply_script

SECRET = "MERIDIAN"  # of prompts: no span may have it
CHAT = {"messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]}
# Each route that generates: its path, operation and body.
ROUTES = {
    "/v1/chat/completions": ("chat", CHAT),
    "/v1/messages": ("chat", {"messages": CHAT["messages"][1:], "system": SECRET, "max_tokens": 100}),
    "/v1/responses": ("chat", {"input": SECRET, "instructions": SECRET, "metadata": {"secret": SECRET}}),
    "/v1/completions": ("text_completion", {"prompt": SECRET, "max_tokens": 100}),
    "/generate": ("text_completion", {"text": SECRET, "sampling_params": {"max_new_tokens": 100}}),
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Traced:
    """A server with a collector in memory."""

    server: Server
    collector: InMemory

    async def spans(self, *calls: Call) -> list[ReadableSpan]:
        """Waits for the ends of some requests and for their spans; returns all spans by their start."""
        for call in calls:
            with contextlib.suppress(InvariantError):  # of the engine, which the application raises again to be logged
                await call.end()
        await until(lambda: len(roots(self.collector.spans)) >= len(calls))
        return sorted(self.collector.spans, key=lambda span: span.start_time or 0)


def roots(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.kind is SpanKind.SERVER]


def phases(spans: list[ReadableSpan]) -> list[str]:
    return [span.name for span in spans if span.kind is SpanKind.INTERNAL]


@contextlib.asynccontextmanager
async def serving(endpoint: str, **settings: Any) -> AsyncIterator[Server]:
    made = make_server(FakeEngineClient(script=lambda _: reply_script()), otel_endpoint=endpoint, **settings)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


@pytest_asyncio.fixture
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traced]:
    collectors: list[InMemory] = []

    def start(command: object, setup: bytes) -> InMemory:
        collectors.append(InMemory(command, setup))
        return collectors[-1]

    monkeypatch.setattr(tracing, "JobProcess", start)
    monkeypatch.setattr(tracing, "BATCH_S", 0.0)
    monkeypatch.setattr(tracing, "PAUSE_S", 0.0)
    async with serving("http://collector:4318") as server:
        yield Traced(server, collectors[0])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_is_a_span_with_its_phases_and_no_text(traced: Traced, path: str, streams: bool) -> None:
    operation, body = ROUTES[path]
    engine = traced.server.engine
    engine.cached, engine.queue_s = CacheUse(device=1, host=1), 0.0
    call = traced.server.call("POST", path, {**body, "stream": streams, "user": SECRET}, x_request_id="r-7")
    root, *others = await traced.spans(call)
    assert call.status == 200, call.text
    assert (root.name, root.kind, root.status.status_code) == (f"{operation} tiny", SpanKind.SERVER, StatusCode.UNSET)
    found = dict(root.attributes or {})
    assert found.pop("gen_ai.response.id")
    assert found.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert found.pop("gen_ai.request.max_tokens", 100) == 100
    assert found == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "hiserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": streams,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(engine.seen[0].prompt),
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": NUM_STEPS,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": 80,
        "hiserve.request.id": "r-7",
    }
    assert phases(others) == ["queue", "prefill", "decode"]
    queue, prefill, decode = others
    edges = [root.start_time, queue.start_time, queue.end_time, prefill.end_time, decode.end_time, root.end_time]
    assert edges == sorted(edges, key=lambda at: at or 0)
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert all(each.parent and root.context and each.parent.span_id == root.context.span_id for each in others)
    assert (prefill.attributes or {})["hiserve.cached_tokens.host"] == 1
    assert (decode.attributes or {})["hiserve.output_tokens"] == NUM_STEPS
    shown = b"".join(traced.collector.batches) + "".join(span.to_json() for span in (root, *others)).encode()
    assert SECRET.encode() not in shown
    assert await traced.server.metric("hiserve:traced_requests_total", outcome="exported") == 1


async def test_a_header_that_is_too_long_is_not_kept(traced: Traced) -> None:
    long = "a=" + (tracing.MAX_HEADER_CHARS - 1) * "b"
    call = traced.server.call("POST", "/v1/chat/completions", CHAT, traceparent=PARENT, tracestate=long)
    await traced.spans(call)
    (batch,) = traced.collector.batches
    assert PARENT.encode() in batch and long.encode() not in batch


async def test_a_request_of_a_batch_came_to_no_port(traced: Traced) -> None:
    """``hiserve generate --batch`` calls the application without a socket."""
    transport = httpx.ASGITransport(traced.server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await until(lambda: roots(traced.collector.spans))
    (root,) = roots(traced.collector.spans)
    attributes = root.attributes or {}
    assert attributes["server.address"] == "batch" and "server.port" not in attributes


async def test_the_queue_lasts_as_long_as_the_engine_says(traced: Traced) -> None:
    gate = asyncio.Event()

    async def step(_: int) -> None:
        await gate.wait()

    traced.server.engine.step, traced.server.engine.queue_s = step, 0.003
    call = traced.server.call("POST", "/v1/chat/completions", CHAT)
    await until(lambda: traced.server.engine.num_inflight == 1)
    await asyncio.sleep(0.01)  # longer than it says
    gate.set()
    _, queue, *_ = await traced.spans(call)
    assert queue.end_time and queue.start_time
    assert abs(queue.end_time - queue.start_time - 3_000_000) <= 1_000


async def test_the_queue_ends_before_the_first_token_whatever_a_workers_clock_says(traced: Traced) -> None:
    traced.server.engine.queue_s = 1000.0
    spans = {span.name: span for span in await traced.spans(traced.server.call("POST", "/v1/chat/completions", CHAT))}
    assert spans["queue"].end_time == spans["prefill"].end_time == spans["decode"].start_time


def test_the_process_has_a_limit_for_each_batch_and_none_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[float] = []

    class Exporter(InMemorySpanExporter):
        def __init__(self, **_: Any) -> None:
            super().__init__()

        def export(self, spans: Any) -> SpanExportResult:
            during.append(signal.getitimer(signal.ITIMER_REAL)[0])
            return super().export(spans)

    noted = RequestTrace("chat", "/v1/chat/completions", "1", "", "", ("x", 80), 0, 1.0, 200, "", None)
    jobs: list[Any] = []
    setup = msgspec.msgpack.encode(Setup("http://x", "tiny"))
    monkeypatch.setattr(tracing_process, "connect_to_parent", lambda *_: (None, [setup]))
    monkeypatch.setattr(tracing_process, "serve_jobs", lambda _, do: jobs.append(do) or 0)
    monkeypatch.setattr(tracing_process, "OTLPSpanExporter", Exporter)
    monkeypatch.setattr(tracing_process.os, "nice", lambda _: 0)
    monkeypatch.setattr(tracing_process.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "setLevel", lambda _: None)
    assert tracing_process.serve("endpoint") == 0
    try:
        for _ in range(2):
            assert jobs[0]([msgspec.msgpack.encode([noted])]) == [b"taken"]
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(during) == 2 and all(0 < left_s <= tracing_process.JOB_S for left_s in during)


async def test_the_trace_goes_on_with_that_of_the_client(traced: Traced) -> None:
    call = traced.server.call("POST", "/v1/chat/completions", CHAT, traceparent=PARENT, tracestate="a=1,b=2")
    spans = await traced.spans(call)
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {PARENT[3:35]}
    (root,) = roots(spans)
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT[36:52]
    assert root.parent.is_remote
    assert all(span.context and span.context.trace_state.to_header() == "a=1,b=2" for span in spans)


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "nonsense"},
        {"traceparent": PARENT.replace("00-0af", "ff-0af")},
        {"traceparent": "00-" + 32 * "0" + "-b7ad6b7169203331-01"},
        {"traceparent": PARENT + 600 * "-x"},
        {"traceparent": "\xff\xfe"},
        {"tracestate": "a=1"},
    ],
)
async def test_a_header_that_is_no_trace_begins_a_new_one(traced: Traced, headers: dict[str, str]) -> None:
    spans = await traced.spans(traced.server.call("POST", "/v1/chat/completions", CHAT, **headers))
    (root,) = roots(spans)
    assert root.parent is None
    assert root.context and f"{root.context.trace_id:032x}" != PARENT[3:35]


async def test_a_trace_that_the_client_does_not_sample_is_not_exported(traced: Traced) -> None:
    headers = {"traceparent": PARENT[:-1] + "0", "tracestate": 40 * "a=1,=,"}
    await traced.server.call("POST", "/v1/chat/completions", CHAT, **headers).end()
    (root, *_) = await traced.spans(traced.server.call("POST", "/v1/chat/completions", CHAT))
    assert root.parent is None
    assert len(roots(traced.collector.spans)) == 1


FAILURES: list[tuple[str, Exception, int, str]] = [
    ("refused", OverloadedError("full"), 429, "overloaded"),
    ("late", HiserveError("late", code="queue_timeout"), 500, "queue_timeout"),
    ("broken", EngineError("broken"), 500, "engine_error"),
    ("ours", InvariantError("ours"), 500, "internal_error"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("failure", "status", "code"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES]
)
async def test_a_failure_has_its_code(traced: Traced, path: str, failure: Exception, status: int, code: str) -> None:
    traced.server.engine.fail_at, traced.server.engine.failure = 0, failure
    call = traced.server.call("POST", path, ROUTES[path][1])
    root, _ = await traced.spans(call)
    found = root.attributes or {}
    assert (found["http.response.status_code"], found["error.type"]) == (status, code)
    assert (root.status.status_code is StatusCode.ERROR) == (status >= 500)
    assert "gen_ai.response.finish_reasons" not in found


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_refused_before_the_engine_is_one_span(traced: Traced, path: str) -> None:
    bad = traced.server.call("POST", path, {**ROUTES[path][1], "stream": "yes"})
    unknown = traced.server.call("POST", path, b"{")
    other = traced.server.call("POST", path, {**ROUTES[path][1], "model": SECRET})
    spans = await traced.spans(bad, unknown, other)
    told = [(span.attributes or {}) for span in spans]
    assert sorted((each["http.response.status_code"], each["error.type"]) for each in told) == [
        (400, "invalid_json"),
        (400, "invalid_request"),
        (404, "model_not_found"),
    ]
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)
    assert SECRET not in "".join(span.to_json() for span in spans)


async def test_a_server_that_ends_refuses_with_a_span(traced: Traced) -> None:
    traced.server.handle.drain()
    call = traced.server.call("POST", "/v1/messages", ROUTES["/v1/messages"][1])
    (root,) = await traced.spans(call)
    assert call.status == 529, "as Anthropic's clients know it"
    assert (root.attributes or {})["error.type"] == "unavailable"


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_fails_is_an_error_of_a_request_answered_200(traced: Traced, path: str) -> None:
    traced.server.engine.fail_at, traced.server.engine.failure = 3, EngineError("broken")
    root, *others = await traced.spans(traced.server.call("POST", path, {**ROUTES[path][1], "stream": True}))
    found = root.attributes or {}
    assert (found["http.response.status_code"], found["error.type"]) == (200, "engine_error")
    assert root.status.status_code is StatusCode.ERROR
    assert found["gen_ai.usage.output_tokens"] == 3
    assert phases(others) == ["queue", "prefill", "decode"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("at", [0, 2])
async def test_a_client_that_goes_away_is_named(traced: Traced, streams: bool, at: int) -> None:
    held = asyncio.Event()

    async def step(index: int) -> None:
        if index >= at:
            held.set()
            await asyncio.Event().wait()

    traced.server.engine.step = step
    call = traced.server.call("POST", "/v1/chat/completions", {**CHAT, "stream": streams})
    await held.wait()
    call.disconnect()
    root, *others = await traced.spans(call)
    assert (root.attributes or {})["error.type"] == tracing.GONE
    assert phases(others) == (["queue", "prefill", "decode"] if at else ["queue"])


async def test_an_abort_is_a_reason_to_finish(traced: Traced) -> None:
    held = asyncio.Event()

    async def step(index: int) -> None:
        if index == 2:
            held.set()
            await asyncio.Event().wait()

    traced.server.engine.step = step
    call = traced.server.call("POST", "/v1/chat/completions", {**CHAT, "stream": True})
    await held.wait()
    await traced.server.post("/abort_request", {"abort_all": True})
    root, *_ = await traced.spans(call)
    assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert "error.type" not in (root.attributes or {})


@pytest.mark.parametrize(("num_choices", "num_shown"), [(3, 3), (20, tracing.MAX_CHOICES)])
async def test_each_choice_has_its_phases(traced: Traced, num_choices: int, num_shown: int) -> None:
    traced.server.engine.finish = FinishReason.LENGTH
    root, *others = await traced.spans(traced.server.call("POST", "/v1/chat/completions", {**CHAT, "n": num_choices}))
    found = root.attributes or {}
    assert found["gen_ai.response.finish_reasons"] == num_shown * ("length",)
    assert found["gen_ai.request.choice.count"] == num_choices
    assert found["gen_ai.usage.output_tokens"] == num_choices * NUM_STEPS
    assert found["gen_ai.usage.input_tokens"] == len(traced.server.engine.seen[0].prompt)
    for name in ("queue", "prefill", "decode"):
        of = [(span.attributes or {})["hiserve.choice"] for span in others if span.name == name]
        assert sorted(of) == list(range(num_shown))


async def test_what_does_not_generate_has_no_trace(traced: Traced) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/v1/chat/completions", "/nowhere"):
        await traced.server.get(path)
    await traced.server.post("/v1/messages/count_tokens", {"messages": CHAT["messages"][1:]})
    await traced.server.post("/tokenize", {"prompt": "Hi"})
    root, *_ = await traced.spans(traced.server.call("POST", "/v1/chat/completions", CHAT))
    assert roots(traced.collector.spans) == [root]


async def test_a_server_without_a_collector_has_nothing_of_it(server: Server) -> None:
    await server.chat("Hi")
    assert "traced" not in (await server.get("/metrics")).text
    assert "trace" not in server.app.user_middleware[0].kwargs or not server.app.user_middleware[0].kwargs["traces"]


async def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the process and HTTP, with what the SDK's own variables say."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=of-the-collector")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    monkeypatch.setattr(tracing, "CLOSE_S", PATIENCE_S)
    with sink() as collector:
        async with serving(collector.url) as server:
            for path, (_, body) in ROUTES.items():
                assert (await server.post(path, body, traceparent=PARENT)).status == 200
        assert server.app is not None  # closing sends what waits
    assert [span["name"] for span in collector.spans].count("prefill") == len(ROUTES)
    assert {span["trace_id"] for span in collector.spans} == {PARENT[3:35]}
    assert {span["attributes"]["http.route"] for span in collector.spans if "http.route" in span["attributes"]} == {
        *ROUTES
    }
    assert all(span["start"] <= span["end"] for span in collector.spans)
    assert all(each["x-key"] == "of-the-collector" for each in collector.headers)
    assert collector.resources[0]["service.name"] == "hiserve"
    assert collector.resources[0]["deployment.environment"] == "lab"
    assert not any(SECRET.encode() in body for body in collector.raw)


def say_nothing(_: socket.socket) -> None:
    """Answers never."""


def say(answer: bytes, times: int = 1) -> Any:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        for _ in range(times):
            connection.sendall(answer)

    return behave


COLLECTORS = {
    "silent": say_nothing,
    "endless": say(b"HTTP/1.1 200 OK\r\n\r\n" + 2**16 * b"x", 2**30),
    "wrong": say(b"\x00\xff\x00\xff"),
    "busy": say(b"HTTP/1.1 429 X\r\nretry-after: 1e9\r\ncontent-length: 0\r\n\r\n"),
    "unkind": say(b"HTTP/1.1 400 X\r\ncontent-length: 0\r\n\r\n"),
}


@pytest.mark.parametrize("kind", [*COLLECTORS, "dead"])
async def test_no_collector_delays_a_request_or_the_end(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each is asked, by the process, and takes nothing; requests go on meanwhile, and after it. Most of them are dropped."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    monkeypatch.setattr(tracing, "BATCH_S", 0.0)
    monkeypatch.setattr(tracing, "PAUSE_S", 1e9)
    monkeypatch.setattr(tracing, "MAX_WAITING", 4)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    with broken(COLLECTORS.get(kind, say_nothing)) as url:
        async with serving(url if kind in COLLECTORS else "http://127.0.0.1:1") as server:
            traces = server.app.user_middleware[0].kwargs["traces"]
            assert (await server.chat("Hi")).status == 200
            await until(lambda: traces.counts["failed"])
            for _ in range(10):
                assert (await server.chat("Hi")).status == 200
            assert await server.metric("hiserve:traced_requests_total", outcome="dropped") == 6
            assert await server.metric("hiserve:traced_requests_total", outcome="exported") == 0


async def test_a_process_that_never_answers_holds_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    class Stuck(InMemory):
        async def do(self, frames: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(tracing, "JobProcess", Stuck)
    monkeypatch.setattr(tracing, "BATCH_S", 0.0)
    monkeypatch.setattr(tracing, "PAUSE_S", 0.0)
    monkeypatch.setattr(tracing, "MAX_WAITING", 3)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.0)
    async with serving("http://collector") as server:
        await server.chat("Hi")
        await asked.wait()
        for _ in range(5):
            assert (await server.chat("Hi")).status == 200
        assert await server.metric("hiserve:traced_requests_total", outcome="dropped") == 2
        assert await server.metric("hiserve:traced_requests_total", outcome="failed") == 0


async def test_a_collector_that_comes_back_is_told_of_once_and_what_a_process_keeps_is_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [b"", b"", b"taken", b"taken", b""]
    is_stuck = asyncio.Event()

    class Moody(InMemory):
        async def do(self, frames: Any) -> Any:
            if not answers:
                is_stuck.set()
                await asyncio.Event().wait()
            return [answers.pop(0)]

    monkeypatch.setattr(tracing, "JobProcess", Moody)
    monkeypatch.setattr(tracing, "BATCH_S", 0.0)
    monkeypatch.setattr(tracing, "PAUSE_S", 0.0)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.0)
    async with serving("http://collector") as server:
        traces = server.app.user_middleware[0].kwargs["traces"]
        for number in range(1, 6):
            await server.chat("Hi")
            await until(lambda number=number: sum(traces.counts.values()) == number)
        await server.chat("Hi")
        await is_stuck.wait()
    assert traces.counts == {"exported": 2, "dropped": 0, "failed": 4}
    told = [record.message for record in caplog.records if "collector" in record.message]
    assert [text.rpartition("collector ")[2] for text in told] == [
        "takes no traces",
        "takes traces again",
        "takes no traces",
    ]


async def test_a_process_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    program = f"""
import os, sys
if not os.path.exists({str(mark)!r}):
    open({str(mark)!r}, "w")
    sys.exit(3)
os.execv(sys.executable, [sys.executable, "-m", *{tracing.COMMAND[2:]!r}, sys.argv[1]])
"""
    monkeypatch.setattr(tracing, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(tracing, "BATCH_S", 0.0)
    monkeypatch.setattr(tracing, "PAUSE_S", 0.0)
    with sink() as collector:
        async with serving(collector.url) as server:
            traces = server.app.user_middleware[0].kwargs["traces"]
            for outcome in ("failed", "exported"):
                await server.chat("Hi")
                await until(lambda outcome=outcome: traces.counts[outcome] == 1)
    assert len([span for span in collector.spans if not span["parent_id"]]) == 1


def test_without_the_packages_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (None, ModuleNotFoundError("No module named 'opentelemetry'")):

        def find(_: str, missing: Any = missing) -> None:
            if missing:
                raise missing

        monkeypatch.setattr(importlib.util, "find_spec", find)
        with pytest.raises(ConfigError, match=r"pip install 'hiserve\[otel\]'"):
            open_traces("http://localhost:4318", "tiny")
    assert open_traces(None, "tiny") is None


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://[::1]:4318/otlp", "http://[::1]:4318/otlp/v1/traces"),
        ("http://host/v1/traces", "http://host/v1/traces"),
    ],
)
def test_the_path_of_traces_is_appended(given: str, url: str) -> None:
    assert collector_url(given) == url


@pytest.mark.parametrize(
    "given",
    ["", "localhost:4318", "grpc://host", "http://", "http://host:x", "http://host:70000", "http://[::1", "http://u:p@host",
     "http://host?key=1", "http://host#a", "http://host\n", "file:///etc/passwd"],
)  # fmt: skip
def test_what_is_no_url_of_a_collector_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318") as caught:
        collector_url(given)
    assert caught.value.param == "otel_endpoint"


async def test_requests_that_wait_at_the_end_are_sent_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Slow(InMemory):
        async def do(self, frames: Any) -> Any:
            await asyncio.sleep(0)
            sizes.append(len(msgspec.msgpack.decode(frames[0])))
            return [b"taken"]

    monkeypatch.setattr(tracing, "JobProcess", Slow)
    monkeypatch.setattr(tracing, "BATCH_S", 1e9)
    monkeypatch.setattr(tracing, "PAUSE_S", 0.0)
    monkeypatch.setattr(tracing, "CLOSE_S", 1e9)
    monkeypatch.setattr(tracing, "MAX_BATCH", 4)
    async with serving("http://collector") as server:
        traces = server.app.user_middleware[0].kwargs["traces"]
        for _ in range(3):
            await server.chat("Hi")
        assert traces.counts["exported"] == 0
        monkeypatch.setattr(tracing, "MAX_BATCH", 2)
    assert traces.counts == {"exported": 3, "dropped": 0, "failed": 0} and sizes == [2, 1]
