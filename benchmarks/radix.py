"""The planning thread's cost of the prefix index, against the cost of comparing the same bytes.

    python -m benchmarks.radix            writes benchmarks/results/radix.json

Each sample builds what it changes anew, so that no sample profits from the one before.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.manager import CacheManager
from hiserve.core.digest import pack_tokens
from hiserve.core.plan import Int32Array

RESULTS = Path(__file__).parent / "results" / "radix.json"
PAGE_SIZE = 16
PAGE_BYTES = 4 * PAGE_SIZE
PROMPT_TOKENS = 100_000
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
NUM_NODES = 300
TENANT = b"tenant"

MATCH_BAR = 25.0  # times memcmp of the same bytes
NODE_BAR_US, PAGE_BAR_US = 50.0, 0.2  # publish: per node, plus per page
EVICT_BAR_MS = 1.0  # 100 of 10,000 leaves

rng = np.random.default_rng(0)


def new_cache(num_pages: int) -> CacheManager:
    """Returns an empty index of the default kind."""
    return CacheManager(num_pages=num_pages, page_size=PAGE_SIZE, namespace=b"bench", eviction=LruEviction())


def random_key(num_pages: int) -> bytes:
    """Returns packed random tokens for whole pages."""
    return pack_tokens(rng.integers(0, 128_000, num_pages * PAGE_SIZE))


def take(cache: CacheManager, count: int) -> Int32Array:
    """Takes ``count`` pages without preference."""
    pages = cache.take(np.zeros(count, dtype=np.int32), 0)
    assert pages is not None
    return pages


def publish(cache: CacheManager, key: bytes, cuts: list[int]) -> None:
    """Makes ``key`` findable, cut into nodes at ``cuts`` (in pages) by prompts that leave it there."""
    for first, last in zip([0, *cuts[:-1]], cuts, strict=True):
        with cache.lock(cache.match(TENANT, key[: first * PAGE_BYTES] + bytes(4))) as receipt:
            cache.publish(receipt, key[first * PAGE_BYTES : last * PAGE_BYTES], take(cache, last - first))
        with cache.lock(cache.match(TENANT, key[: first * PAGE_BYTES] + bytes(4))) as receipt:
            cache.publish(receipt, random_key(1), take(cache, 1))


def timed(what: Callable[[], object]) -> float:
    """Returns the seconds one call takes, with the garbage collector out of the way."""
    gc.disable()
    start = time.perf_counter()
    what()
    end = time.perf_counter()
    gc.enable()
    return end - start


def measure_match(samples: int) -> dict[str, Any]:
    """Match, lock and release of a 100k-token prompt that lies over 300 nodes."""
    cache = new_cache(PROMPT_PAGES + 2 * NUM_NODES + 8)
    key = random_key(PROMPT_PAGES)
    publish(cache, key, [PROMPT_PAGES * (i + 1) // NUM_NODES for i in range(NUM_NODES)])
    prompt = key + bytes(4)
    path, node = 0, cache.match(TENANT, prompt)._node
    while node.parent is not None:
        path, node = path + 1, node.parent
    assert path == NUM_NODES, f"the prompt lies over {path} nodes"
    twin = bytes(bytearray(prompt))
    match_us, whole_us, memcmp_us = [], [], []
    for _ in range(samples):
        memcmp_us.append(1e6 * timed(lambda: prompt == twin))
        match_us.append(1e6 * timed(lambda: cache.match(TENANT, twin)))
        whole_us.append(1e6 * timed(lambda: cache.release(cache.lock(cache.match(TENANT, twin)))))
    assert cache.match(TENANT, twin).num_tokens == PROMPT_TOKENS
    ratio = statistics.median(whole_us) / statistics.median(memcmp_us)
    return {
        "what": f"match + lock + release, {PROMPT_TOKENS} tokens over {NUM_NODES} nodes, page {PAGE_SIZE}",
        "median": {
            name: statistics.median(v) for name, v in zip(UNITS_MATCH, (whole_us, match_us, memcmp_us), strict=True)
        },
        "ratio_to_memcmp": ratio,
        "bar_ratio": MATCH_BAR,
        "met": ratio <= MATCH_BAR,
        "samples": dict(zip(UNITS_MATCH, (whole_us, match_us, memcmp_us), strict=True)),
    }


UNITS_MATCH = ("match_lock_release_us", "match_us", "memcmp_us")


def measure_publish(samples: int, num_nodes: int, num_pages: int) -> dict[str, Any]:
    """Publishing ``num_nodes`` runs of ``num_pages`` each: one call each, one node each."""
    cost_us = []
    for _ in range(samples):
        cache = new_cache(num_nodes * num_pages + 1)
        keys = [random_key(num_pages) for _ in range(num_nodes)]
        pages = [take(cache, num_pages) for _ in range(num_nodes)]
        receipts = [cache.lock(cache.match(TENANT, b"")) for _ in range(num_nodes)]
        runs = list(zip(receipts, keys, pages, strict=True))
        cost_us.append(1e6 * timed(lambda cache=cache, runs=runs: [cache.publish(*run) for run in runs]))
    bar_us = num_nodes * NODE_BAR_US + num_nodes * num_pages * PAGE_BAR_US
    median = statistics.median(cost_us)
    return {
        "what": f"publish {num_nodes} nodes of {num_pages} pages",
        "median": {"publish_us": median},
        "per_node_us": median / num_nodes,
        "bar_us": bar_us,
        "met": median <= bar_us,
        "samples": {"publish_us": cost_us},
    }


def measure_evict(samples: int) -> dict[str, Any]:
    """Taking 100 pages from a full pool of 10,000 one-page leaves."""
    leaves, wanted = 10_000, np.zeros(100, dtype=np.int32)
    cost_ms = []
    for _ in range(samples):
        cache = new_cache(leaves + 1)
        for _ in range(leaves):
            with cache.lock(cache.match(TENANT, b"")) as receipt:
                cache.publish(receipt, random_key(1), take(cache, 1))
        cost_ms.append(1e3 * timed(lambda cache=cache: cache.take(wanted, 0)))
        assert cache.num_evicted == wanted.size
    median = statistics.median(cost_ms)
    return {
        "what": f"evict {wanted.size} of {leaves} leaves (and take their pages)",
        "median": {"evict_ms": median},
        "bar_ms": EVICT_BAR_MS,
        "met": median <= EVICT_BAR_MS,
        "samples": {"evict_ms": cost_ms},
    }


def hardware() -> str:
    """Returns the processor's name and how many of its cores are here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def commit() -> str:
    """Returns the checkout's commit, marked when tracked files of the index differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    paths = ["hiserve/cache/index", "hiserve/core", "benchmarks/radix.py"]
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *paths], check=False).returncode
    return head.stdout.strip() + ("+changes" if dirty else "")


def main() -> None:
    """Runs every measurement, prints the medians and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=101, help="samples of the match; others take a part of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file")
    options = parser.parse_args()
    few = max(3, options.samples // 10)
    results = [
        measure_match(options.samples),
        measure_publish(few, num_nodes=300, num_pages=20),
        measure_publish(few, num_nodes=300, num_pages=1),
        measure_publish(few, num_nodes=1, num_pages=PROMPT_PAGES),
        measure_evict(max(3, few // 2)),
    ]
    for result in results:
        print(result["what"], result["median"], "bar met" if result["met"] else "BAR MISSED")
    versions = {"python": platform.python_version(), "numpy": np.__version__, "xxhash": xxhash.VERSION}
    record = {
        "what": "Cost of the prefix index on the planning thread.",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": versions,
        "commit": commit(),
        "command": " ".join(["python -m benchmarks.radix", *sys.argv[1:]]),
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
