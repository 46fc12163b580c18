"""The planning thread's cost of the prefix index, against the cost of comparing the same bytes.

    python -m benchmarks.radix            writes benchmarks/results/radix.json

Each sample builds what it changes anew, so that no sample profits from the one before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, Record
from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.core.digest import pack_tokens
from hiserve.core.plan import Int32Array

PAGE_SIZE = 16
PAGE_BYTES = 4 * PAGE_SIZE
PROMPT_TOKENS = 100_000
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
NUM_NODES = 300
TENANT = b"tenant"

MATCH_BAR = 25.0  # times memcmp of the same bytes
NODE_BAR_US, PAGE_BAR_US = 50.0, 0.2  # publish: per node, plus per page
EVICT_BAR_MS = 1.0  # 100 of 10,000 leaves


def new_cache(num_pages: int) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=PAGE_SIZE, namespace=b"bench")


def random_key(rng: np.random.Generator, num_pages: int) -> bytes:
    return pack_tokens(rng.integers(0, 128_000, num_pages * PAGE_SIZE))


def take(cache: PrefixCache, count: int) -> Int32Array:
    pages = cache.allocate(np.zeros(count, dtype=np.int32))
    assert pages is not None
    return pages


def publish(cache: PrefixCache, rng: np.random.Generator, key: bytes, cuts: list[int]) -> None:
    """Makes ``key`` findable, cut into nodes at ``cuts`` (in pages) by prompts that leave it there."""
    for first, last in zip([0, *cuts[:-1]], cuts, strict=True):
        with cache.lock(cache.match(TENANT, key[: first * PAGE_BYTES] + bytes(4))) as receipt:
            cache.insert(receipt, key[first * PAGE_BYTES : last * PAGE_BYTES], take(cache, last - first))
        with cache.lock(cache.match(TENANT, key[: first * PAGE_BYTES] + bytes(4))) as lock:
            cache.insert(lock, random_key(rng, 1), take(cache, 1))


def publish_all(cache: PrefixCache, runs: list[tuple[PrefixLock, bytes, Int32Array]]) -> None:
    for lock, key, pages in runs:
        cache.insert(lock, key, pages)


def timed(what: Callable[[], object]) -> float:
    gc.disable()
    start = time.perf_counter()
    what()
    end = time.perf_counter()
    gc.enable()
    return end - start


def measure_match(samples: int) -> dict[str, Any]:
    """Match, lock and release of a 100k-token prompt that lies over 300 nodes."""
    rng = np.random.default_rng(0)
    cache = new_cache(PROMPT_PAGES + 2 * NUM_NODES + 8)
    key = random_key(rng, PROMPT_PAGES)
    publish(cache, rng, key, [PROMPT_PAGES * (i + 1) // NUM_NODES for i in range(NUM_NODES)])
    prompt = key + bytes(4)
    path, node = 0, cache.match(TENANT, prompt)._node
    while node.parent is not None:
        path, node = path + 1, node.parent
    assert path == NUM_NODES, f"the prompt lies over {path} nodes"
    twin = bytes(bytearray(prompt))
    measured = {
        "match_lock_release_us": lambda: cache.release(cache.lock(cache.match(TENANT, twin))),
        "match_us": lambda: cache.match(TENANT, twin),
        "memcmp_us": lambda: prompt == twin,
    }
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(samples):
        for name, what in measured.items():
            taken[name].append(1e6 * timed(what))
    assert cache.match(TENANT, twin).num_tokens == PROMPT_TOKENS
    ratio = statistics.median(taken["match_lock_release_us"]) / statistics.median(taken["memcmp_us"])
    what = f"match + lock + release, {PROMPT_TOKENS} tokens over {NUM_NODES} nodes, page {PAGE_SIZE}"
    return figures(what, taken, {"ratio_to_memcmp": ratio, "bar_ratio": MATCH_BAR, "met": ratio <= MATCH_BAR})


def measure_publish(samples: int, num_nodes: int, num_pages: int) -> dict[str, Any]:
    """Publishing ``num_nodes`` runs of ``num_pages`` each: one call each, one node each."""
    rng, cost_us = np.random.default_rng(0), []
    for _ in range(samples):
        cache = new_cache(num_nodes * num_pages + 1)
        runs = [
            (cache.lock(cache.match(TENANT, b"")), random_key(rng, num_pages), take(cache, num_pages))
            for _ in range(num_nodes)
        ]
        cost_us.append(1e6 * timed(partial(publish_all, cache, runs)))
    bar_us, median = num_nodes * (NODE_BAR_US + num_pages * PAGE_BAR_US), statistics.median(cost_us)
    verdict = {"per_node_us": median / num_nodes, "bar_us": bar_us, "met": median <= bar_us}
    return figures(f"publish {num_nodes} nodes of {num_pages} pages", {"publish_us": cost_us}, verdict)


def measure_evict(samples: int) -> dict[str, Any]:
    """Taking 100 pages from a full pool of 10,000 one-page leaves."""
    leaves, wanted = 10_000, np.zeros(100, dtype=np.int32)
    rng, cost_ms = np.random.default_rng(0), []
    for _ in range(samples):
        cache = new_cache(leaves + 1)
        for _ in range(leaves):
            with cache.lock(cache.match(TENANT, b"")) as lock:
                cache.insert(lock, random_key(rng, 1), take(cache, 1))
        cost_ms.append(1e3 * timed(partial(cache.allocate, wanted)))
        assert cache.device.num_evicted == wanted.size
    what = f"evict {wanted.size} of {leaves} leaves (and take their pages)"
    verdict = {"bar_ms": EVICT_BAR_MS, "met": statistics.median(cost_ms) <= EVICT_BAR_MS}
    return figures(what, {"evict_ms": cost_ms}, verdict)


def figures(what: str, samples: dict[str, list[float]], verdict: dict[str, Any]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {"what": what, "median": median, **verdict, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=101, help="samples of the match; others take a part of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "radix.json", help="result file")
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
    command = " ".join(["python -m benchmarks.radix", *sys.argv[1:]])
    record = Record(options.out, command, "hiserve/cache/index", "hiserve/core", "benchmarks/radix.py")
    record["results"] = results
    record.save()


if __name__ == "__main__":
    main()
