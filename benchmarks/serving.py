"""What the way over HTTP costs: 32 streams against the same requests offline, on the CPU, in turns.

Usage: ``python -m benchmarks.serving``. hiserve-nano, 96 random prompts of 256 tokens, 128 tokens each, greedy, at most
32 at once, no prefix reused; server, scheduler, worker and load generator share the cores. Also: seconds from start
to ready, and the API process's memory. Bars: HTTP at least 0.8 x offline, ready within 6 s, at most 250 MB.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import SERVER
from benchmarks.record import ROOT, about
from hiserve import LLM, SamplingParams

STREAMS, PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 96, 256, 128
ROUNDS = 5
STARTS = 5
HISERVE = (sys.executable, "-m", "hiserve.cli")
SETTINGS = ("--disable-prefix-cache", "--log-level", "warning")
BARS = {"http_over_offline": 0.8, "ready_s": 6.0, "api_rss_mb": 250.0}


class Server:
    """``hiserve serve`` on a free port."""

    def __init__(self) -> None:
        begin = time.perf_counter()
        command = (*HISERVE, "serve", "--port", "0", *SETTINGS)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = next(found.group() for line in self._process.stdout if (found := re.search(r"http://\S+", line)))
        self.ready_s = time.perf_counter() - begin

    def rss_mb(self) -> float:
        """Returns the memory of the API process, in 10^6 bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024 / 1e6

    def stop(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def over_http(server: Server, seed: int) -> float:
    """Returns generated tokens per second of one run of ``hiserve bench serve``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        lengths = ("--input-length", str(PROMPT_TOKENS), "--output-length", str(OUTPUT_TOKENS))
        numbers = ("--num-prompts", str(PROMPTS), "--max-concurrency", str(STREAMS), "--seed", str(seed))
        command = (*HISERVE, "bench", "serve", "--url", server.url, *lengths, *numbers, "--output", str(out))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(out.read_text())["summary"]
    assert not summary["errors"], summary["errors"]
    return float(summary["output_tokens_per_s"])


def offline(llm: LLM, seed: int) -> float:
    """Returns generated tokens per second of the same requests through ``LLM``, in processes of its own."""
    prompts = np.random.default_rng(seed).integers(7, 4096, (PROMPTS, PROMPT_TOKENS)).tolist()
    begin = time.perf_counter()
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    seconds = time.perf_counter() - begin
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def main() -> int:
    """Writes ``benchmarks/results/serving.json``; returns 1 if a bar is missed."""
    starts = []
    for _ in range(STARTS - 1):
        server = Server()
        starts.append(server.ready_s)
        server.stop()
    server = Server()
    starts.append(server.ready_s)
    samples: dict[str, list[float]] = {"http": [], "offline": []}
    rss_mb: list[float] = []
    try:
        with LLM(disable_prefix_cache=True, log_level="warning") as llm:
            for seed in range(ROUNDS + 1):  # the first is not counted
                run = {"http": over_http(server, seed), "offline": offline(llm, seed)}
                for name, value in run.items():
                    samples[name] += [value] if seed else []
                rss_mb += [server.rss_mb()] if seed else []
    finally:
        server.stop()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    found = {
        "http_over_offline": medians["http"] / medians["offline"],
        "ready_s": statistics.median(starts),
        "api_rss_mb": statistics.median(rss_mb),
    }
    result = about("python -m benchmarks.serving", *SERVER, "hiserve/bench", "benchmarks/serving.py") | {
        "workload": f"{PROMPTS} x {PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, {STREAMS} at once, greedy, float32",
        "found": {name: round(value, 3) for name, value in found.items()},
        "bars": BARS,
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "samples": {name: [round(value, 1) for value in values] for name, values in samples.items()},
        "rss_mb": [round(value, 1) for value in rss_mb],
        "starts_s": [round(value, 2) for value in starts],
    }
    (ROOT / "benchmarks/results/serving.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:<18} {value:8.3f} (bar {BARS[name]:g})")
    is_missed = found["http_over_offline"] < BARS["http_over_offline"]
    return int(is_missed or any(found[name] > BARS[name] for name in ("ready_s", "api_rss_mb")))


if __name__ == "__main__":
    sys.exit(main())
