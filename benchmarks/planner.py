"""The CPU time of the planning thread for a decode step, and for a node of the tree that is published and stored.

    python -m benchmarks.planner            writes benchmarks/results/planner.json

Every row decodes one token a step, staggered over the page: in each step one row in sixteen takes a new page and one in
sixteen publishes a full one. Results come from no model: they are made up between the timed parts. With a host tier every
page is stored there, and the copies of a step have ended when the next is planned.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, Record
from hiserve.cache.index.prefix_cache import PrefixCache, Tier
from hiserve.core.plan import StepResult
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck
from hiserve.engine.planner import Planner
from hiserve.engine.queue import Request

MEASURED = (
    *(f"hiserve/engine/{name}.py" for name in ("planner", "rows", "page_tables", "budget", "admission")),
    *(f"hiserve/engine/{name}.py" for name in ("host_loads", "store_prefetch", "drafting", "output", "cache_counters")),
    "hiserve/engine/queue.py",
    "hiserve/cache/index",
    "hiserve/core/plan.py",
    "benchmarks/planner.py",
)
PAGE_SIZE = 16
PROMPT_TOKENS = 512
BARS_US = {32: 150.0, 256: 300.0}
WARM_UP_STEPS = 64
NODE_PAGES = (1, 4, 16, 64)
NODE_BAR_US, PAGE_BAR_US = 50.0, 0.2
MAX_STORED_PAGES = 64  # of one node at once


def decoding_planner(num_rows: int, num_steps: int, rng: np.random.Generator, *, has_host: bool) -> Planner:
    """Returns a planner whose rows have all computed their prompts, staggered over the page."""
    max_len = PROMPT_TOKENS + PAGE_SIZE + num_steps + WARM_UP_STEPS + 8
    num_pages = num_rows * (max_len // PAGE_SIZE + 2) + 1
    cache = PrefixCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        namespace=b"bench",
        num_host_pages=num_pages if has_host else 0,
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
    """Runs steps for ever; yields the nanoseconds that plan (the end of copies included), commit and report took."""
    clock = time.thread_time_ns
    counts = np.ones(num_rows, dtype=np.int32)
    acks: list[CopyAck] = []
    while True:
        tokens = rng.integers(3, 128_000, (num_rows, 1)).astype(np.int32)
        start = clock()
        planner.complete_transfers(acks)
        plan = planner.plan()
        planned = clock()
        assert plan is not None and plan.samples.all() and plan.rows.size == num_rows
        acks = [CopyAck(copy.op, num_bytes=copy.host_pages.size) for copy in plan.copies]
        result = StepResult(plan.step_id, counts, tokens)
        before = clock()
        planner.commit(result)
        committed = clock()
        planner.take_report()
        yield planned - start, committed - before, clock() - committed


def figures(what: str, size: dict[str, int], total: str, parts: dict[str, np.ndarray], bar_us: float) -> dict[str, Any]:
    """Returns medians, the 99th percentile and every sample, in microseconds; the first part is the one with a bar."""
    median = {name: round(float(np.median(samples)), 1) for name, samples in parts.items()}
    return {
        "what": what,
        **size,
        "median": median,
        "p99": {total: round(float(np.percentile(parts[total], 99)), 1)},
        "bar_us": bar_us,
        "met": float(np.median(parts[total])) <= bar_us,
    }


def measure(num_rows: int, num_steps: int, *, has_host: bool) -> dict[str, Any]:
    """Measures ``num_steps`` steps after the first ones."""
    rng = np.random.default_rng(0)
    planner = decoding_planner(num_rows, num_steps, rng, has_host=has_host)
    run = steps(planner, num_rows, rng)
    for _ in range(WARM_UP_STEPS):  # the first computes the prompts
        next(run)
    plan_us, commit_us, report_us = (np.array([next(run) for _ in range(num_steps)]) / 1e3).T
    parts = {"plan_us": plan_us, "commit_us": commit_us, "report_us": report_us}
    tiers = "written through to the host" if has_host else "one tier"
    what = f"plan + commit of a step of {num_rows} decoding rows, page {PAGE_SIZE}, publication included, {tiers}"
    found = figures(
        what,
        {"rows": num_rows, "steps": num_steps, "stored_pages": planner.stats().cache.offloads.num_fulfilled},
        "plan_and_commit_us",
        {"plan_and_commit_us": plan_us + commit_us} | parts,
        BARS_US[num_rows],
    )
    return found | {"samples": {name: samples.round(1).tolist() for name, samples in parts.items()}}


def measure_nodes(num_pages: int, num_nodes: int) -> dict[str, Any]:
    """Measures the publication of a new node, the begin of its store, and the end of that."""
    rng = np.random.default_rng(0)
    room = num_pages * num_nodes + 2
    cache = PrefixCache(num_pages=room, page_size=PAGE_SIZE, namespace=b"bench", num_host_pages=room)
    clock = time.thread_time_ns
    samples = []
    for step in range(1, num_nodes + 1):
        key = rng.integers(3, 128_000, num_pages * PAGE_SIZE).astype(np.int32).tobytes()
        lock = cache.lock(cache.match(b"", key))
        pages = cache.allocate(np.zeros(num_pages, dtype=np.int32))
        assert pages is not None
        start = clock()
        cache.insert(lock, key, pages, step)
        published = clock()
        (copy,) = cache.begin_offloads(MAX_STORED_PAGES)
        begun = clock()
        cache.complete(copy.op, ok=True)
        samples.append((published - start, begun - published, clock() - begun))
        cache.release(lock)
        for tier in Tier:
            cache.take_events(tier)
    publish_us, begin_us, settle_us = np.array(samples[num_nodes // 10 :]).T / 1e3
    all_us = publish_us + begin_us + settle_us
    found = figures(
        f"publication and backup of a node of {num_pages} pages",
        {"pages": num_pages, "nodes": all_us.size},
        "publish_and_store_us",
        {"publish_and_store_us": all_us, "publish_us": publish_us, "begin_store_us": begin_us, "settle_us": settle_us},
        NODE_BAR_US + PAGE_BAR_US * num_pages,
    )
    return found | {"samples": {"publish_and_store_us": all_us.round(1).tolist()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="timed steps, or nodes, per size")
    parser.add_argument("--core", type=int, default=0, help="core to stay on")
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json", help="result file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    results = [measure(rows, options.steps, has_host=has_host) for has_host in (False, True) for rows in BARS_US]
    results += [measure_nodes(num_pages, options.steps) for num_pages in NODE_PAGES]
    for result in results:
        print(result["what"], result["median"], result["p99"], "bar met" if result["met"] else "BAR MISSED")
    record = Record(options.out, " ".join(["python -m benchmarks.planner", *sys.argv[1:]]), *MEASURED)
    record |= {"load": f"1-minute load average {os.getloadavg()[0]:.1f}", "results": results}
    record.save()


if __name__ == "__main__":
    main()
