"""What the planning thread spends on a decode step: plan and commit, page publication included.

    python -m benchmarks.planner            writes benchmarks/results/planner.json

Every row decodes one token a step. Rows are staggered over the page, so that in each step one
row in sixteen takes a new page and one in sixteen publishes a full one. Results come from no
model: they are made up between the timed parts. The clock is the thread's CPU time: on a
machine with other work, wall time measures the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import about
from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.manager import CacheManager
from hiserve.core.plan import StepResult
from hiserve.core.request import SamplingParams
from hiserve.worker.planner import Planner
from hiserve.worker.waiting import Request

MEASURED = (
    *(f"hiserve/worker/{name}.py" for name in ("planner", "budget", "columns", "journal", "stops", "scores", "report")),
    "hiserve/cache/index",
    "hiserve/core/plan.py",
    "benchmarks/planner.py",
)
RESULTS = Path(__file__).parent / "results" / "planner.json"
PAGE_SIZE = 16
PROMPT_TOKENS = 512
BARS_US = {32: 150.0, 256: 300.0}
WARM_UP_STEPS = 64


def decoding_planner(num_rows: int, num_steps: int, rng: np.random.Generator) -> Planner:
    """Returns a planner whose rows have all computed their prompts, staggered over the page."""
    max_len = PROMPT_TOKENS + PAGE_SIZE + num_steps + WARM_UP_STEPS + 8
    cache = CacheManager(
        num_pages=num_rows * (max_len // PAGE_SIZE + 2) + 1,
        page_size=PAGE_SIZE,
        namespace=b"bench",
        eviction=LruEviction(),
    )
    planner = Planner(
        cache=cache,
        max_rows=num_rows,
        max_len=max_len,
        max_batched_tokens=num_rows * (PROMPT_TOKENS + PAGE_SIZE),
        eos_token_ids=(1, 2),
    )
    for uid in range(num_rows):
        prompt = rng.integers(3, 128_000, PROMPT_TOKENS + uid % PAGE_SIZE).astype(np.int32)
        sampling = SamplingParams(seed=0, max_tokens=max_len)
        planner.add(Request(uid, prompt, prompt.size, sampling, tenant=b"", choice=0))
    return planner


def steps(planner: Planner, num_rows: int, rng: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """Runs steps for ever; yields the nanoseconds that plan, commit and report took."""
    clock = time.thread_time_ns
    counts = np.ones(num_rows, dtype=np.int32)
    while True:
        tokens = rng.integers(3, 128_000, (num_rows, 1)).astype(np.int32)
        start = clock()
        plan = planner.plan()
        planned = clock()
        assert plan is not None and plan.samples.all() and plan.rows.size == num_rows
        result = StepResult(plan.step_id, counts, tokens)
        before = clock()
        planner.commit(result)
        committed = clock()
        planner.take_report()
        yield planned - start, committed - before, clock() - committed


def measure(num_rows: int, num_steps: int) -> dict[str, Any]:
    """Returns medians, the 99th percentile and every sample of ``num_steps`` steps."""
    rng = np.random.default_rng(0)
    run = steps(decoding_planner(num_rows, num_steps, rng), num_rows, rng)
    for _ in range(WARM_UP_STEPS):  # the first computes the prompts
        next(run)
    samples = np.array([next(run) for _ in range(num_steps)]) / 1e3
    plan_us, commit_us, report_us = samples.T
    both_us = plan_us + commit_us
    median = statistics.median(both_us.tolist())
    return {
        "what": f"plan + commit of a step of {num_rows} decoding rows, page {PAGE_SIZE}, publication included",
        "rows": num_rows,
        "steps": num_steps,
        "median": {
            "plan_and_commit_us": round(median, 1),
            "plan_us": round(float(np.median(plan_us)), 1),
            "commit_us": round(float(np.median(commit_us)), 1),
            "report_us": round(float(np.median(report_us)), 1),
        },
        "p99": {"plan_and_commit_us": round(float(np.percentile(both_us, 99)), 1)},
        "bar_us": BARS_US[num_rows],
        "met": median <= BARS_US[num_rows],
        "samples": {
            "plan_us": plan_us.round(1).tolist(),
            "commit_us": commit_us.round(1).tolist(),
            "report_us": report_us.round(1).tolist(),
        },
    }


def main() -> None:
    """Measures both sizes, prints the medians and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="timed steps per size")
    parser.add_argument("--core", type=int, default=0, help="core to stay on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    results = [measure(num_rows, options.steps) for num_rows in BARS_US]
    for result in results:
        print(result["what"], result["median"], result["p99"], "bar met" if result["met"] else "BAR MISSED")
    command = " ".join(["python -m benchmarks.planner", *sys.argv[1:]])
    record = {
        "what": "Cost of a decode step on the planning thread: CPU time of the thread, pinned to one core.",
        **about(command, *MEASURED),
        "load": f"1-minute load average {os.getloadavg()[0]:.1f}",
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
