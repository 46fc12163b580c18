"""The metrics under the names of other engines, for their dashboards and routers.

Routers read ``/metrics`` of each server themselves, so that rules in Prometheus would not reach them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric

NOTHING: Mapping[str, str] = {}


class Alias(NamedTuple):
    """One metric under another name. The values are the same ones.

    Attributes:
        name: Name in the other engine, without ``_total``.
        source: Name here, without ``hiserve:``.
        where: Values of labels that count; these labels are not shown.
        drops: Labels that are summed over.
        renames: Label names there by label names here.
        values: Label values there by those here; others are the same.
    """

    name: str
    source: str
    where: Mapping[str, str] = NOTHING
    drops: tuple[str, ...] = ()
    renames: Mapping[str, str] = NOTHING
    values: Mapping[str, str] = NOTHING

    def of(self, metric: Metric) -> Metric:
        """Returns the metric under this name."""
        renamed = Metric(self.name, metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            if any(sample.labels.get(label) != value for label, value in self.where.items()):
                continue
            name = self.name + sample.name.removeprefix(metric.name)
            labels = tuple(
                (self.renames.get(label, label), self.values.get(text, text))
                for label, text in sample.labels.items()
                if label not in self.where and label not in self.drops
            )
            is_time = name.endswith("_created")  # all else is summed
            values[name, labels] = sample.value + (0 if is_time else values.get((name, labels), 0))
        for (name, labels), value in values.items():
            renamed.add_sample(name, dict(labels), value)
        return renamed


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
# vLLM's offloading connector has two directions.
DIRECTIONS = {"load": "CPU_to_GPU", "offload": "GPU_to_CPU"}
POOL = {"page_size": "block_size", "num_pages": "num_gpu_blocks"}
ALIASES: dict[str, list[Alias]] = {
    "none": [],
    "vllm": [
        *_same("vllm", *SHARED),
        *_same("vllm", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *_same("vllm", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
        *_same("vllm", "request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *_same("vllm", "spec_decode_num_accepted_tokens_per_pos"),
        # Names that vLLM had before, and the routers of its production stack and AIBrix read.
        Alias("vllm:gpu_cache_usage_perc", "kv_cache_usage_perc"),
        Alias("vllm:gpu_prefix_cache_queries", "prefix_cache_queries"),
        Alias("vllm:gpu_prefix_cache_hits", "prefix_cache_hits"),
        Alias("vllm:cache_config_info", "cache_config_info", renames=POOL),
        *(Alias(f"vllm:{name}", name, drops=("cache_source",)) for name in DRAFTS),
        *(
            Alias(f"vllm:{name}", name, renames={"copy": "transfer_type"}, values=DIRECTIONS)
            for name in ("kv_offload_total_bytes", "kv_offload_total_time")
        ),
    ],
    "sglang": [
        *_same("sglang", *SHARED, "cached_tokens", "cache_config_info"),
        *_same("sglang", "hicache_host_used_tokens", "hicache_host_total_tokens"),
        Alias("sglang:evicted_tokens", "evicted_tokens", {"tier": "device"}),
        Alias("sglang:load_back_tokens", "cache_fulfilled_tokens", {"copy": "load"}),
        Alias("sglang:load_back_bytes", "kv_offload_total_bytes", {"copy": "load"}),
        Alias("sglang:hicache_backup_tokens", "cache_fulfilled_tokens", {"copy": "offload"}),
        Alias("sglang:hicache_backup_bytes", "kv_offload_total_bytes", {"copy": "offload"}),
        Alias("sglang:hicache_dropped_tokens", "cache_unfulfilled_tokens", {"copy": "offload"}),
        Alias("sglang:prefetched_tokens", "cache_fulfilled_tokens", {"copy": "prefetch"}),
        Alias("sglang:backuped_tokens", "cache_fulfilled_tokens", {"copy": "upload"}),
        Alias("sglang:storage_prefetch_hit_tokens", "cache_wanted_tokens", {"copy": "prefetch"}),
        Alias("sglang:storage_prefetch_unfulfilled_tokens", "cache_unfulfilled_tokens", {"copy": "prefetch"}),
        Alias("sglang:spec_accept_length", "spec_accept_length", {"cache_source": "all"}),
        Alias("sglang:num_running_reqs", "num_requests_running"),
        Alias("sglang:num_queue_reqs", "num_requests_waiting"),
        Alias("sglang:token_usage", "kv_cache_usage_perc"),
        Alias("sglang:queue_time_seconds", "request_queue_time_seconds"),
        Alias("sglang:prompt_tokens_histogram", "request_prompt_tokens"),
        Alias("sglang:generation_tokens_histogram", "request_generation_tokens"),
        Alias("sglang:num_retracted_requests", "num_preemptions"),
        Alias("sglang:num_requests", "request_success", drops=("finished_reason",)),
        Alias("sglang:num_aborted_requests", "request_success", {"finished_reason": "abort"}),
    ],
}


def aliases(metrics: list[Metric], compat: str) -> Iterator[Metric]:
    """Yields metrics under the names of another engine.

    Args:
        metrics: Those that are shown; an alias of another one is left out.
        compat: Key of ``ALIASES``.
    """
    found = {metric.name.removeprefix("hiserve:"): metric for metric in metrics}
    return (alias.of(found[alias.source]) for alias in ALIASES[compat] if alias.source in found)
