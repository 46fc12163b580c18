"""The benchmark of the cache runs from end to end at the size of a test, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_part_of_the_cache_benchmark_hits_what_it_measures(tmp_path: Path) -> None:
    out = tmp_path / "cache.json"
    command = [sys.executable, "-m", "benchmarks.cache", "--tiny", str(out), "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    parts, sizes = result["parts"], result["workload"]
    assert {sample["host_tokens"] for sample in parts["hit"]["samples"]["hits"]} == {sizes["prefix"]}
    assert {sample["device_tokens"] for sample in parts["hit"]["samples"]["rests"]} == {sizes["prefix"]}
    assert parts["others"]["host_tokens"] == [sizes["prefix"]] * sizes["num_loads"]
    assert parts["others"]["rows_still_decoding_at_the_end"] == sizes["rows"]
    assert parts["others"]["tpot_s"]["while loading"]["count"] > 0
    assert parts["write_through"]["stored_pages"] > 0
    assert parts["conversations"]["host"]["loaded_pages"] > 0
    assert parts["conversations"]["device"]["loaded_pages"] == 0
    assert parts["same_tokens"]["host_tokens"] > 0
    assert parts["same_tokens"]["distinct_tokens"] >= 20
    for name, bar in result["bars"].items():
        assert f"{name:<28}" in done.stdout
        assert bar > 0
