"""Speculation while requests arrive: how many steps have prompts in them, and what their drafts cost without graphs.

Usage: ``python -m benchmarks.spec_arrivals OUT.json COMMIT [--tiny] [--requests N]``. hiserve-nano widened to 8B on a GPU, with
its EAGLE-3 head; held-out prompts arrive by a Poisson process at shares of the rate that an engine without speculation
takes when all come at once. Each rate is served by an engine without a head, with drafts chosen step by step, and with
three. Told are tokens per second, times to the first token and per token, the gate's decisions, and, of the steps with
drafts after them, how many replayed these and how many computed them eagerly, with and without a prompt in the step.
``--tiny`` runs all of it with a small shape on the CPU, as a test of this file.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drive import Drive, Seen, gate_between
from benchmarks.gpu.sizes import FULL, SEED, TINY, Sizes
from benchmarks.gpu.spec import widened
from benchmarks.record import Record, gpu_parser
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import read_prompts
from hiserve.core.plan import Int32Array

MODES = {
    "off": {"spec": "off"},
    "auto": {"spec": "eagle3", "spec_steps": "auto"},
    "3": {"spec": "eagle3", "spec_steps": 3},
}
SHARES = (0.25, 0.5, 0.8)  # of the rate at which an engine is full


def watch_drafts(drive: Drive) -> Counter[str]:
    """Returns a counter of steps that drafted: replayed or eager, with a prompt in them or not."""
    counts: Counter[str] = Counter()
    runners = drive.engine._executor._runners
    propose = runners.propose

    def watched(plan: Any, ran: Any) -> None:
        if plan.num_propose:
            has_prompt = bool((plan.num_new > 1 + plan.num_draft).any())
            counts[f"{'replayed' if ran.drafts is not None else 'eager'}, {'with' if has_prompt else 'no'} prompt"] += 1
        propose(plan, ran)

    runners.propose = watched
    return counts


def serve(drive: Drive, prompts: Sequence[Int32Array], num_new: int, due: np.ndarray) -> list[Seen]:
    """Serves prompts that arrive at so many seconds, float64 ``[n]``, from now; steps as fast as the engine goes."""
    begin, seen, following = time.perf_counter(), [], 0
    while following < len(prompts) or not all(each.is_done for each in seen):
        now = time.perf_counter() - begin
        while following < len(prompts) and due[following] <= now:
            seen.append(drive.add(prompts[following], num_new))
            following += 1
        if all(each.is_done for each in seen):
            time.sleep(max(0.0, float(due[following]) - now))
        else:
            drive.step()
    return seen


def told(seen: Sequence[Seen]) -> dict[str, Any]:
    seconds = max(each.times[-1] for each in seen) - min(each.added for each in seen)
    per_token = [(each.times[-1] - each.times[0]) / (len(each.tokens) - 1) for each in seen]
    first = [each.ttft_s for each in seen]
    return {
        "tokens_per_s": sum(len(each.tokens) for each in seen) / seconds,
        "ttft_s": dict(zip(("p50", "p90", "p99"), np.percentile(first, (50, 90, 99)).tolist(), strict=True)),
        "tpot_s": dict(zip(("p50", "p90", "p99"), np.percentile(per_token, (50, 90, 99)).tolist(), strict=True)),
    }


def measure(sizes: Sizes, folder: str, num_requests: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each engine's name, and what it does at each rate; all begin with the same arrivals."""
    settings = sizes.settings | sizes.spec.settings | {"model": folder}
    settings.pop("load_format", None)
    full_rate = 0.0
    for mode, more in MODES.items():
        drive = Drive(**settings, **more)
        texts = read_prompts(drive.settings, SweepOptions(batches=sizes.spec.batches, prompt_length=sizes.spec.prompt))
        prompts = [np.array(texts[at % len(texts)], dtype=np.int32) for at in range(num_requests)]
        at_once, drafts = np.zeros(num_requests), watch_drafts(drive)
        serve(drive, prompts, sizes.spec.warm_output, at_once)
        whole = told(serve(drive, prompts, sizes.spec.output, at_once))
        full_rate = full_rate or whole["tokens_per_s"] / sizes.spec.output  # of the engine without a head, the first
        found: dict[str, Any] = {"at once": whole}
        for share in SHARES:
            drive.engine.flush()
            drafts.clear()
            before = drive.engine.stats().graph_gate
            gaps = np.random.default_rng(SEED).exponential(1 / (share * full_rate), num_requests)
            seen = serve(drive, prompts, sizes.spec.output, gaps.cumsum())
            gate = gate_between(before, drive.engine.stats().graph_gate)
            found[f"{share} of {full_rate:.2f}/s"] = told(seen) | {"drafts": dict(drafts), "gate": gate}
        drive.close()
        yield mode, found


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    given = parser.parse_args()
    sizes = TINY if given.tiny else FULL
    command = f"python -m benchmarks.spec_arrivals OUT.json COMMIT --requests {given.requests}{' --tiny' * given.tiny}"
    with tempfile.TemporaryDirectory() as folder:
        settings = sizes.settings if given.tiny else sizes.settings | {"device": "cuda"}
        widened(Path(folder), sizes.spec, {"dtype": "bfloat16"} | settings)
        result = Record.of(given, command, "hiserve", "benchmarks")
        result["modes"] = {}
        for mode, rates in measure(sizes, folder, given.requests):
            result["modes"][mode] = rates
            result.save()
            for rate, each in rates.items():
                print(f"{mode:>5} {rate:<18} {each['tokens_per_s']:9.1f} tokens/s {each.get('drafts', '')}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
