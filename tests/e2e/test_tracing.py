"""The trace of a request that outlives its worker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx

from tests.e2e.live import serve
from tests.helpers.collector import sink
from tests.helpers.waiting import PATIENCE_S, wait_until

NUM_TOKENS = 200


def test_a_request_whose_worker_dies_is_one_trace_with_all_its_tokens(tmp_path: Path) -> None:
    body = {"prompt": "def add(a, b):", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with sink() as collector:
        with (
            serve(tmp_path, "--otel-endpoint", collector.url) as live,
            httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            os.kill(live.pids()[-1], signal.SIGKILL)
            events = [line.removeprefix("data: ") for line in lines if line]
            assert events[-1] == "[DONE]" and "error" not in json.loads(events[-2])
            wait_until(lambda: live.counter("hiserve:traced_requests_total", outcome="exported"))
        assert live.process.returncode == 0
    by_name = {span["name"]: span for span in collector.spans}
    assert sorted(by_name) == ["decode", "prefill", "queue", "text_completion hiserve-nano"]
    assert len(collector.spans) == len(by_name)
    found = by_name["text_completion hiserve-nano"]["attributes"]
    assert found["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert "error.type" not in found
