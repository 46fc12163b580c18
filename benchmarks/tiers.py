"""What device and host find together of a trace of 64 conversations, against one LRU cache as large as both.

    python -m benchmarks.tiers            writes benchmarks/results/tiers.json

Planner and index are the real ones, without a model: each step says one word, and a copy ends one step after it began.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.record import about
from benchmarks.tier_traces import ORDERS, UnionLru, conversations
from tests.helpers.copying import add, copying_engine, run

RESULTS = Path(__file__).parent / "results" / "tiers.json"
PAGE, MAX_PAGES, BUDGET, NUM_DEVICE_PAGES = 4, 80, 64, 1600
NUM_TURNS, NUM_WARM_UP = 500, 150
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = (2, 3)
BAR = 0.95


def measure(order: str, ratio: float, seed: int) -> dict[str, Any]:
    """Serves a trace, and counts its prompts' tokens that were found on either tier."""
    num_host_pages = int(NUM_DEVICE_PAGES * ratio)
    engine, _, cache = copying_engine(
        num_pages=NUM_DEVICE_PAGES + 1,
        num_host_pages=num_host_pages + 1,
        page_size=PAGE,
        max_len=MAX_PAGES * PAGE + 8,
        budget=BUDGET,
    )
    union, device = (UnionLru(pages, PAGE) for pages in (NUM_DEVICE_PAGES + num_host_pages, NUM_DEVICE_PAGES))
    found, wanted, alone = 0, 0, 0
    for uid, turn in enumerate(islice(conversations(order, seed, PAGE, MAX_PAGES), NUM_TURNS)):
        both, one = union.serve(turn), device.serve(turn)
        add(engine, uid, turn.prompt, turn.num_new)
        use = run(engine)[uid]
        if uid >= NUM_WARM_UP:
            found, wanted, alone = found + use.device + use.host, wanted + both, alone + one
    copies = engine.stats().cache
    return {
        "order": order,
        "host_to_device": ratio,
        "seed": seed,
        "found_of_union": found / wanted,
        "device_alone_of_union": alone / wanted,
        "pages": {
            "evicted": cache.num_evicted,
            "lost": cache.tiers.num_unbacked,
            "stored": copies.stores.num_fulfilled,
            "loaded": copies.loads.num_fulfilled,
        },
        "bar": BAR,
        "met": found >= BAR * wanted,
    }


def main() -> None:
    """Runs every case, prints and records it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file")
    options = parser.parse_args()
    results = [measure(order, ratio, seed) for order in ORDERS for ratio in RATIOS for seed in SEEDS]
    for each in results:
        where = f"{each['order']:7} host:device {each['host_to_device']:4} seed {each['seed']}"
        figures = f"{each['found_of_union']:.3f} of the union, the device alone {each['device_alone_of_union']:.3f}"
        print(where, figures, "bar met" if each["met"] else "BAR MISSED")
    record = {
        "what": "Prompt tokens found on device and host, against one LRU cache of both sizes.",
        **about(" ".join(["python -m benchmarks.tiers", *sys.argv[1:]]), "hiserve/cache/index", "hiserve/worker"),
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
