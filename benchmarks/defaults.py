"""Defaults against an engine in the caller's process without a host tier.

Usage: ``python -m benchmarks.defaults OUT.json COMMIT [--rounds N] [--shapes NAME ...] [--tiny]`` on a CUDA device. Every engine
has a process of its own. Bar: defaults at least 0.98 of the engine in process, by workload, medians. ``--tiny`` runs on the
CPU, as a test of this file; its ratios mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hiserve
from benchmarks.record import ROOT, SERVER, Record, gpu_parser

BAR = 0.98
SEED = 20261122
VOCAB_SIZE = 4096  # ids of prompts are below it
SHAPES = ("llama-8b", "qwen3-0.6b")
ENGINES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "in process": {"in_process": True, "host_cache_gib": 0},
    "no host tier": {"host_cache_gib": 0},
}
TINY_ENGINE = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256, "host_cache_gib": 0.05}
# Chats at once, turns, tokens that all begin with, new tokens of a turn, of a reply; a turn sends all that was said before.
Workload = tuple[int, int, int, int, int]
SMALL: dict[str, Workload] = {"1 row": (1, 1, 0, 1024, 256), "128 rows": (128, 1, 0, 1024, 256)}
LARGE: dict[str, Workload] = {
    "1 row": (1, 1, 0, 1024, 512),
    "128 rows": (128, 1, 0, 1024, 256),
    "64 chats of 6 turns": (64, 6, 1024, 512, 64),
}
TINY: dict[str, Workload] = {
    "1 row": (1, 1, 0, 24, 4),
    "128 rows": (4, 1, 0, 24, 4),
    "64 chats of 6 turns": (2, 2, 16, 8, 4),
}


def rate(llm: hiserve.LLM, rng: np.random.Generator, workload: Workload) -> float:
    """Returns the output tokens a second of a workload; prompts are lists of ids, as most callers have them."""
    num_chats, num_turns, shared, added, num_output = workload

    def draw(count: int) -> NDArray[np.int32]:
        return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)

    said, seconds = [draw(shared)] * num_chats, 0.0
    sampling = hiserve.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    for _ in range(num_turns):
        prompts = [np.concatenate((before, draw(added))) for before in said]
        given = [prompt.tolist() for prompt in prompts]
        begin = time.perf_counter()
        outputs = llm.generate(given, sampling)
        seconds += time.perf_counter() - begin
        replies = [np.array(output.outputs[0].token_ids, dtype=np.int32) for output in outputs]
        assert all(reply.size == num_output for reply in replies), "a reply is shorter than asked for"
        said = [np.concatenate(both) for both in zip(prompts, replies, strict=True)]
    return num_chats * num_turns * num_output / seconds


def run_child(shape: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Returns the rates of each workload on one engine of this process, round by round."""
    begin, rng = time.perf_counter(), np.random.default_rng(SEED)
    with hiserve.LLM(shape=shape, load_format="dummy", **settings) as llm:
        found: dict[str, Any] = {"start_s": time.perf_counter() - begin}
        workloads = TINY if settings.get("device") == "cpu" else LARGE if shape == "llama-8b" else SMALL
        found["first row"] = [rate(llm, rng, workloads["1 row"])]  # while pages are still being pinned
        for name, workload in workloads.items():
            rate(llm, rng, workload)  # warms up
            found[name] = []
            for _ in range(rounds):
                llm.flush()
                found[name].append(rate(llm, rng, workload))
    return found


def measure(shape: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs the workloads on an engine in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.defaults", "--child", shape, json.dumps(settings), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the rates of the defaults over those of the others, by workload, medians."""
    rates = {
        engine: {name: statistics.median(values) for name, values in each.items() if name != "start_s"}
        for engine, each in found.items()
    }
    ours = rates.pop("defaults")
    return {
        f"of {engine}": {name: round(ours[name] / other, 3) for name, other in theirs.items()}
        for engine, theirs in rates.items()
    }


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    return parser.parse_args()


def main() -> int:
    if "--child" in sys.argv:
        shape, settings, rounds = sys.argv[2:]
        print(json.dumps(run_child(shape, json.loads(settings), int(rounds))))
        return 0
    given = arguments()
    result = Record.of(given, "python -m benchmarks.defaults OUT.json COMMIT", *SERVER, "hiserve/llm")
    result |= {"bar": BAR, "shapes": {}}
    is_met = True
    for shape in SHAPES[-1:] if given.tiny else given.shapes:
        tiny = TINY_ENGINE if given.tiny else {}
        found = {name: measure(shape, tiny | settings, given.rounds) for name, settings in ENGINES.items()}
        ratios = compare(found)
        is_met &= all(ratio >= BAR for name, ratio in ratios["of in process"].items() if name != "1 row")
        result["shapes"][shape] = {"ratios": ratios, "samples": found}
        result.save()
        print(shape, json.dumps(ratios, indent=1), flush=True)
    return int(not is_met and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
