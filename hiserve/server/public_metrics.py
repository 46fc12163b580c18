"""Which metrics a caller without the right key may see: those of the service, not what its tenants ask and find cached."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

# Hits, lengths and latencies tell one tenant what others have asked before: none of them is here.
PUBLIC = frozenset(
    f"hiserve:{name}"
    for name in (
        "engine_up",
        "last_step_age_seconds",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",  # routers need it; it is of running requests alone
        "cache_config_info",
        "http_responses",
        "worker_restarts",
        "recovery_seconds",
    )
)
PROCESS = "process_"  # of the API process: memory, CPU time, open files


class PublicMetrics(Collector):
    """The public ones of a registry.

    Args:
        registry: Has all of them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yields them as they are."""
        for metric in self._registry.collect():
            if metric.name in PUBLIC or metric.name.startswith(PROCESS):
                yield metric
