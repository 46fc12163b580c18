"""The cost of HTTP: 32 streams against the same requests offline, on the CPU, in turns.

Usage: ``python -m benchmarks.serving``. hiserve-nano, 96 random prompts of 256 tokens, 128 tokens each, greedy, at most
32 at once, no prefix reused; server, scheduler, worker and load generator share the cores. Also: seconds from start
to ready, and the API process's memory. Bars: HTTP at least 0.8 x offline, ready within 6 s, at most 250 MB.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from benchmarks.record import RESULTS, SERVER, Record, judge, medians
from benchmarks.served import bench_serve, serving
from hiserve import LLM, SamplingParams

STREAMS, PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 96, 256, 128
ROUNDS = 5
STARTS = 5
LOAD = {
    "input_length": PROMPT_TOKENS,
    "output_length": OUTPUT_TOKENS,
    "num_prompts": PROMPTS,
    "max_concurrency": STREAMS,
}
LEAST, MOST = {"http_over_offline": 0.8}, {"ready_s": 6.0, "api_rss_mb": 250.0}


def offline(llm: LLM, seed: int) -> float:
    """Returns generated tokens per second of the same requests through ``LLM``, in processes of its own."""
    prompts = np.random.default_rng(seed).integers(7, 4096, (PROMPTS, PROMPT_TOKENS)).tolist()
    begin = time.perf_counter()
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    seconds = time.perf_counter() - begin
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def main() -> int:
    starts: list[float] = []
    samples: dict[str, list[float]] = {"http": [], "offline": []}
    rss_mb: list[float] = []
    for start in range(STARTS):
        with serving("--disable-prefix-cache") as server:
            starts.append(server.ready_s)
            if start < STARTS - 1:
                continue
            with LLM(disable_prefix_cache=True, log_level="warning") as llm:
                for seed in range(ROUNDS + 1):  # the first is not counted
                    http = bench_serve(server.url, **LOAD, seed=seed)["output_tokens_per_s"]
                    run = {"http": http, "offline": offline(llm, seed)}
                    for name, value in run.items():
                        samples[name] += [value] if seed else []
                    rss_mb += [server.rss_mb()] if seed else []
    tokens_per_s = medians(samples, 1)
    found = {
        "http_over_offline": tokens_per_s["http"] / tokens_per_s["offline"],
        "ready_s": statistics.median(starts),
        "api_rss_mb": statistics.median(rss_mb),
    }
    paths = (*SERVER, "hiserve/bench", "benchmarks/serving.py")
    record = Record(RESULTS / "serving.json", "python -m benchmarks.serving", *paths)
    record |= {
        "workload": f"{PROMPTS} x {PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, {STREAMS} at once, greedy, float32",
        "found": {name: round(value, 3) for name, value in found.items()},
        "bars": LEAST | MOST,
        "tokens_per_s": tokens_per_s,
        "samples": {name: [round(value, 1) for value in values] for name, values in samples.items()},
        "rss_mb": [round(value, 1) for value in rss_mb],
        "starts_s": [round(value, 2) for value in starts],
    }
    record.save()
    return int(bool(judge(found, least=LEAST, most=MOST)))


if __name__ == "__main__":
    sys.exit(main())
