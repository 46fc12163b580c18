"""The cost of the host tier in an engine's first seconds, while its pages are pinned, and later.

Usage: ``python -m benchmarks.first_seconds OUT.json COMMIT [--shapes qwen3-0.6b llama-8b] [--rounds N] [--tiny]`` on a CUDA
device: random weights, defaults, engines of this process. The same workloads run over and over on an engine with the host tier
from the moment it is ready: rounds until its pages are all pinned (``early``), then ``--rounds`` more (``late``); then as many on
an engine without a host tier (``none``). Each round begins with an empty cache. Early over none is the cost of pinning and copies
together, late over none that of copies. Each round has the pages that were stored, why others were not, and the time of pinning:
pieces, seconds of all and of the longest. ``--tiny`` runs all of it on the CPU, where nothing is pinned, as a test of this file.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.drive import Drive
from benchmarks.record import ENGINE, Record, gpu_parser
from hiserve.models.model_config import NANO

SEED = 20261122
VOCAB_SIZE = 4096  # ids of prompts are below it
WORKLOADS = {"1 row": (1, 1024, 256), "128 rows": (128, 1024, 256)}  # rows, tokens of each prompt, of each reply
TINY_WORKLOADS = {"1 row": (1, 24, 4), "128 rows": (4, 24, 4)}
TINY: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256, "host_cache_gib": 0.05}
MAX_EARLY_S = 60.0


def watch_pinning(drive: Drive) -> list[float]:
    """Returns a list that grows by the seconds that each piece takes to pin, from now on."""
    taken: list[float] = []
    copier: Any = drive.engine._executor._tier_transfers  # type: ignore[attr-defined]
    if copier is not None:
        pace = copier._host.prefault.throttle
        told = pace.pinned

        def watched(taken_s: float) -> None:
            taken.append(taken_s)
            told(taken_s)

        pace.pinned = watched
    return taken


def run(drive: Drive, rows: int, num_prompt: int, num_output: int, rng: np.random.Generator) -> dict[str, Any]:
    """Returns rates of rows that come at once, and what was stored meanwhile; the cache is empty before."""
    drive.settle()
    drive.engine.flush()
    before = drive.engine.stats().cache.offloads
    prompts = [rng.integers(0, VOCAB_SIZE, num_prompt).astype(np.int32) for _ in range(rows)]
    begin = time.perf_counter()
    seen = [drive.add(prompt, num_output) for prompt in prompts]
    drive.finish(*seen)
    end = time.perf_counter()
    first = max(each.times[0] for each in seen) - begin
    after = drive.engine.stats().cache
    return {
        "tokens_per_s": rows * num_output / (end - begin),
        "prompts_s": first,
        "ms_per_token": (end - begin - first) / (num_output - 1) * 1e3,
        "host_pages": after.host.num_pages,
        "stored_pages": after.offloads.num_fulfilled - before.num_fulfilled,
        "stores_s": after.offloads.seconds - before.seconds,
        "not_stored": {
            reason: count - before.unfulfilled.get(reason, 0) for reason, count in after.offloads.unfulfilled.items()
        },
    }


def measure(
    settings: dict[str, Any], workloads: dict[str, tuple[int, int, int]], rounds: int, has_host: bool
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns every round of an engine, by workload: until its host pages are pinned, and afterwards."""
    found: dict[str, Any] = {name: {"early": [], "late": []} for name in workloads}
    rng = np.random.default_rng(SEED)
    drive = Drive(**settings | ({} if has_host else {"host_cache_gib": 0}), awaits_host=False)
    begin, pinned = time.perf_counter(), watch_pinning(drive)
    is_early = has_host  # at least once
    while is_early:
        for name, workload in workloads.items():
            before = len(pinned)
            made = run(drive, *workload, rng)
            seconds = pinned[before:]
            made["pinning"] = {"pieces": len(seconds), "s": sum(seconds), "longest_s": max(seconds, default=0.0)}
            made["at_s"] = time.perf_counter() - begin
            found[name]["early"].append(made)
            print(f"  early, {name}: {made}", flush=True)
        is_early = not drive.is_host_ready and time.perf_counter() < begin + MAX_EARLY_S
    drive.await_host()
    for number in range(1 + rounds):
        for name, workload in workloads.items():
            made = run(drive, *workload, rng)
            if number:
                found[name]["late"].append(made)
    drive.close()
    return found


def compare(found: dict[str, Any], none: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns medians of tokens a second over those without a host tier, by workload; of early rounds the first too."""
    told = {}
    for name, kinds in found.items():
        base = statistics.median(each["tokens_per_s"] for each in none[name]["late"])
        rates = {kind: [each["tokens_per_s"] for each in rounds] for kind, rounds in kinds.items()}
        told[name] = {kind: round(statistics.median(each) / base, 3) for kind, each in rates.items() if each}
        if rates["early"]:
            told[name]["first"] = round(rates["early"][0] / base, 3)
    return told


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    command = f"python -m benchmarks.first_seconds OUT.json COMMIT --shapes {' '.join(given.shapes)}"
    result = Record.of(given, command, *ENGINE)
    result |= {"seed": SEED, "shapes": {}}
    workloads = TINY_WORKLOADS if given.tiny else WORKLOADS
    for shape in [NANO] if given.tiny else given.shapes:
        settings = TINY if given.tiny else {"shape": shape, "load_format": "dummy", "device": "cuda"}
        rounds = {name: measure(settings, workloads, given.rounds, name == "host") for name in ("none", "host")}
        told = compare(rounds["host"], rounds["none"])
        result["shapes"][shape] = {"of no host tier": told, "rounds": rounds}
        result.save()
        print(shape, json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
