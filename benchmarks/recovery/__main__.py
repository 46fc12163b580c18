"""What the death of a worker costs its streams, by phase, and what supervision costs while nothing dies.

Usage: ``python -m benchmarks.recovery OUT.json COMMIT [--cpu | --tiny]``. On a CUDA device a server of the Llama-8B shape with
random weights, 32 streams; with ``--cpu`` one of hiserve-nano on the CPU, 8 streams; ``--tiny`` is a test of this file.

The worker is killed (SIGKILL) in the middle of the load, in each of several servers. A time is from the kill to the first
token that comes over HTTP after the silence that follows it. Phases are the server's own; loading weights does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.measured import SERVER
from benchmarks.record import Record, gpu_parser
from benchmarks.recovery.death import kill_once
from benchmarks.recovery.sizes import HIT_BAR, LARGE, SHARE_BAR, SMALL, TINY, Sizes
from benchmarks.recovery.supervision import watch
from benchmarks.served import serving_shape

SEED = 17
MEDIANS = ("first_new_token_s", "without_weights_s", "last_stream_s", "longest_pause_s", "host_share")


def main() -> int:
    """Writes the result file; returns 1 if a bar is missed, which says nothing of a tiny load."""
    given = arguments()
    sizes, flag = (TINY, " --tiny") if given.tiny else (SMALL, " --cpu") if given.cpu else (LARGE, "")
    rounds = [one_round(sizes, SEED + index) for index in range(sizes.rounds)]
    watched = sorted((asyncio.run(watch(sizes)) for _ in range(sizes.rounds)), key=lambda each: float(each["share"]))
    supervision = watched[len(watched) // 2]
    median = {name: statistics.median(each[name] for each in rounds) for name in MEDIANS}
    bars = {"without_weights_s": sizes.bar_s, "host_share": HIT_BAR, "supervision_share": SHARE_BAR}
    missed = [
        name
        for name, is_met in (
            ("without_weights_s", median["without_weights_s"] <= sizes.bar_s),
            ("host_share", median["host_share"] >= HIT_BAR),
            ("supervision_share", supervision["share"] <= SHARE_BAR),
        )
        if not is_met
    ]
    command = f"python -m benchmarks.recovery OUT.json COMMIT{flag}"
    num_gpus = int(not (given.cpu or given.tiny))
    result = Record(given.out, command, *SERVER, at_commit=given.commit, num_gpus=num_gpus)
    load = {"streams": sizes.streams, "prompt_tokens": sizes.prompt, "tokens_before": sizes.before}
    result |= {"settings": sizes.settings, "load": load, "bars": bars, "missed": missed, "median": median}
    result |= {"supervision": supervision, "supervision_shares": [each["share"] for each in watched], "rounds": rounds}
    result.save()
    told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[0]["phases"].items())
    print(
        f"fault to first new token: {median['first_new_token_s']:.2f} s, without weights {median['without_weights_s']:.2f} s"
    )
    print(f"(bar {sizes.bar_s:g}); the first round: {told}; graphs back {rounds[0]['graphs_back_s']}")
    print(f"host hits of replayed tokens: {median['host_share']:.3f} (bar {HIT_BAR})")
    print(f"supervision and ledger: {supervision['share']:.2%} of the CPU time (bar {SHARE_BAR:.0%})")
    return int(bool(missed) and not given.tiny)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def one_round(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Starts a server, kills its worker once, and ends it; returns the figures."""
    with serving_shape(sizes.settings, sizes.vocab_size) as server:
        found = asyncio.run(kill_once(server.url, sizes, seed))
    print(f"first new token after {found['first_new_token_s']:.2f} s", flush=True)
    return {"ready_s": round(server.ready_s, 3), **found}


if __name__ == "__main__":
    raise SystemExit(main())
