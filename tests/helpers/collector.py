"""Collectors of OpenTelemetry: one in memory, one over HTTP, and some that are broken or hostile."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hiserve.ipc.codec import Frames
from hiserve.server.http.tracing import Setup
from hiserve.server.http.tracing_process import Sender


class InMemory:
    """Stands for the ``JobProcess`` of traces: makes spans of each batch and keeps them.

    Attributes:
        spans: All of them, in the order of their ends.
        batches: As they came.
    """

    def __init__(self, _: object, setup: bytes) -> None:
        self._exporter = InMemorySpanExporter()
        self._sender = Sender(self._exporter, msgspec.msgpack.decode(setup, type=Setup).model)
        self.batches: list[bytes] = []

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    async def do(self, frames: Frames) -> Frames:
        self.batches.append(bytes(frames[0]))
        return [b"taken" if self._sender.send(frames[0]) else b""]

    async def end(self) -> None:
        """There is no process."""


@dataclass
class Sink:
    """A collector over HTTP.

    Attributes:
        url: Its address.
        spans: Name and attributes, ids and times of each span that came.
        resources: Attributes of their resources.
        headers: Of each request.
        raw: Bodies.
    """

    url: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces", path
        body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        self.headers.append(headers)
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_attributes(group.resource.attributes))
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append(
                    {
                        "name": span.name,
                        "trace_id": span.trace_id.hex(),
                        "span_id": span.span_id.hex(),
                        "parent_id": span.parent_span_id.hex(),
                        "start": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "attributes": _attributes(span.attributes),
                    }
                )


@contextlib.contextmanager
def sink() -> Iterator[Sink]:
    """Runs a collector that takes all."""
    found = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def broken(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Runs a collector that does this with each connection; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_ones.append(connection)
            with contextlib.suppress(OSError):
                behave(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for each in (listener, *open_ones):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
