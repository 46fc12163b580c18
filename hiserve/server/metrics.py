"""What Prometheus reads: counters of requests and tokens, latencies, and the engine's gauges.

A name is vLLM's where vLLM has the metric, else SGLang's, behind ``hiserve:``; ``aliases`` repeats the
metrics under those engines' full names.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from hiserve.core.cache_usage import CacheUse
from hiserve.ipc.messages import Status, WorkerFacts, WorkerStats
from hiserve.server.aliases import Aliases
from hiserve.server.cache_metrics import CacheMetrics
from hiserve.server.draft_metrics import DraftMetrics
from hiserve.server.public_metrics import PublicMetrics
from hiserve.server.recovery_metrics import RecoveryMetrics

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.08, 0.32, 1.28, 5, 20, 80, 320)
TOKEN_BUCKETS = tuple(4**power for power in range(11))  # to one million
HIDDEN = b"# What tells of requests is shown to the metrics key and the admin key alone.\n"
REASONS = ("stop", "length", "abort", "error")
TIERS = ("device", "host", "store")


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        model_name: Value of the ``model_name`` label.
        page_size: Tokens per KV page.
        compat: Repeat the metrics under the names of this engine: ``none``, ``vllm`` or ``sglang``.
    """

    def __init__(self, model_name: str, *, page_size: int, compat: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._page_size = page_size
        ProcessCollector(registry=self._registry)
        self._make_request_metrics()
        self._make_engine_metrics()
        public = PublicMetrics(self._registry)
        self._shown = {
            True: CollectorRegistry(),
            False: CollectorRegistry(),
        }  # to callers who may see all, and to others
        self._shown[True].register(Aliases(self._registry, compat))
        self._shown[False].register(public)
        self._shown[False].register(Aliases(public, compat))
        self._workers: dict[int, _LastSeen] = {}

    def _make_request_metrics(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens received from the engine.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        labels = ("model_name", "cache_source")
        cached = Counter("hiserve:cached_tokens", "The same by tier.", labels, registry=self._registry)
        self.cached_tokens = {tier: cached.labels(self._model_name, tier) for tier in TIERS}
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Time from one token to the next.", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self.queue = self._histogram("request_queue_time_seconds", "Acceptance to a worker.", QUEUE_BUCKETS_S)
        self.num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.num_generated = self._histogram("request_generation_tokens", "Tokens generated for it.", TOKEN_BUCKETS)
        self._finished = Counter(
            "hiserve:request_success",
            "Requests that ended, by reason: stop, length, abort or error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in REASONS:
            self.finished(reason)
        self.hidden_tools = self._counter(
            "chat_requests_with_hidden_tools", "Chats with tools that the model's chat template does not show."
        )
        self._responses = Counter(
            "hiserve:http_responses",
            "HTTP responses that began, by route and status: 429 and 503 are refusals.",
            ("model_name", "endpoint", "status_code"),
            registry=self._registry,
        )

    def _make_engine_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the workers' batches.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a place in a batch.")
        self._queued_tokens = self._gauge("num_queued_tokens", "Prompt tokens of requests that no worker has yet.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV pages held by running requests, 0 to 1.")
        self._engine_up = self._gauge("engine_up", "1 when the engine answered the last question for its state.")
        self._step_age = self._gauge("last_step_age_seconds", "Since a worker with requests last ended a step; 0 idle.")
        labels = ("model_name", "page_size", "num_pages")
        self._cache = Gauge("hiserve:cache_config_info", "Size of the KV pools.", labels, registry=self._registry)
        self._slow_readers = self._counter("slow_readers", "Streams ended: too much of them was not read.")
        self._num_slow_readers = 0
        self._restarts = self._counter("worker_restarts", "Workers started again after one died, or their scheduler.")
        self._num_restarts = 0
        self._steps = self._counter("engine_steps", "Steps that the workers ended.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted for lack of pages.")
        self._dropped = self._counter("dropped_event_batches", "Batches of KV events dropped: routers were too slow.")
        self._gate = Counter(
            "hiserve:graph_gate",
            "Steps that were replayed as a CUDA graph, run eagerly or deferred, and why.",
            ("model_name", "verdict", "reason"),
            registry=self._registry,
        )
        self._faults = Counter(
            "hiserve:step_faults",
            "Steps given up because memory ran out, and requests whose load from the host failed: all tried again.",
            ("model_name", "kind"),
            registry=self._registry,
        )
        self._tiers = CacheMetrics(self._registry, self._model_name, self._page_size)
        self._drafts = DraftMetrics(self._registry, self._model_name)
        self._recoveries = RecoveryMetrics(self._registry, self._model_name)

    def finished(self, reason: str) -> Counter:
        """Returns the counter of requests that ended for this reason."""
        return self._finished.labels(self._model_name, reason)

    def responded(self, endpoint: str, status: int) -> None:
        """Counts a response.

        Args:
            endpoint: The route's own path, never what the client sent.
            status: HTTP status.
        """
        self._responses.labels(self._model_name, endpoint, str(status)).inc()

    def observe(self, status: Status | None) -> None:
        """Takes over the engine's state.

        Args:
            status: None when the engine did not answer; its gauges then keep their last values.
        """
        self._engine_up.set(0 if status is None else 1)
        if status is None:
            return
        stats = [worker.stats for worker in status.workers]
        self._running.set(sum(stat.running for stat in stats))
        self._waiting.set(status.queued + sum(stat.waiting for stat in stats))
        self._queued_tokens.set(status.queued_tokens)
        num_pages = sum(worker.num_pages for worker in status.workers)
        num_idle = sum(stat.free_pages + stat.evictable_pages for stat in stats)
        self._usage.set((num_pages - num_idle) / num_pages if num_pages else 0.0)
        self._cache.clear()
        self._cache.labels(self._model_name, self._page_size, num_pages).set(1)
        self._tiers.show([stat.cache for stat in stats])
        self._drafts.show([stat.drafts for stat in stats])
        self._recoveries.observe(status.replays, status.recovery)
        self._step_age.set(max((worker.step_age_s for worker in status.workers), default=0.0))
        for worker in status.workers:
            self._observe_worker(worker)

    def observe_readers(self, num_slow: int) -> None:
        """Counts streams that were ended because too much of them was not read.

        Args:
            num_slow: All of them until now.
        """
        self._slow_readers.inc(max(0, num_slow - self._num_slow_readers))
        self._num_slow_readers = num_slow

    def observe_restarts(self, num_restarts: int) -> None:
        """Counts workers that were started again.

        Args:
            num_restarts: All of them until now, whichever scheduler started them.
        """
        self._restarts.inc(max(0, num_restarts - self._num_restarts))
        self._num_restarts = num_restarts

    def render(self, *, is_whole: bool = True) -> bytes:
        """Returns the metrics in Prometheus' text format.

        Args:
            is_whole: False leaves out what tells of requests.
        """
        own = generate_latest(self._registry) if is_whole else HIDDEN
        return own + generate_latest(self._shown[is_whole])

    def _observe_worker(self, worker: WorkerFacts) -> None:
        """Counts what the worker did since it was last seen."""
        stats = worker.stats
        last = self._workers.get(worker.replica, _LastSeen(worker.pid, 1, WorkerStats()))
        is_new = (worker.pid, worker.incarnation) != last[:2]
        before = WorkerStats() if is_new else last.stats
        self._steps.inc(max(0, stats.steps - before.steps))
        self._preemptions.inc(max(0, stats.preemptions - before.preemptions))
        self._dropped.inc(max(0, stats.dropped_event_batches - before.dropped_event_batches))
        for verdict, reasons in stats.graph_gate.items():
            for reason, count in reasons.items():
                old = before.graph_gate.get(verdict, {}).get(reason, 0)
                self._gate.labels(self._model_name, verdict, reason).inc(max(0, count - old))
        for kind, count in stats.step_faults.items():
            self._faults.labels(self._model_name, kind).inc(max(0, count - before.step_faults.get(kind, 0)))
        self._tiers.count(before.cache, stats.cache)
        self._drafts.count(before.drafts, stats.drafts)
        self._workers[worker.replica] = _LastSeen(worker.pid, worker.incarnation, stats)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help_text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            f"hiserve:{name}", help_text, ("model_name",), registry=self._registry, buckets=tuple(buckets)
        )
        return histogram.labels(self._model_name)


class _LastSeen(NamedTuple):
    """A worker at the last look."""

    pid: int
    incarnation: int
    stats: WorkerStats


class RequestTimer:
    """Times one request and counts it exactly once.

    Args:
        metrics: Where the counts go.
        num_prompt: Tokens in the prompt.
        arrived: ``time.monotonic()`` at arrival.

    Attributes:
        ttft_s: Seconds from arrival to the first token; None before it.
        e2e_s: Seconds from arrival to the end; None before it.
    """

    def __init__(self, metrics: Metrics, *, num_prompt: int, arrived: float) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._num_generated = 0
        self._arrived = arrived
        self._last = arrived
        self.ttft_s: float | None = None
        self.e2e_s: float | None = None

    def admitted(self, cached: CacheUse, queue_s: float = -1.0) -> None:
        """Notes the first delta: the prompt was looked up in the cache and computed.

        Args:
            cached: What of it came from there.
            queue_s: Seconds until a worker got the request; -1 if none did.
        """
        self._metrics.prompt_tokens.inc(self._num_prompt)
        self._metrics.prefix_queries.inc(self._num_prompt)
        self._metrics.prefix_hits.inc(cached.num_tokens)
        for tier, counter in self._metrics.cached_tokens.items():
            counter.inc(getattr(cached, tier))
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
            self.ttft_s = now - self._arrived
            self._metrics.ttft.observe(self.ttft_s)
        else:
            for _ in range(num_tokens):
                self._metrics.itl.observe((now - self._last) / num_tokens)
        self._last = now

    def ended(self, reason: str) -> None:
        """Notes the end; the first reason given counts."""
        if self.e2e_s is None:
            self.e2e_s = time.monotonic() - self._arrived
            self._metrics.e2e.observe(self.e2e_s)
            self._metrics.num_prompt.observe(self._num_prompt)
            self._metrics.num_generated.observe(self._num_generated)
            self._metrics.finished(reason).inc()
