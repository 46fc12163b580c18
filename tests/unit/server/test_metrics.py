"""Metrics: each request counts once, the engine's state is shown, and other engines' names show the same values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse, GrammarStats
from hiserve.errors import EngineError
from hiserve.ipc.cache_stats import CacheStats, TierStats
from hiserve.ipc.lifecycle import Recovery, ReplayStats
from hiserve.ipc.messages import WorkerStats
from hiserve.server.metrics.aliases import ALIASES
from hiserve.server.metrics.registry import Metrics, RequestTimer, RestartTotals
from hiserve.server.metrics.rows import ROWS, WORKER_COUNTERS
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import NUM_STEPS, Server, make_server, reply_script


async def test_metrics_answer_get_and_head(server: Server) -> None:
    for method in ("GET", "HEAD"):
        call = await server.call(method, "/metrics").end()
        assert call.status == 200
        assert call.headers["content-type"].startswith("text/plain")


async def test_request_metrics_count_tokens_and_latencies(server: Server) -> None:
    server.engine.cached = 2
    await server.chat("Hi")
    server.engine.finish = FinishReason.LENGTH
    await server.chat("Hi", stream=True)
    num_prompt = len(server.engine.seen[0].prompt)
    assert await server.metric("hiserve:prompt_tokens_total") == 2 * num_prompt
    assert await server.metric("hiserve:prefix_cache_queries_total") == 2 * num_prompt
    assert await server.metric("hiserve:prefix_cache_hits_total") == 4
    assert await server.metric("hiserve:generation_tokens_total") == 2 * NUM_STEPS
    assert await server.metric("hiserve:time_to_first_token_seconds_count") == 2
    assert await server.metric("hiserve:inter_token_latency_seconds_count") == 2 * (NUM_STEPS - 1)
    assert await server.metric("hiserve:e2e_request_latency_seconds_count") == 2
    for reason, count in (("stop", 1), ("length", 1), ("abort", 0), ("error", 0)):
        assert await server.metric("hiserve:request_success_total", finished_reason=reason) == count


async def test_a_failed_request_counts_as_an_error_once(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 1, EngineError("broke.")
    await server.chat("Hi", stream=True)
    assert await server.metric("hiserve:request_success_total", finished_reason="error") == 1
    assert await server.metric("hiserve:e2e_request_latency_seconds_count") == 1


async def test_engine_gauges_show_its_state(server: Server) -> None:
    server.engine.queued = 3
    server.engine.stats = WorkerStats(running=5, waiting=2, free_pages=20, evictable_pages=40, preemptions=4)
    assert await server.metric("hiserve:num_requests_running") == 5
    assert await server.metric("hiserve:num_requests_waiting") == 5
    assert await server.metric("hiserve:kv_cache_usage_perc") == 0.4
    assert await server.metric("hiserve:engine_up") == 1


async def test_preemptions_never_fall_when_a_worker_restarts(server: Server) -> None:
    async def after(incarnation: int, preemptions: int) -> float:
        server.engine.incarnation = incarnation
        server.engine.stats = WorkerStats(preemptions=preemptions)
        return await server.metric("hiserve:num_preemptions_total")

    assert [await after(1, 4), await after(1, 6), await after(2, 0), await after(2, 3)] == [4, 6, 6, 9]


async def test_decisions_of_the_gate_are_counted_by_reason_and_never_fall(server: Server) -> None:
    async def after(incarnation: int, counts: dict[str, dict[str, int]]) -> list[float]:
        server.engine.incarnation = incarnation
        server.engine.stats = WorkerStats(graph_gate=counts)
        labels = (("replay", "decode"), ("eager", "rows"), ("eager", "width"))
        return [
            await server.metric("hiserve:graph_gate_total", decision=decision, reason=reason)
            for decision, reason in labels
        ]

    assert await after(1, {"replay": {"decode": 5}, "eager": {"rows": 2, "width": 1}}) == [5, 2, 1]
    assert await after(1, {"replay": {"decode": 9}, "eager": {"rows": 2, "width": 1}}) == [9, 2, 1]
    assert await after(2, {"replay": {"decode": 1}, "eager": {"rows": 0}}) == [10, 2, 1]


async def test_steps_that_found_no_memory_are_counted_by_kind_and_never_fall(server: Server) -> None:
    async def after(incarnation: int, counts: dict[str, int]) -> float:
        server.engine.incarnation = incarnation
        server.engine.stats = WorkerStats(step_faults=counts)
        return await server.metric("hiserve:step_faults_total", kind="out_of_memory")

    assert await after(1, {"out_of_memory": 2, "load_failed": 1}) == 2
    assert await after(1, {"out_of_memory": 3, "load_failed": 1}) == 3
    assert await after(2, {"out_of_memory": 1}) == 4
    assert await server.metric("hiserve:step_faults_total", kind="load_failed") == 1


async def test_metrics_of_an_engine_that_does_not_answer_keep_their_values(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.stats = WorkerStats(running=5)
    await server.get("/metrics")
    monkeypatch.setattr("hiserve.server.management.health.METRICS_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    assert await server.metric("hiserve:num_requests_running") == 5
    assert await server.metric("hiserve:engine_up") == 0


async def test_two_servers_in_one_process_count_apart() -> None:
    first, second = (Metrics(name, page_size=16, compat="none") for name in "ab")
    RequestTimer(first, num_prompt=5, arrived=0.0).admitted(CacheUse())
    assert b'hiserve:prompt_tokens_total{model_name="a"} 5.0' in first.render()
    assert b'hiserve:prompt_tokens_total{model_name="b"} 0.0' in second.render()


def test_tokens_that_arrive_together_share_the_time() -> None:
    metrics = Metrics("a", page_size=16, compat="none")
    timer = RequestTimer(metrics, num_prompt=5, arrived=0.0)
    timer.tokens(3)
    timer.tokens(4)
    timer.tokens(0)
    assert b'hiserve:inter_token_latency_seconds_count{model_name="a"} 4.0' in metrics.render()
    assert b'hiserve:generation_tokens_total{model_name="a"} 7.0' in metrics.render()


async def test_responses_are_counted_by_route_and_status_never_by_what_was_sent(server: Server) -> None:
    await server.chat("Hi")
    await server.chat("Hi", temperature=-1)
    await server.get("/v1/models/who-knows")
    await server.get("/secret/path")
    shown = (await server.get("/metrics")).text
    for endpoint, status in (
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions", 400),
        ("/v1/models/{name:path}", 404),
        ("none", 404),
    ):
        labels = f'endpoint="{endpoint}",model_name="tiny",status_code="{status}"'
        assert f"hiserve:http_responses_total{{{labels}}} 1.0" in shown
    assert "secret" not in shown
    assert "who-knows" not in shown


async def test_queue_time_and_lengths_are_measured(server: Server) -> None:
    server.engine.cached = 3
    await server.chat("Hi")
    num_prompt = len(server.engine.seen[0].prompt)
    assert await server.metric("hiserve:request_prompt_tokens_sum") == num_prompt
    assert await server.metric("hiserve:request_generation_tokens_sum") == NUM_STEPS
    assert await server.metric("hiserve:cached_tokens_total", cache_source="device") == 3


def test_queue_time_of_a_request_that_no_worker_had_is_not_counted() -> None:
    metrics = Metrics("a", page_size=16, compat="none")
    RequestTimer(metrics, num_prompt=5, arrived=0.0).admitted(CacheUse(), -1.0)
    RequestTimer(metrics, num_prompt=5, arrived=0.0).admitted(CacheUse(), 0.25)
    assert b'hiserve:request_queue_time_seconds_count{model_name="a"} 1.0' in metrics.render()
    assert b'hiserve:request_queue_time_seconds_sum{model_name="a"} 0.25' in metrics.render()


async def test_worker_counters_and_the_pool_are_shown(server: Server) -> None:
    server.engine.queued = 3
    evicted = CacheStats(device=TierStats(num_evicted=2))
    grammars = GrammarStats(masks=9, refused_drafts=2, mask_seconds=0.5)
    server.engine.stats = WorkerStats(steps=7, dropped_event_batches=4, cache=evicted, grammars=grammars)
    for name, count in (("masks", 9), ("refused_drafts", 2), ("mask_seconds", 0.5)):
        assert await server.metric(f"hiserve:grammar_{name}_total") == count
    for outcome in ("accepted", "refused", "killed"):
        assert await server.metric("hiserve:grammar_trials_total", outcome=outcome) == 0
    assert await server.metric("hiserve:dropped_event_batches_total") == 4
    assert await server.metric("hiserve:engine_steps_total") == 7
    assert await server.metric("hiserve:evicted_tokens_total", tier="device") == 32
    assert await server.metric("hiserve:num_queued_tokens") == 30
    assert await server.metric("hiserve:cache_config_info", page_size="16", num_pages="100") == 1
    server.engine.incarnation, server.engine.stats = 3, WorkerStats(steps=2)
    assert await server.metric("hiserve:engine_steps_total") == 9


async def test_the_age_of_the_last_step_is_that_of_the_worker_that_stands_still_longest(server: Server) -> None:
    for age_s in (0.0, 12.5):
        server.engine.step_age_s = age_s
        assert await server.metric("hiserve:last_step_age_seconds") == age_s


def test_the_counter_of_a_process_falls_neither_within_its_life_nor_with_the_next() -> None:
    key = next(iter(WORKER_COUNTERS)), ()
    totals = RestartTotals({key: 0.0})
    shown = []
    for life, count in ((1, 5.0), (1, 3.0), (1, 6.0), (2, 1.0), (2, 2.0)):  # 3: of a report that came late
        totals.observe("worker 0", life, {key: count})
        shown.append(totals.sum()[key])
    assert shown == [5.0, 5.0, 6.0, 7.0, 8.0]


async def test_counters_go_on_when_a_new_scheduler_counts_from_the_beginning(server: Server) -> None:
    async def after(pid: int, incarnation: int, steps: int) -> float:
        server.engine.pid, server.engine.incarnation = pid, incarnation
        server.engine.stats = WorkerStats(steps=steps)
        return await server.metric("hiserve:engine_steps_total")

    assert [await after(11, 1, 10), await after(12, 2, 3), await after(13, 1, 2), await after(13, 1, 5)] == [
        10,
        13,
        15,
        18,
    ]


async def test_restarts_are_counted_whoever_died_and_whether_or_not_anybody_looked(server: Server) -> None:
    restarts = "hiserve:worker_restarts_total"
    assert await server.metric(restarts) == 0
    server.engine.num_restarts = 3
    assert [await server.metric(restarts), await server.metric(restarts)] == [3, 3]
    server.engine.num_restarts = 5  # nobody looks before the scheduler dies
    first, engines = server.engine, [FakeEngineClient(lambda prompt: []), FakeEngineClient(lambda prompt: [])]
    for engine in engines:
        server.handle._take_over(engine)
        assert await server.metric("hiserve:engine_up") == 1
    assert await server.metric(restarts) == 5 + 2, "the workers of a scheduler that died have died too"
    engines[-1].num_restarts = 1
    assert await server.metric(restarts) == 5 + 2 + 1
    assert first.num_restarts == 5


async def test_slow_readers_are_counted_once_whichever_scheduler_counts_them(server: Server) -> None:
    async def after(num_slow: int) -> float:
        assert server.handle.engine is not None
        server.handle.engine.num_slow_readers = num_slow
        return await server.metric("hiserve:slow_readers_total")

    seen = [await after(3), await after(3), await after(5)]
    server.handle._take_over(FakeEngineClient(lambda prompt: []))
    assert [*seen, await after(0), await after(1)] == [3, 3, 5, 5, 6]


def test_memory_and_time_of_the_process_are_shown_to_everybody() -> None:
    rendered = Metrics("model", page_size=16, compat="none").render(is_whole=False)
    assert b"process_resident_memory_bytes" in rendered and b"process_cpu_seconds_total" in rendered


@pytest.mark.parametrize("step", [0, 1])
async def test_a_request_that_no_worker_looked_up_is_no_miss(server: Server, step: int) -> None:
    """As one that was aborted, or shed, in the queue: neither the hit rate nor the throughput of prompts falls by it."""
    server.engine.looks_up = False
    server.engine.finish = FinishReason.ABORT
    await server.chat("Hi", stream=bool(step))
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"):
        assert await server.metric(f"hiserve:{name}_total") == 0
    assert await server.metric("hiserve:request_queue_time_seconds_count") == 0
    assert await server.metric("hiserve:request_success_total", finished_reason="abort") == 1


async def test_replays_are_counted_and_the_latest_recovery_is_shown(server: Server) -> None:
    async def after(requests: int, tokens: int, host: int) -> list[float]:
        server.engine.replays = ReplayStats(requests, tokens, {"host": host})
        names = ("replayed_requests", "replayed_tokens")
        counts = [await server.metric(f"hiserve:{name}_total") for name in names]
        return [*counts, await server.metric("hiserve:replayed_cached_tokens_total", cache_source="host")]

    assert await after(0, 0, 0) == [0, 0, 0]
    assert await after(3, 300, 250) == [3, 300, 250]
    server.engine.started = msgspec.structs.replace(server.engine.started, scheduler_pid=4300)
    assert await after(1, 20, 10) == [4, 320, 260], "a new scheduler"
    server.engine.started = msgspec.structs.replace(server.engine.started, scheduler_pid=4400)
    assert await after(2, 20, 10) == [6, 340, 270], "a new scheduler that has counted more than the last one"
    for phases in ({"detect": 0.5, "first token": 1.0}, {"exit": 0.1}):
        server.engine.recovery = Recovery(0, 2, 1, phases, 1.5)
        for phase, seconds in phases.items():
            assert await server.metric("hiserve:recovery_seconds", phase=phase) == seconds
    metrics = await server.get("/metrics")
    assert 'phase="detect"' not in (await metrics.end()).text


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize("compat", ALIASES)
def test_other_names_show_the_same_values(compat: str) -> None:
    metrics = Metrics("a", page_size=16, compat=compat)
    for reason in ("stop", "abort", "abort"):
        timer = RequestTimer(metrics, num_prompt=5, arrived=0.0)
        timer.admitted(CacheUse(device=2), 0.5)
        timer.tokens(3)
        timer.ended(reason)
    own = {series: value for series, value in values(metrics).items() if series.startswith("hiserve:")}
    others = {series: value for series, value in values(metrics).items() if ":" in series and series not in own}
    shared = ("prompt_tokens_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_sum")
    assert bool(others) == (compat != "none")
    assert own['hiserve:prompt_tokens_total{model_name="a"}'] == 15
    for name in shared if others else ():
        assert others[f'{compat}:{name}{{model_name="a"}}'] == own[f'hiserve:{name}{{model_name="a"}}']
    if compat == "vllm":
        assert others['vllm:request_success_total{finished_reason="abort",model_name="a"}'] == 2
        assert others['vllm:prefix_cache_hits_total{model_name="a"}'] == 6
    if compat == "sglang":
        assert others['sglang:num_requests_total{model_name="a"}'] == 3
        assert others['sglang:num_aborted_requests_total{model_name="a"}'] == 2
        assert others['sglang:cached_tokens_total{cache_source="device",model_name="a"}'] == 6


@pytest.mark.parametrize(
    ("compat", "names"),
    [
        ("vllm", ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"]),
        ("sglang", ["num_queue_reqs", "num_running_reqs", "token_usage"]),
    ],
)
async def test_routers_find_the_gauges_they_need(compat: str, names: list[str]) -> None:
    engine = FakeEngineClient(script=lambda prompt: reply_script(), queued=4)
    engine.stats = WorkerStats(running=2, free_pages=75)
    made = make_server(engine, compat=compat)
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        assert [await made.metric(f"{compat}:{name}") for name in names] == [4, 2, 0.25]
        sizes: dict[str, Any] = {"block_size": "16", "num_gpu_blocks": "100"}
        if compat == "sglang":
            sizes = {"page_size": "16", "num_pages": "100"}
        assert await made.metric(f"{compat}:cache_config_info", **sizes) == 1


def kinds(metrics: Metrics) -> list[str]:
    """The names of all metrics, as often as they are described."""
    lines = [line.split() for line in metrics.render().decode().splitlines()]
    return [words[2].removeprefix("hiserve:").removesuffix("_total") for words in lines if words[:2] == ["#", "TYPE"]]


def test_no_metric_is_there_twice_and_every_alias_names_one() -> None:
    shown = kinds(Metrics("a", page_size=16, compat="none"))
    assert len(set(shown)) == len(shown)
    assert {row.name for row in ROWS} <= set(shown) and len({row.name for row in ROWS}) == len(ROWS)
    for listed in ALIASES.values():
        assert {alias.source for alias in listed} <= set(shown)
