"""The metrics under the names of other engines, for dashboards and routers that know those."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Alias(msgspec.Struct, frozen=True):
    """One metric under another name. The values are the same ones, read when they are shown.

    Attributes:
        name: Name in the other engine, as Prometheus' client counts it (``_total`` is not part of it).
        source: Name here, without ``hiserve:``.
        where: Values of labels that count; these labels are not shown.
        drops: Labels that are summed over.
        renames: Label names there by label names here.
        values: Label values there by those here; others are the same.
    """

    name: str
    source: str
    where: dict[str, str] = {}
    drops: tuple[str, ...] = ()
    renames: dict[str, str] = {}
    values: dict[str, str] = {}


def _same(prefix: str, *names: str) -> list[Alias]:
    return [Alias(f"{prefix}:{name}", name) for name in names]


SHARED = (
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)
DRAFTS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
# vLLM's offloading connector knows two directions.
TRANSFER = {"copy": "transfer_type"}
DIRECTIONS = {"load": "CPU_to_GPU", "store": "GPU_to_CPU"}
ALIASES: dict[str, list[Alias]] = {
    "none": [],
    "vllm": [
        *_same("vllm", *SHARED),
        *_same("vllm", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *_same("vllm", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
        *_same("vllm", "request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        Alias(
            "vllm:cache_config_info",
            "cache_config_info",
            renames={"page_size": "block_size", "num_pages": "num_gpu_blocks"},
        ),
        *_same("vllm", "spec_decode_num_accepted_tokens_per_pos"),
        *(Alias(f"vllm:{name}", name, drops=("cache_source",)) for name in DRAFTS),
        Alias("vllm:kv_offload_total_bytes", "kv_offload_total_bytes", renames=TRANSFER, values=DIRECTIONS),
        Alias("vllm:kv_offload_total_time", "kv_offload_total_time", renames=TRANSFER, values=DIRECTIONS),
    ],
    "sglang": [
        *_same("sglang", *SHARED, "cached_tokens", "cache_config_info"),
        *_same("sglang", "hicache_host_used_tokens", "hicache_host_total_tokens"),
        Alias("sglang:evicted_tokens", "evicted_tokens", where={"tier": "device"}),
        Alias("sglang:load_back_tokens", "cache_fulfilled_tokens", where={"copy": "load"}),
        Alias("sglang:load_back_bytes", "kv_offload_total_bytes", where={"copy": "load"}),
        Alias("sglang:hicache_backup_tokens", "cache_fulfilled_tokens", where={"copy": "store"}),
        Alias("sglang:hicache_backup_bytes", "kv_offload_total_bytes", where={"copy": "store"}),
        Alias("sglang:hicache_dropped_tokens", "cache_unfulfilled_tokens", where={"copy": "store"}),
        Alias("sglang:prefetched_tokens", "cache_fulfilled_tokens", where={"copy": "prefetch"}),
        Alias("sglang:backuped_tokens", "cache_fulfilled_tokens", where={"copy": "upload"}),
        Alias("sglang:storage_prefetch_hit_tokens", "cache_wanted_tokens", where={"copy": "prefetch"}),
        Alias("sglang:storage_prefetch_unfulfilled_tokens", "cache_unfulfilled_tokens", where={"copy": "prefetch"}),
        Alias("sglang:spec_accept_length", "spec_accept_length", where={"cache_source": "all"}),
        Alias("sglang:num_running_reqs", "num_requests_running"),
        Alias("sglang:num_queue_reqs", "num_requests_waiting"),
        Alias("sglang:token_usage", "kv_cache_usage_perc"),
        Alias("sglang:queue_time_seconds", "request_queue_time_seconds"),
        Alias("sglang:prompt_tokens_histogram", "request_prompt_tokens"),
        Alias("sglang:generation_tokens_histogram", "request_generation_tokens"),
        Alias("sglang:num_retracted_requests", "num_preemptions"),
        Alias("sglang:num_requests", "request_success", drops=("finished_reason",)),
        Alias("sglang:num_aborted_requests", "request_success", where={"finished_reason": "abort"}),
    ],
}


class Aliases(Collector):
    """Reads a registry and shows its metrics under other names.

    Args:
        registry: Where the metrics are.
        compat: Key of ``ALIASES``.
    """

    def __init__(self, registry: Collector, compat: str) -> None:
        self._registry = registry
        self._aliases = ALIASES[compat]

    def collect(self) -> Iterator[Metric]:
        """Yields the renamed metrics."""
        if not self._aliases:
            return
        metrics = {metric.name: metric for metric in self._registry.collect()}
        for alias in self._aliases:
            if (source := f"hiserve:{alias.source}") in metrics:  # not all metrics are for all callers
                yield _renamed(metrics[source], alias)


def _renamed(metric: Metric, alias: Alias) -> Metric:
    renamed = Metric(alias.name, metric.documentation, metric.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        if any(sample.labels.get(label) != value for label, value in alias.where.items()):
            continue
        name = alias.name + sample.name.removeprefix(metric.name)
        hidden = (*alias.where, *alias.drops)
        labels = [
            (alias.renames.get(label, label), alias.values.get(text, text))
            for label, text in sample.labels.items()
            if label not in hidden
        ]
        key = name, tuple(labels)
        values[key] = sample.value if name.endswith("_created") else values.get(key, 0.0) + sample.value
    for (name, shown), value in values.items():
        renamed.add_sample(name, dict(shown), value)
    return renamed
