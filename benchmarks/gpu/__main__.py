"""The engine on one GPU against the machine's ceilings and a peer: steps, throughput, tiers, HTTP, speculation.

Usage: ``python -m benchmarks.gpu OUT.json COMMIT [--parts NAME ...] [--set NAME=VALUE ...]`` on a CUDA device: random
weights of two shapes in bfloat16; ``spec`` widens hiserve-nano and its draft heads to the larger one, in a temporary folder.
``--set`` gives every engine a setting. ``python -m benchmarks.gpu --tiny OUT.json COMMIT`` runs all parts with hiserve-nano
on the CPU, as a test of this file; its ratios mean nothing.

Each run measures the ceilings first, and each ratio is against what that run measured. The file is written after each part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import ceilings
from benchmarks.gpu.driving import Bench, Part, setting, timed_part
from benchmarks.gpu.figures import table
from benchmarks.gpu.profiling import measure_profile
from benchmarks.gpu.sizes import FULL, LARGE, SEED, SMALL, TINY
from benchmarks.gpu.spec import measure_spec
from benchmarks.gpu.workloads import (
    measure_chats,
    measure_conversations,
    measure_decode,
    measure_graphs,
    measure_http,
    measure_long,
    measure_overlap,
    measure_peers,
    measure_prefill,
    measure_traffic,
)
from benchmarks.record import SERVER, Record, gpu_parser

# In an order that builds few engines.
PARTS: dict[str, Callable[[Bench], Part]] = {
    "decode": partial(measure_decode, shape=LARGE),
    "prefill": measure_prefill,
    "long": measure_long,
    "peers": measure_peers,
    "chats": measure_chats,
    "profile": partial(measure_profile, shape=LARGE),
    "http": partial(measure_http, shape=LARGE),
    "crowd-http": partial(measure_http, shape=LARGE, is_crowd=True),
    "graphs": measure_graphs,
    "conversations": measure_conversations,
    "traffic": measure_traffic,
    "small-decode": partial(measure_decode, shape=SMALL),
    "small-profile": partial(measure_profile, shape=SMALL),
    "overlap": measure_overlap,
    "small-http": partial(measure_http, shape=SMALL),
    "spec": measure_spec,
}


def main() -> int:
    """Writes the result file; returns 1 if a part failed; ratios do not count."""
    given = arguments()
    sizes, device = (TINY, "cpu") if given.tiny else (FULL, "cuda")
    flags = " --tiny" * given.tiny + "".join(f" --set {name}={value}" for name, value in given.set)
    result = Record.of(given, f"python -m benchmarks.gpu{flags} OUT.json COMMIT", *SERVER)
    result |= {"seed": SEED, "ceilings": ceilings.measure(device), "engines": [], "parts": {}}
    print("ceilings: " + ", ".join(f"{name} {value:.4g}" for name, value in result["ceilings"].items()), flush=True)
    bench = Bench(sizes, result["ceilings"], dict(given.set))
    for name in given.parts:
        result["parts"][name] = timed_part(bench, name, PARTS[name])
        result["engines"] = bench.built
        result.save()
    bench.close()
    if device == "cuda":
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        result.save()
    print(table(figure for part in result["parts"].values() for figure in part["figures"]))
    return int(any(part["error"] for part in result["parts"].values()))


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
