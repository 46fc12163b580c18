"""Defaults against an engine in the caller's process without a host tier, and against an earlier version.

Usage: ``python -m benchmarks.defaults OUT.json COMMIT [--before FOLDER] [--rounds N] [--shapes NAME ...] [--tiny]`` on a
CUDA device. FOLDER
holds the package of an earlier commit. Every engine has a process of its own; engines take turns. Bar: defaults at least
0.98 of the engine in process, by workload, medians. ``--tiny`` runs on the CPU, as a test of this file; its ratios mean
nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measured import SERVER
from benchmarks.record import ROOT, Record, gpu_parser

WORKLOADS = Path(__file__).with_name("workloads.py")
BAR = 0.98
SHAPES = ("llama-8b", "qwen3-0.6b")
IN_PROCESS = {"in_process": True, "host_cache_gib": 0}
TINY = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256, "host_cache_gib": 0.05}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    given = parser.parse_args()
    command = "python -m benchmarks.defaults OUT.json COMMIT" + (" --before FOLDER" if given.before else "")
    result = Record.of(given, command, *SERVER, "hiserve/llm")
    result |= {"bar": BAR, "shapes": {}}
    is_met = True
    for shape in SHAPES[-1:] if given.tiny else given.shapes:
        engines = {
            "defaults": (ROOT, {}),
            "in process": (ROOT, IN_PROCESS),
            "no host tier": (ROOT, {"host_cache_gib": 0}),
        }
        if given.before is not None:
            engines["defaults before"] = (given.before, {})
        found = {
            name: measure(folder, shape, (TINY if given.tiny else {}) | settings, given.rounds)
            for name, (folder, settings) in engines.items()
        }
        ratios = compare(found)
        is_met &= all(ratio >= BAR for name, ratio in ratios["of in process"].items() if name != "1 row")
        result["shapes"][shape] = {"ratios": ratios, "samples": found}
        result.save()
        print(shape, json.dumps(ratios, indent=1), flush=True)
    return int(not is_met and not given.tiny)


def measure(folder: Path, shape: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs the workloads with the package in a folder; returns what they print."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(WORKLOADS), shape, json.dumps(settings), str(rounds)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    rates = {
        engine: {name: statistics.median(values) for name, values in each.items() if name != "start_s"}
        for engine, each in found.items()
    }
    ours = rates.pop("defaults")
    return {
        f"of {engine}": {name: round(ours[name] / rate, 3) for name, rate in theirs.items()}
        for engine, theirs in rates.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
