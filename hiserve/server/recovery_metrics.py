"""Deaths of workers in Prometheus' words: requests that went on elsewhere, and how long it took until they did."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from hiserve.ipc.lifecycle import Recovery, ReplayStats


class RecoveryMetrics:
    """Counts replays, and shows the latest recovery.

    Args:
        registry: Where the metrics go.
        model_name: Value of the ``model_name`` label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        names = ("model_name",)
        requests = Counter(
            "hiserve:replayed_requests",
            "Requests that went on with another worker after theirs died.",
            names,
            registry=registry,
        )
        tokens = Counter("hiserve:replayed_tokens", "Tokens known of them then.", names, registry=registry)
        self._requests, self._tokens = requests.labels(model_name), tokens.labels(model_name)
        self._cached = Counter(
            "hiserve:replayed_cached_tokens",
            "Of these tokens, those that the other worker had, by tier.",
            ("model_name", "cache_source"),
            registry=registry,
        )
        self._seconds = Gauge(
            "hiserve:recovery_seconds",
            "Of the latest death of a worker: from the fault to news of its requests, by phase.",
            ("model_name", "phase"),
            registry=registry,
        )
        self._last = ReplayStats()

    def observe(self, replays: ReplayStats, recovery: Recovery | None) -> None:
        """Takes over what the scheduler counted; a new scheduler counts from 0."""
        before = ReplayStats() if replays.requests < self._last.requests else self._last
        self._requests.inc(replays.requests - before.requests)
        self._tokens.inc(replays.tokens - before.tokens)
        for tier, count in replays.cached.items():
            self._cached.labels(self._model_name, tier).inc(max(0, count - before.cached.get(tier, 0)))
        self._last = replays
        if recovery is not None:
            self._seconds.clear()
            for phase, seconds in recovery.phases.items():
                self._seconds.labels(self._model_name, phase).set(seconds)
