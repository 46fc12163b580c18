"""Sends traces to a collector: ``python -m hiserve.server.http.tracing_process ENDPOINT``.

``http.tracing`` starts it and sends one batch at a time. The kernel ends the process if a collector takes too long, or
answers with more than memory holds.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from importlib.metadata import version

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hiserve.ipc.child import bound_memory, connect_to_parent, serve_jobs
from hiserve.ipc.codec import Frames
from hiserve.server.http.tracing import ChoiceTrace, Reply, RequestTrace, Setup

JOB_S = 30.0  # the exporter's own limit is of each read
MAX_MEMORY_BYTES = 256 * 2**20  # beyond what it has at its start
NICENESS = 10  # the engine and the event loop have priority
_BATCH = msgspec.msgpack.Decoder(list[RequestTrace])


class Sender:
    """Turns traces into spans and exports them.

    Args:
        exporter: To the collector.
        model: Name of the served model.
    """

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        self._exporter = exporter
        self._model = model
        self._spans = InMemorySpanExporter()
        given = Resource.create()  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if given.attributes["service.name"].startswith("unknown_service"):
            given = given.merge(Resource({"service.name": "hiserve", "service.version": version("hiserve")}))
        provider = TracerProvider(resource=given, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._tracer = provider.get_tracer("hiserve")
        self._headers = TraceContextTextMapPropagator()

    def send(self, batch: bytes) -> bool:
        """Exports a batch; returns whether the collector took it."""
        self._spans.clear()
        for trace in _BATCH.decode(batch):
            self._add(trace)
        spans = self._spans.get_finished_spans()
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def _add(self, trace: RequestTrace) -> None:
        headers = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = self._headers.extract({name: value for name, value in headers.items() if value})
        span = self._tracer.start_span(
            f"{trace.operation} {self._model}",
            parent,
            SpanKind.SERVER,
            attributes=self._attributes(trace),
            start_time=trace.began_ns,
        )
        # A client's own fault is no error of a server, as the conventions of HTTP say.
        if trace.error and (trace.status >= 500 or trace.status == 200):
            span.set_status(StatusCode.ERROR)
        for choice in trace.reply.choices if trace.reply else ():
            self._add_phases(span, trace, choice)
        span.end(_at(trace, trace.took_s))

    def _attributes(self, trace: RequestTrace) -> dict[str, object]:
        found: dict[str, object] = {
            "gen_ai.operation.name": trace.operation,
            "gen_ai.provider.name": "hiserve",
            "gen_ai.request.model": self._model,
            "http.request.method": "POST",
            "http.route": trace.route,
            "server.address": trace.server[0],
            "hiserve.request.id": trace.request_id,
        }
        if trace.server[1] is not None:
            found["server.port"] = trace.server[1]
        if trace.status:
            found["http.response.status_code"] = trace.status
        if trace.error:
            found["error.type"] = trace.error
        return found if trace.reply is None else found | self._of_reply(trace.reply)

    def _of_reply(self, reply: Reply) -> dict[str, object]:
        found: dict[str, object] = {
            "gen_ai.response.id": reply.name,
            "gen_ai.response.model": self._model,
            "gen_ai.request.choice.count": reply.num_choices,
            "gen_ai.request.stream": reply.streams,
            "gen_ai.request.temperature": reply.temperature,
            "gen_ai.request.top_p": reply.top_p,
            "gen_ai.usage.input_tokens": reply.num_prompt,
            "gen_ai.usage.cache_read.input_tokens": reply.num_cached,
            "gen_ai.usage.output_tokens": reply.num_generated,
        }
        if reply.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = reply.max_tokens
        reasons = [choice.reason for choice in reply.choices]
        if all(reasons):
            found["gen_ai.response.finish_reasons"] = reasons
        if (first_s := reply.choices[0].first_s) >= 0:
            found["gen_ai.response.time_to_first_chunk"] = first_s
        return found

    def _add_phases(self, parent: Span, trace: RequestTrace, choice: ChoiceTrace) -> None:
        """Adds the spans of a choice: queue, prefill, decode, as far as it came."""
        context = set_span_in_context(parent)
        of_choice = {"hiserve.choice": choice.index}
        device, host, store = choice.cached
        cached = {
            "hiserve.cached_tokens.device": device,
            "hiserve.cached_tokens.host": host,
            "hiserve.cached_tokens.store": store,
        }
        phases = (
            ("queue", choice.queued_s, choice.admitted_s, of_choice),
            ("prefill", choice.admitted_s, choice.first_s, of_choice | cached),
            ("decode", choice.first_s, choice.ended_s, of_choice | {"hiserve.output_tokens": choice.num_generated}),
        )
        for name, begin_s, end_s, attributes in phases:
            if begin_s >= 0:
                span = self._tracer.start_span(name, context, attributes=attributes, start_time=_at(trace, begin_s))
                span.end(_at(trace, end_s if end_s >= 0 else choice.ended_s))


def _at(trace: RequestTrace, seconds: float) -> int:
    """Returns a time of a request, in nanoseconds since 1970."""
    return trace.began_ns + int(min(seconds, trace.took_s) * 1e9)


def serve(endpoint: str) -> int:
    """Serves batches until the parent ends; returns the exit code."""
    link, frames = connect_to_parent(endpoint, signal.SIGKILL)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound_memory(MAX_MEMORY_BYTES)
    # It would log each header that a client spelled wrongly, and each try; ``http.tracing`` says when sending fails.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    setup = msgspec.msgpack.decode(frames[0], type=Setup)
    sender = Sender(OTLPSpanExporter(endpoint=setup.url), setup.model)

    def do(job: Frames) -> Frames:
        signal.setitimer(signal.ITIMER_REAL, JOB_S)  # the signal's default is to end the process
        is_taken = sender.send(job[0])
        signal.setitimer(signal.ITIMER_REAL, 0)
        return [b"taken" if is_taken else b""]

    return serve_jobs(link, do)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
