"""What Prometheus reads: counters of requests and tokens, latencies, and the engine's gauges."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hiserve.messages.types import Status

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        model_name: Value of the ``model_name`` label.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens received from the engine.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Time from one token to the next.", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self._finished = Counter(
            "hiserve:request_success",
            "Requests that ended, by reason: stop, length, abort or error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.finished(reason)
        self._running = self._gauge("num_requests_running", "Requests in the workers' batches.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a place in a batch.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV pages held by running requests, 0 to 1.")
        self._engine_up = self._gauge("engine_up", "1 when the engine answered the last question for its state.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted for lack of pages.")
        self._seen_preemptions: dict[tuple[int, int], int] = {}

    def finished(self, reason: str) -> Counter:
        """Returns the counter of requests that ended for this reason."""
        return self._finished.labels(self._model_name, reason)

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
        num_pages = sum(worker.num_pages for worker in status.workers)
        num_idle = sum(stat.free_pages + stat.evictable_pages for stat in stats)
        self._usage.set((num_pages - num_idle) / num_pages if num_pages else 0.0)
        for worker in status.workers:
            key = (worker.replica, worker.incarnation)
            before = self._seen_preemptions.get(key, 0)
            self._preemptions.inc(max(0, worker.stats.preemptions - before))
            self._seen_preemptions[key] = max(before, worker.stats.preemptions)

    def render(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"hiserve:{name}", help_text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)


class Meter:
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
        self._arrived = arrived
        self._last = arrived
        self.ttft_s: float | None = None
        self.e2e_s: float | None = None

    def admitted(self, num_cached: int) -> None:
        """Notes the first delta: the prompt was looked up in the cache and computed."""
        self._metrics.prompt_tokens.inc(self._num_prompt)
        self._metrics.prefix_queries.inc(self._num_prompt)
        self._metrics.prefix_hits.inc(num_cached)

    def tokens(self, num_tokens: int) -> None:
        """Notes tokens that arrived together; the time since the last ones is shared among them."""
        if not num_tokens:
            return
        now = time.monotonic()
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
            self._metrics.finished(reason).inc()
