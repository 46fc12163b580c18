"""What device and host find together of a trace of 64 conversations, against one LRU cache as large as both.

    python -m benchmarks.tiers            writes benchmarks/results/tiers.json, about 6 minutes

Planner and index are the real ones, without a model: each step says one word, and a copy ends one step after it began.
``benchmarks.tiers_engine`` serves such traces with a model.

Both tiers hold the pages of a step or two twice: what the next step evicts must be on the host before. So they find what an
LRU cache finds that is smaller by that (``as_large_as``). Where nearly all that comes back is nearly as old as what just went,
a cache smaller by 2 % loses far more than 2 % of its hits (``smaller_of_union``); where each conversation comes once a round,
all of them at once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, Record
from benchmarks.tier_traces import ORDERS, Conversations, Turn, UnionLru
from hiserve.cache.index.prefix_cache import Tier
from tests.helpers.copying import FILLER, add, copying_engine, run

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = (2, 3)
BAR = 0.95
SMALLER = 0.98


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: int = 1600  # pages of the device
    longest: int = 80  # of a conversation, in pages
    step: int = 16  # pages that a step computes at most
    page_size: int = 4  # tokens per page
    turns: int = 500  # served
    warm_up: int = 150  # of them, those that are not counted

    def requests(self, order: str, seed: int) -> list[tuple[Turn, np.ndarray]]:
        trace, served = Conversations(order, seed, self.page_size, self.longest), []
        for _ in range(self.turns):
            turn = trace.next()
            served.append((turn, np.full(turn.num_new, FILLER, dtype=np.int32)))
            trace.replied(*served[-1])
        return served

    def counted(self, serve: Callable[[Turn, np.ndarray], int], requests: list[tuple[Turn, np.ndarray]]) -> list[int]:
        return [serve(*request) for request in requests][self.warm_up :]

    def found_by_lru(self, num_pages: int, requests: list[tuple[Turn, np.ndarray]]) -> int:
        return sum(self.counted(UnionLru(num_pages, self.page_size).serve, requests))


SCALES = {
    "as in make test": Scale(),
    "steps of 64 pages": Scale(step=64),
    "device of 800": Scale(device=800),
    "device of 400": Scale(device=400),
    "device of 3200": Scale(device=3200),
    "conversations of 160 in steps of 128": Scale(longest=160, step=128),
}


class Fates:
    """Where each page was when it went for good."""

    def __init__(self) -> None:
        self._held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self._last: dict[bytes, Tier] = {}

    def stored(self, tier: Tier, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        self._held[tier].update(digests)

    def removed(self, tier: Tier, digests: list[bytes]) -> None:
        self._held[tier].difference_update(digests)
        self._last.update(dict.fromkeys(digests, tier))

    def cleared(self) -> None:
        raise AssertionError("nobody flushes")

    def went(self, digests: list[bytes]) -> Counter[str]:
        """Counts pages that are nowhere by the tier that had them last."""
        return Counter(f"evicted from the {self._last[each]}" for each in digests if each in self._last)


@dataclass(frozen=True)
class Found:
    """What a simulation found after its warm-up, and what it did in all."""

    tokens: int  # of prompts, on either tier
    wanted: int  # that the union would have found
    missing: Counter[str]  # pages that the union would have found besides, by where they were evicted
    num_evicted: int  # pages that the device gave up
    num_lost: int  # of them, those that were nowhere else
    num_stored: int  # pages copied to the host
    num_loaded: int  # pages copied from there


def simulate(scale: Scale, ratio: float, requests: list[tuple[Turn, np.ndarray]]) -> Found:
    """Serves a trace one request after the other; ``ratio`` is of host pages by device pages."""
    num_host_pages, fates = int(scale.device * ratio), Fates()
    engine, _, cache = copying_engine(
        num_pages=scale.device + 1,
        num_host_pages=num_host_pages + 1,
        page_size=scale.page_size,
        max_len=(scale.longest + 2) * scale.page_size,
        budget=scale.step * scale.page_size,
        listener=fates,
    )
    union = UnionLru(scale.device + num_host_pages, scale.page_size)
    gaps: list[Counter[str]] = []

    def serve(turn: Turn, reply: np.ndarray) -> int:
        uid, wanted = len(gaps), union.serve(turn, reply)
        _, missing = cache.missing(b"", turn.prompt.tobytes())
        add(engine, uid, turn.prompt, turn.num_new)
        use = run(engine)[uid]
        found = use.device + use.host
        gaps.append(fates.went(missing[: max(0, wanted - found) // scale.page_size]))
        wants.append(wanted)
        return found

    wants: list[int] = []
    tokens = sum(scale.counted(serve, requests))
    copies = engine.stats().cache
    return Found(
        tokens=tokens,
        wanted=sum(wants[scale.warm_up :]),
        missing=sum(gaps[scale.warm_up :], Counter()),
        num_evicted=cache.device.num_evicted,
        num_lost=cache.tiers.num_unbacked,
        num_stored=copies.stores.num_fulfilled,
        num_loaded=copies.loads.num_fulfilled,
    )


def measure(name: str, order: str, ratio: float, seed: int) -> dict[str, Any]:
    """Serves a trace, and compares what was found with what LRU caches of several sizes find."""
    scale = SCALES[name]
    requests = scale.requests(order, seed)
    found = simulate(scale, ratio, requests)
    num_pages = scale.device + int(scale.device * ratio)
    low, high = scale.device // 2, num_pages
    while high - low > max(1, num_pages // 400):
        middle = (low + high) // 2
        low, high = (middle, high) if scale.found_by_lru(middle, requests) < found.tokens else (low, middle)

    def share(tokens: int) -> float | None:
        return tokens / found.wanted if found.wanted else None

    shares = {
        "found_of_union": share(found.tokens),
        "device_alone_of_union": share(scale.found_by_lru(scale.device, requests)),
        "smaller_of_union": share(scale.found_by_lru(int(SMALLER * num_pages), requests)),
        "as_large_as": high / num_pages,
        "union_of_prompts": found.wanted / sum(turn.prompt.size for turn, _ in requests[scale.warm_up :]),
        "step_of_union": scale.step / num_pages,
    }
    return {
        "scale": name,
        "order": order,
        "host_to_device": ratio,
        "seed": seed,
        **shares,
        "pages": {
            "evicted": found.num_evicted,
            "lost": found.num_lost,
            "stored": found.num_stored,
            "loaded": found.num_loaded,
            "missing": dict(found.missing),
        },
        "bar": BAR,
        "met": found.tokens >= BAR * found.wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers.json", help="result file")
    parser.add_argument("--scales", default=",".join(SCALES), help="of them, separated by commas")
    options = parser.parse_args()
    command = " ".join(["python -m benchmarks.tiers", *sys.argv[1:]])
    record = Record(options.out, command, "hiserve/cache/index", "hiserve/engine")
    record |= {
        "what": "Prompt tokens found on device and host, against one LRU cache of both sizes and against smaller ones.",
        "scales": {name: asdict(scale) for name, scale in SCALES.items()},
        "results": [],
    }
    for name in options.scales.split(","):
        for order, ratio, seed in [(order, ratio, seed) for order in ORDERS for ratio in RATIOS for seed in SEEDS]:
            each = measure(name, order, ratio, seed)
            record["results"].append(each)
            hits = f"{text(each['found_of_union'])} of the union, as an LRU cache of {each['as_large_as']:.3f} of it"
            smaller = f"one of {SMALLER} finds {text(each['smaller_of_union'])}"
            missing = f"missing {each['pages']['missing']}"
            verdict = "bar met" if each["met"] else "BAR MISSED"
            print(
                f"{name}, {order}, host:device {ratio}, seed {seed}: {hits}; {smaller}; {missing}; {verdict}",
                flush=True,
            )
        record.save()


def text(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.3f}"


if __name__ == "__main__":
    main()
