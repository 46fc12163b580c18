"""The hits of device and host together on a trace of 64 conversations, against one LRU cache as large as both.

    python -m benchmarks.tiers [--scales NAME,...]        writes benchmarks/results/tiers.json, about 3 minutes

Planner and index are the real ones, without a model: each step says one word, and a copy ends one step after it began.
``benchmarks.tiers_engine`` serves such traces with a model. Both tiers hold the pages of a step or two twice, because the
pages that the next step evicts must be on the host before. So their hits are those of a slightly smaller LRU cache.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, Record
from benchmarks.tier_traces import ORDERS, Conversations, Turn, UnionLru
from tests.helpers.copying import FILLER, add, copying_engine, run

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = (2, 3)
BAR = 0.95


@dataclass(frozen=True)
class Scale:
    """The size of a simulation; ``warm_up`` turns of all are not counted."""

    device: int = 1600  # pages
    longest: int = 80  # pages of a conversation, at most
    step: int = 16  # pages that a step computes, at most
    page_size: int = 4
    turns: int = 500
    warm_up: int = 150

    def requests(self, order: str, seed: int) -> list[tuple[Turn, np.ndarray]]:
        """Returns the turns of a trace, and the replies to them."""
        trace, served = Conversations(order, seed, self.page_size, self.longest), []
        for _ in range(self.turns):
            turn = trace.next()
            served.append((turn, np.full(turn.num_new, FILLER, dtype=np.int32)))
            trace.replied(*served[-1])
        return served


SCALES = {
    "as in make test": Scale(),
    "steps of 64 pages": Scale(step=64),
    "device of 800": Scale(device=800),
    "device of 400": Scale(device=400),
    "device of 3200": Scale(device=3200),
    "conversations of 160 in steps of 128": Scale(longest=160, step=128),
}


@dataclass(frozen=True)
class Found:
    """The counts of a simulation: tokens after its warm-up, pages of all of it."""

    tokens: int  # of prompts, found on either tier
    wanted: int  # that the union finds
    num_evicted: int  # pages that the device gave up
    num_lost: int  # of them, those on no other tier
    num_stored: int
    num_loaded: int

    @property
    def missing(self) -> int:
        """Prompt tokens that the union finds and the tiers do not."""
        return self.wanted - self.tokens


def simulate(scale: Scale, ratio: float, requests: list[tuple[Turn, np.ndarray]]) -> Found:
    """Serves a trace one request after the other; ``ratio`` is of host pages by device pages."""
    num_host_pages = int(scale.device * ratio)
    engine, _, cache = copying_engine(
        num_pages=scale.device + 1,
        num_host_pages=num_host_pages + 1,
        page_size=scale.page_size,
        max_len=(scale.longest + 2) * scale.page_size,
        budget=scale.step * scale.page_size,
    )
    union = UnionLru(scale.device + num_host_pages, scale.page_size)
    tokens, wanted = [], []
    for uid, (turn, reply) in enumerate(requests):
        wanted.append(union.serve(turn, reply))
        add(engine, uid, turn.prompt, turn.num_new)
        use = run(engine)[uid]
        tokens.append(use.device + use.host)
    copies = engine.stats().cache
    return Found(
        tokens=sum(tokens[scale.warm_up :]),
        wanted=sum(wanted[scale.warm_up :]),
        num_evicted=cache.device.num_evicted,
        num_lost=cache.tiers.num_unbacked,
        num_stored=copies.offloads.num_fulfilled,
        num_loaded=copies.loads.num_fulfilled,
    )


def measure(name: str, order: str, ratio: float, seed: int) -> dict[str, Any]:
    """Serves a trace; returns its counts, and the share of the union's hits."""
    found = simulate(SCALES[name], ratio, SCALES[name].requests(order, seed))
    share = found.tokens / found.wanted if found.wanted else None
    case = {"scale": name, "order": order, "host_to_device": ratio, "seed": seed, "found_of_union": share}
    return case | asdict(found) | {"bar": BAR, "met": found.tokens >= BAR * found.wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers.json", help="result file")
    parser.add_argument("--scales", default=",".join(SCALES), help="some of them, separated by commas")
    options = parser.parse_args()
    command = " ".join(["python -m benchmarks.tiers", *sys.argv[1:]])
    record = Record(options.out, command, "hiserve/cache/index", "hiserve/engine")
    record |= {"scales": {name: asdict(scale) for name, scale in SCALES.items()}, "results": []}
    for name in options.scales.split(","):
        for order, ratio, seed in [(order, ratio, seed) for order in ORDERS for ratio in RATIOS for seed in SEEDS]:
            record["results"].append(measure(name, order, ratio, seed))
            print(record["results"][-1], flush=True)
        record.save()


if __name__ == "__main__":
    main()
