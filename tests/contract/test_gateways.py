"""What the gateways of Kubernetes ask of an engine, by their sources: routes, models, metrics, KV events.

llm-d's router (docs/model-server-protocol.md, pkg/kvevents), AIBrix (pkg/metrics, pkg/cache/kvcache) and the router of vLLM's
production stack (stats/engine_stats.py, service_discovery.py); none of them runs here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.core.digest import DIGEST_BYTES
from hiserve.ipc.kv_events import Cleared, Removed, Stored, encode_batch
from hiserve.ipc.messages import WorkerStats
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import make_server, reply_script

COUNTERS, GAUGES, HISTOGRAMS = "counter", "gauge", "histogram"
METRICS: dict[str, dict[str, str]] = {
    "llm-d": {
        "num_requests_waiting": GAUGES,
        "num_requests_running": GAUGES,
        "kv_cache_usage_perc": GAUGES,
        "cache_config_info": GAUGES,
    },
    "AIBrix": {
        "num_requests_running": GAUGES,
        "num_requests_waiting": GAUGES,
        "kv_cache_usage_perc": GAUGES,
        "gpu_cache_usage_perc": GAUGES,
        "prefix_cache_queries": COUNTERS,
        "prefix_cache_hits": COUNTERS,
        "prompt_tokens": COUNTERS,
        "generation_tokens": COUNTERS,
        "num_preemptions": COUNTERS,
        "time_to_first_token_seconds": HISTOGRAMS,
        "inter_token_latency_seconds": HISTOGRAMS,
        "e2e_request_latency_seconds": HISTOGRAMS,
        "request_queue_time_seconds": HISTOGRAMS,
        "request_prompt_tokens": HISTOGRAMS,
        "request_generation_tokens": HISTOGRAMS,
    },
    "production stack": {
        "num_requests_running": GAUGES,
        "num_requests_waiting": GAUGES,
        "gpu_cache_usage_perc": GAUGES,
        "gpu_prefix_cache_queries": COUNTERS,
        "gpu_prefix_cache_hits": COUNTERS,
    },
}


@pytest.mark.parametrize("gateway", METRICS)
async def test_metrics_have_the_names_and_types_that_gateways_read(gateway: str) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), queued=4, cached=3)
    engine.stats = WorkerStats(running=2, free_pages=75)
    server = make_server(engine, compat="vllm")
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        assert (await server.complete("the token and the text")).status == 200
        lines = (await server.get("/metrics")).text.splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE vllm:"))
    for name, kind in METRICS[gateway].items():
        shown = f"vllm:{name}" + ("_total" if kind == COUNTERS else "")
        assert types[shown] == kind
        assert any(line.startswith((f"{shown}{{", f"{shown}_count{{")) for line in lines), shown
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:")}
    assert values["vllm:num_requests_waiting"] == 4
    assert values["vllm:gpu_cache_usage_perc"] == values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:gpu_prefix_cache_hits_total"] == values["vllm:prefix_cache_hits_total"] == 3


async def test_routes_that_gateways_ask_for() -> None:
    """A pod's model is known by its name, and a server that drains is ready no more while its process lives."""
    server = make_server(FakeEngineClient(script=lambda prompt: reply_script()))
    async with server.app.router.lifespan_context(server.app):
        await server.handle.wait_open()
        (model,) = (await server.get("/v1/models")).json["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
        assert isinstance(model["created"], int) and isinstance(model["owned_by"], str) and model["parent"] is None
        assert [(await server.get(path)).status for path in ("/health", "/ready")] == [200, 200]
        server.engine.die("gone")
        assert (await server.get("/ready")).status == 503


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True):
    """The fields of vLLM's event that all readers take; msgspec checks their types."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


def test_events_have_the_fields_that_gateways_read() -> None:
    """A batch has three entries, of which AIBrix takes the time as a double and the rank as a number."""
    digests, tokens = bytes(range(2 * DIGEST_BYTES)), b"".join(token.to_bytes(4, "little") for token in range(8))
    changes = [Cleared(), Stored("GPU", None, digests, tokens), Removed("CPU_PINNED", digests)]
    payload = encode_batch(12.5, changes, page_size=4, replica=1)
    kind: Any = tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int]
    now_s, (cleared, stored, removed), rank = msgspec.msgpack.decode(payload, type=kind, strict=True)
    assert (now_s, rank, cleared) == (12.5, 1, AllBlocksCleared())
    assert len(stored.token_ids) == stored.block_size * len(stored.block_hashes) == 8
    assert (stored.medium, removed.medium) == ("GPU", "CPU_PINNED")
    assert removed.block_hashes == stored.block_hashes
    assert all(-(2**63) <= block < 2**63 for block in stored.block_hashes)
