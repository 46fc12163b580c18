"""What the host tier takes of an engine's first seconds, while its pages are pinned, and what of all later ones.

Usage: ``python -m benchmarks.first_seconds OUT.json COMMIT [--shapes qwen3-0.6b llama-8b] [--rounds N] [--tiny]`` on a CUDA
device: random weights, defaults, engines of this process. The same workloads run over and over on an engine with the host
tier from the moment it is ready: rounds until its pages are all pinned (``early``, each with what was pinned at its end),
then ``--rounds`` more (``late``); then as many on an engine without (``none``). Each round begins with an empty cache.
Early over none is what pinning and copies cost together, late over none what copies cost. With them: pages that were to be
stored, those that were and why the others were not. ``--tiny`` runs all of it on the CPU, as a test of this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drive import Drive
from benchmarks.measured import ENGINE
from benchmarks.record import about
from hiserve.models.config import NANO

SEED = 20261122
VOCAB_SIZE = 4096  # ids of prompts are below it
WORKLOADS = {"1 row": (1, 1024, 256), "128 rows": (128, 1024, 256)}  # rows, tokens of each prompt, of each reply
TINY_WORKLOADS = {"1 row": (1, 24, 4), "128 rows": (4, 24, 4)}
TINY: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256, "host_cache_gib": 0.05}
MAX_EARLY_S = 90.0
GIB = 2**30


def run(drive: Drive, rows: int, num_prompt: int, num_output: int, rng: np.random.Generator) -> dict[str, Any]:
    """Returns rates of rows that come at once, and what was stored meanwhile; the cache is empty before."""
    drive.settle()
    drive.engine.flush()
    before = drive.engine.stats().cache.stores
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
        "stored_pages": after.stores.num_fulfilled - before.num_fulfilled,
        "stores_s": after.stores.seconds - before.seconds,
        "not_stored": {
            reason: count - before.unfulfilled.get(reason, 0) for reason, count in after.stores.unfulfilled.items()
        },
    }


def measure(settings: dict[str, Any], workloads: dict[str, tuple[int, int, int]], rounds: int) -> dict[str, Any]:
    """Returns every round of both engines, by workload."""
    found: dict[str, Any] = {name: {"early": [], "late": [], "none": []} for name in workloads}
    for has_host in (True, False):
        rng = np.random.default_rng(SEED)
        drive = Drive(**settings | ({} if has_host else {"host_cache_gib": 0}), awaits_host=False)
        begin = time.perf_counter()
        while has_host and not drive.is_host_ready and time.perf_counter() < begin + MAX_EARLY_S:
            for name, workload in workloads.items():
                made = run(drive, *workload, rng) | {"at_s": time.perf_counter() - begin}
                found[name]["early"].append(made)
                print(f"  early, {made['at_s']:5.1f} s, {name}: {made}", flush=True)
        if has_host:
            drive.await_host()
        for number in range(1 + rounds):
            for name, workload in workloads.items():
                made = run(drive, *workload, rng)
                if number:
                    found[name]["late" if has_host else "none"].append(made)
        drive.close()
    return found


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns medians of tokens a second over those without a host tier, by workload; of early rounds the first too."""
    told = {}
    for name, kinds in found.items():
        none = statistics.median(each["tokens_per_s"] for each in kinds["none"])
        rates = {kind: [each["tokens_per_s"] for each in kinds[kind]] for kind in ("early", "late")}
        told[name] = {kind: round(statistics.median(each) / none, 3) for kind, each in rates.items() if each}
        if rates["early"]:
            told[name]["first"] = round(rates["early"][0] / none, 3)
    return told


def main() -> int:
    """Writes the result file, shape by shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    command = f"python -m benchmarks.first_seconds OUT.json COMMIT --shapes {' '.join(given.shapes)}"
    result = about(command, *ENGINE, at_commit=given.commit, num_gpus=int(not given.tiny)) | {
        "seed": SEED,
        "shapes": {},
    }
    for shape in [NANO] if given.tiny else given.shapes:
        settings = TINY if given.tiny else {"shape": shape, "load_format": "dummy", "device": "cuda"}
        found = measure(settings, TINY_WORKLOADS if given.tiny else WORKLOADS, given.rounds)
        result["shapes"][shape] = {"of no host tier": ratios(found), "rounds": found}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        print(shape, json.dumps(ratios(found)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
