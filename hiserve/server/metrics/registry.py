"""The metrics of ``/metrics``: requests, counted here, and the engine, read by the rows of ``rows``.

A name is vLLM's where vLLM has the metric, else SGLang's, after ``hiserve:``; ``aliases`` repeats the
metrics under those engines' full names.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from hiserve.core.usage import CacheUse
from hiserve.ipc.lifecycle import ReplayStats
from hiserve.ipc.messages import Status, WorkerStats
from hiserve.server.metrics.aliases import aliases
from hiserve.server.metrics.rows import (
    ENGINE_ROWS,
    ROWS,
    SCHEDULER_COUNTERS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    EngineState,
    Labels,
    Row,
)
from hiserve.text.prompt.parts import PartName, Place

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.08, 0.32, 1.28, 5, 20, 80, 320)
TOKEN_BUCKETS = tuple(4**power for power in range(11))  # to one million
HIDDEN = b"# What tells of requests is shown to the metrics key and the admin key alone.\n"
TIERS = ("device", "host", "store")
# Parts of requests that change no reply, or that this server cannot serve and a client does without.
IGNORED = (
    "thought", "hosted_tool", "tool_grammar", "deferred_tool", "billing_header", "effort", "context_edit",
)  # fmt: skip
REASONS = ("stop", "length", "abort", "error")
RESPONSES = "hiserve:http_responses"
PUBLIC = {f"hiserve:{row.name}" for row in ROWS if row.is_public} | {RESPONSES}
PROCESS = "process_"  # memory, CPU time and open files of the API process: public too

T = TypeVar("T")
Values = dict[tuple[Row[Any], Labels], float]  # by metric and label values


class Metrics:
    """All metrics of one server.

    Args:
        model_name: Value of the ``model_name`` label.
        page_size: Tokens per KV page.
        compat: Repeat the metrics under the names of this engine: ``none``, ``vllm`` or ``sglang``.

    Attributes:
        engine: The metrics of the engine; the others are of requests.
    """

    def __init__(self, model_name: str, *, page_size: int, compat: str) -> None:
        self._model_name = model_name
        self._compat = compat
        self.engine = EngineCollector(model_name, page_size)
        self._registry = CollectorRegistry()
        self._registry.register(self.engine)
        ProcessCollector(registry=self._registry)
        self._responses = Counter(
            RESPONSES,
            "HTTP responses that began, by route and status: 429 and 503 are refusals.",
            ("model_name", "endpoint", "status_code"),
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens received from the engine.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.hidden_tools = self._counter(
            "chat_requests_with_hidden_tools", "Chats with tools that the model's chat template does not show."
        )
        self.unread_calls = self._counter(
            "unread_calls", "Marks in replies that begin a tool call, without a call after them: they are content."
        )
        self.ignored = self._counters(
            "ignored_request_parts",
            "Parts of requests that were ignored: thoughts with another server's seal, tools that the server would run, "
            "headers of sessions, and so on.",
            "part",
            IGNORED,
        )
        self.cached_tokens = self._counters("cached_tokens", "The same by tier.", "cache_source", TIERS)
        self.chat_misses = self._by_part(
            "chat_cache_misses", "Chats by the part of the conversation in which the cached prefix ends."
        )
        self.chat_missed_tokens = self._by_part(
            "chat_missed_tokens", "Prompt tokens of these chats that were computed."
        )
        self.finished = self._counters(
            "request_success",
            "Requests that ended, by reason: stop, length, abort or error.",
            "finished_reason",
            REASONS,
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Time from one token to the next.", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self.queue = self._histogram("request_queue_time_seconds", "Acceptance to a worker.", QUEUE_BUCKETS_S)
        self.num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.num_generated = self._histogram("request_generation_tokens", "Tokens generated for it.", TOKEN_BUCKETS)

    def follow(self, name: str, help_text: str, label: str, counts: Mapping[Any, int]) -> None:
        """Adds a counter whose values are those of a mapping at each reading, by the values of a label."""
        self._registry.register(_Followed(f"hiserve:{name}", help_text, (self._model_name, label), counts))

    def responded(self, endpoint: str, status: int) -> None:
        """Counts a response.

        Args:
            endpoint: Path of the route, never the path that the client sent.
            status: HTTP status.
        """
        self._responses.labels(self._model_name, endpoint, str(status)).inc()

    def render(self, *, is_whole: bool = True) -> bytes:
        """Returns the metrics in Prometheus' text format.

        Args:
            is_whole: False omits the metrics of requests.
        """
        metrics = [
            metric
            for metric in self._registry.collect()
            if is_whole or metric.name in PUBLIC or metric.name.startswith(PROCESS)
        ]
        text = generate_latest(_Collected([*metrics, *aliases(metrics, self._compat)]))
        return text if is_whole else HIDDEN + text

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _counters(self, name: str, help_text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """Returns a counter for each value of a label."""
        counter = Counter(f"hiserve:{name}", help_text, ("model_name", label), registry=self._registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def _by_part(self, name: str, help_text: str) -> dict[tuple[str, str], Counter]:
        """Returns a counter for each part of a conversation, in turns up to the assistant's last one or after it."""
        counter = Counter(f"hiserve:{name}", help_text, ("model_name", "part", "turn"), registry=self._registry)
        labels = product(get_args(PartName), ("history", "new"))
        return {of: counter.labels(self._model_name, *of) for of in labels}

    def _histogram(self, name: str, help_text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            f"hiserve:{name}", help_text, ("model_name",), registry=self._registry, buckets=tuple(buckets)
        )
        return histogram.labels(self._model_name)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Returns the metrics."""
        return self._metrics


class _Followed(Collector):
    def __init__(self, name: str, help_text: str, labels: tuple[str, str], counts: Mapping[Any, int]) -> None:
        self._name, self._help, self._counts = name, help_text, counts
        self._model_name, self._label = labels

    def collect(self) -> list[Metric]:
        """Returns the one metric."""
        family = CounterMetricFamily(self._name, self._help, labels=("model_name", self._label))
        for value, count in self._counts.items():
            family.add_metric((self._model_name, value), count)
        return [family]


class EngineCollector(Collector):
    """Reads the rows of ``rows`` from the engine's state.

    Args:
        model_name: Value of the ``model_name`` label.
        page_size: Tokens per KV page.
    """

    def __init__(self, model_name: str, page_size: int) -> None:
        self._model_name = model_name
        self._created_s = time.time()
        self._state = EngineState(Status(ticket=0, queued=0, queued_tokens=0, workers=[]), page_size)
        zeros = self._read(WORKER_COUNTERS, WorkerStats()) | self._read(SCHEDULER_COUNTERS, ReplayStats())
        self._counters = RestartTotals(zeros)

    def observe(
        self, status: Status | None, *, scheduler_pid: int = 0, num_restarts: int = 0, num_slow_readers: int = 0
    ) -> None:
        """Updates the engine's state.

        Args:
            status: None when the engine did not answer; its gauges then keep their last values.
            scheduler_pid: Process that sent it.
            num_restarts: Workers started again, whichever scheduler started them.
            num_slow_readers: Streams ended because too much of them was not read, in all engines.
        """
        self._state = EngineState(
            status or self._state.status, self._state.page_size, status is not None, num_restarts, num_slow_readers
        )
        if status is None:
            return
        self._counters.observe("scheduler", scheduler_pid, self._read(SCHEDULER_COUNTERS, status.replays))
        for worker in status.workers:
            life = worker.pid, worker.incarnation
            self._counters.observe(f"worker {worker.replica}", life, self._read(WORKER_COUNTERS, worker.stats))

    def collect(self) -> Iterator[Metric]:
        """Yields a metric for each row."""
        stats = [WorkerStats(), *(worker.stats for worker in self._state.status.workers)]
        gauges = _sum(self._read(WORKER_GAUGES, one) for one in stats)
        metrics = {row.name: Metric(f"hiserve:{row.name}", row.help, row.kind) for row in ROWS}
        for values in (self._counters.sum(), gauges, self._read(ENGINE_ROWS, self._state)):
            for (row, labels), value in values.items():
                metric = metrics[row.name]
                shown = dict(zip(("model_name", *row.labels), (self._model_name, *labels), strict=True))
                if row.kind == "gauge":
                    metric.add_sample(metric.name, shown, value)
                else:
                    metric.add_sample(f"{metric.name}_total", shown, value)
                    metric.add_sample(f"{metric.name}_created", shown, self._created_s)
        yield from metrics.values()

    def _read(self, rows: Iterable[Row[T]], source: T) -> Values:
        return {
            (row, labels): value for row in rows for labels, value in row.values(source, self._state.page_size).items()
        }


class RestartTotals:
    """Sums counters of processes that count from 0 again after a restart.

    Args:
        zeros: Counters shown before any was observed.
    """

    def __init__(self, zeros: Values) -> None:
        self._ended = zeros
        self._lives: dict[str, tuple[Hashable, Values]] = {}

    def observe(self, process: str, life: Hashable, counters: Values) -> None:
        """Updates the counters of a process; another ``life`` of it is added to the earlier ones."""
        last, seen = self._lives.get(process, (life, {}))
        if last != life:
            self._ended, seen = _sum([self._ended, seen]), {}
        self._lives[process] = life, seen | {key: max(value, seen.get(key, 0)) for key, value in counters.items()}

    def sum(self) -> Values:
        """Returns the counters over all incarnations; none ever falls."""
        return _sum([self._ended, *(counters for _, counters in self._lives.values())])


def _sum(parts: Iterable[Values]) -> Values:
    whole: Values = {}
    for part in parts:
        whole |= {key: value + whole.get(key, 0) for key, value in part.items()}
    return whole


class RequestTimer:
    """Times one request and counts it exactly once.

    Args:
        metrics: Where the counts go.
        num_prompt: Tokens in the prompt.
        arrived: ``time.monotonic()`` at arrival.

    Attributes:
        arrived: As given.
        queued: ``time.monotonic()`` when the engine got it; None before.
        ttft_s: Seconds from arrival to the first token; None before it.
        e2e_s: Seconds from arrival to the end; None before it.
    """

    def __init__(self, metrics: Metrics, *, num_prompt: int, arrived: float) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._num_generated = 0
        self._last = arrived
        self.arrived = arrived
        self.queued: float | None = None
        self.ttft_s: float | None = None
        self.e2e_s: float | None = None

    def begin(self) -> None:
        """Notes that the engine gets the request."""
        self.queued = time.monotonic()

    def admitted(self, cached: CacheUse, queue_s: float = -1.0, place: Place | None = None) -> None:
        """Notes the first delta: the prompt was looked up in the cache and computed.

        Args:
            cached: Its cached tokens.
            queue_s: Seconds until a worker got the request; -1 if none did.
            place: Where in a conversation the cached prefix ends.
        """
        self._metrics.prompt_tokens.inc(self._num_prompt)
        self._metrics.prefix_queries.inc(self._num_prompt)
        self._metrics.prefix_hits.inc(cached.num_tokens)
        for tier, counter in self._metrics.cached_tokens.items():
            counter.inc(getattr(cached, tier))
        if place is not None:
            labels = place.part, "new" if place.is_new else "history"
            self._metrics.chat_misses[labels].inc()
            self._metrics.chat_missed_tokens[labels].inc(max(0, self._num_prompt - cached.num_tokens))
        if queue_s >= 0:
            self._metrics.queue.observe(queue_s)

    def tokens(self, num_tokens: int) -> None:
        """Notes tokens that arrived together; the time since the last ones is shared among them."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._num_generated += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)
        if self.ttft_s is None:
            self.ttft_s = now - self.arrived
            self._metrics.ttft.observe(self.ttft_s)
        else:
            for _ in range(num_tokens):
                self._metrics.itl.observe((now - self._last) / num_tokens)
        self._last = now

    def ended(self, reason: str, num_unread_calls: int = 0) -> None:
        """Notes the end, and marks of calls without a call after them; the first reason given counts."""
        if self.e2e_s is None:
            self.e2e_s = time.monotonic() - self.arrived
            self._metrics.e2e.observe(self.e2e_s)
            self._metrics.num_prompt.observe(self._num_prompt)
            self._metrics.num_generated.observe(self._num_generated)
            self._metrics.unread_calls.inc(num_unread_calls)
            self._metrics.finished[reason].inc()
