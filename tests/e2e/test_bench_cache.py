"""``hiserve bench cache`` against a live server: what fits the host comes back from it, all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hiserve import cli
from tests.e2e.live import serve

# Six conversations of some 15 pages each visit a device of 63 pages by twos, in turn: each has left it when it comes back.
SERVER = ("--kv-pages", "64", "--max-model-len", "512", "--max-batched-tokens", "128", "--host-cache-gib", "0.2")
CONVERSATIONS = ("--num-conversations", "6", "--group-size", "2", "--num-rounds", "3", "--conversation-length", "200")
LENGTHS = ("--request-length", "20", "--output-length", "4", "--flush-cache")


@pytest.mark.wide
def test_a_working_set_that_fits_the_host_is_as_good_as_endless(tmp_path: Path) -> None:
    output, plot = tmp_path / "run.json", tmp_path / "run.png"
    with serve(tmp_path, *SERVER, "--cpu-threads", "1", "--log-level", "warning") as live:
        argv = ["bench", "cache", "--url", live.url, *CONVERSATIONS, *LENGTHS]
        assert cli.main([*argv, "--output", str(output), "--plot", str(plot)]) == 0
    found = json.loads(output.read_bytes())
    cache = found["cache"]
    assert cache["num_ok"] == 18
    assert cache["hit_rate"] > 0.5
    assert cache["share_of_most"] >= 0.98
    assert cache["num_above_most"] == 0
    assert found["server_counters"]['hiserve:cached_tokens_total{cache_source="host"}'] > 1000
    assert cache["num_cached"]["host"] > cache["num_cached"]["device"]
    assert cache["ttft_ms"]["host"]["count"] == 12
    assert found["copies"]["loads"]["num_pages"] * 16 >= cache["num_cached"]["host"]
    assert plot.stat().st_size > 20_000
