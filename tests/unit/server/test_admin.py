"""Health, metrics, information and flushing."""

from __future__ import annotations

import logging
import os

import pytest

from hiserve.core.request import FinishReason
from hiserve.errors import EngineError
from hiserve.messages.types import WorkerStats
from hiserve.server.metrics import Meter, Metrics
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import NUM_STEPS, REPLY, Server, make_server


async def test_health_says_ok_whatever_the_engine_does(server: Server) -> None:
    server.engine.hangs, server.engine.is_ready = True, False
    assert (await server.get("/health")).json == {"status": "ok"}
    assert (await server.call("HEAD", "/health").end()).status == 200


async def test_server_info_shows_processes_configuration_and_counters(server: Server) -> None:
    server.engine.stats = WorkerStats(free_pages=60, evictable_pages=40)
    info = (await server.get("/server_info")).json
    assert info["version"]
    assert info["config"]["cache"]["page_size"] == 16
    assert any(line.startswith("--kv-pages auto -> ") for line in info["decisions"])
    assert info["startup_s"]["api"]["tokenizer"] == 0.1
    assert info["startup_s"]["worker 0"] == {"load": 0.5}
    workers = [{"replica": 0, "pid": 4243, "incarnation": 1}]
    assert info["processes"] == {"api": os.getpid(), "scheduler": 4242, "workers": workers}
    (worker,) = info["workers"]
    assert worker["stats"]["free_pages"] + worker["stats"]["evictable_pages"] == worker["num_pages"]


async def test_server_info_of_an_engine_that_does_not_answer_is_a_503(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiserve.server.admin.STATUS_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    call = await server.get("/server_info")
    assert call.status == 503
    assert "did not answer" in call.json["error"]["message"]


async def test_server_info_before_the_engine_has_started() -> None:
    server = make_server(FakeEngineClient(script=lambda prompt: []))
    info = (await server.get("/server_info")).json
    assert info["not_ready_because"] == "the model is loading"
    assert info["processes"] == {"api": os.getpid(), "scheduler": None, "workers": []}
    assert (await server.get("/v1/models")).status == 200
    assert (await server.get("/metrics")).status == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flushing_says_how_many_pages(server: Server, method: str) -> None:
    assert (await server.call(method, "/flush_cache").end()).json == {"flushed_pages": 7}
    assert server.engine.flushed == 1


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


async def test_metrics_of_an_engine_that_does_not_answer_keep_their_values(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.stats = WorkerStats(running=5)
    await server.get("/metrics")
    monkeypatch.setattr("hiserve.server.admin.METRICS_TIMEOUT_S", 0.01)
    server.engine.hangs = True
    assert await server.metric("hiserve:num_requests_running") == 5
    assert await server.metric("hiserve:engine_up") == 0


async def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics("a"), Metrics("b")
    Meter(first, num_prompt=5, arrived=0.0).admitted(0)
    assert b'hiserve:prompt_tokens_total{model_name="a"} 5.0' in first.render()
    assert b'hiserve:prompt_tokens_total{model_name="b"} 0.0' in second.render()


def test_tokens_that_arrive_together_share_the_time() -> None:
    metrics = Metrics("a")
    meter = Meter(metrics, num_prompt=5, arrived=0.0)
    meter.tokens(3)
    meter.tokens(4)
    meter.tokens(0)
    assert b'hiserve:inter_token_latency_seconds_count{model_name="a"} 4.0' in metrics.render()
    assert b'hiserve:generation_tokens_total{model_name="a"} 7.0' in metrics.render()


async def test_each_request_is_one_log_line_without_its_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hiserve")
    await server.chat("a very secret prompt")
    await server.chat("a very secret prompt", stream=True)
    server.engine.fail_at, server.engine.failure = 1, EngineError("broke.")
    await server.chat("a very secret prompt")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("hiserve")]
    assert len(lines) == 3
    assert [line.split()[1].rstrip(":") for line in lines] == ["stop", "stop", "error"]
    assert "secret" not in "".join(lines)
    assert REPLY not in "".join(lines)
