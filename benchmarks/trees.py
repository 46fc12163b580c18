"""Trees of drafts against chains, and the choice among both, by one engine which has the graphs of all of them.

Usage: ``python -m benchmarks.trees OUT.json COMMIT [--nano] [--tiny] [--batches N ...] [--temperatures T ...]``. hiserve-nano
widened to 8B on a GPU (``--nano``: as it is), with its EAGLE-3 head, answers held-out prompts with every number of drafts in turn,
held fixed, and with ``auto``. Told are tokens per verifying step and tokens per second, then the bars: a tree of 16 nodes against
a chain of five drafts, its speed against the best chain for one request, ``auto`` against the best fixed number. ``--tiny`` runs all of it with a
small shape on the CPU, as a test of this file.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.gpu.spec import AUTO, held, widened
from benchmarks.record import Record, gpu_parser
from hiserve import LLM
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import read_prompts, run_batch
from hiserve.bench.spec_run import sampling
from hiserve.core.usage import DraftUse
from hiserve.models.model_config import NANO

CHAIN, TREE = "5", "15"
BARS = {"tokens a step": {0.0: 1.15, 0.8: 1.1}, "speed": 1.1, "auto": 0.97}
Cell = dict[str, float]


def measure(
    engine: LLM, batches: list[int], temperatures: list[float], num_new: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields for each batch and temperature the cells of each number of drafts; the first run of each does not count."""
    modes = [*map(str, engine.settings.spec.tiers), AUTO]
    prompts = read_prompts(engine.settings, SweepOptions(batches=tuple(batches), prompt_length=128))
    for batch in batches:
        for temperature in temperatures:
            rates: dict[str, list[float]] = {mode: [] for mode in modes}
            used = dict.fromkeys(modes, DraftUse())
            for repeat in range(1 + repeats):
                at = 0 if batch > 1 else repeat % len(prompts)  # what one prompt gives is of that prompt
                for mode in modes:
                    params = sampling(batch, temperature, num_new if repeat or mode == AUTO else 16)
                    with held(engine, None if mode == AUTO else int(mode)):
                        run, _ = run_batch(engine, prompts[at : at + batch], params)
                    if repeat:
                        rates[mode].append(run.tokens_per_s)
                        used[mode] += run.drafts
            cells = {
                mode: {"tokens_per_s": statistics.median(rates[mode]), "tokens_a_step": used[mode].accept_length}
                for mode in modes
            }
            yield {"batch": batch, "temperature": temperature, "modes": cells}


def ratios(case: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns what the bars are of, each with its bar."""
    cells: dict[str, Cell] = case["modes"]
    speed = {mode: cell["tokens_per_s"] for mode, cell in cells.items()}
    fixed = {int(mode): rate for mode, rate in speed.items() if mode != AUTO}
    best_chain = max(rate for number, rate in fixed.items() if number <= int(CHAIN))
    best_tree = max(rate for number, rate in fixed.items() if number > int(CHAIN))
    found = {"auto / best": (speed[AUTO] / max(fixed.values()), BARS["auto"])}
    if case["batch"] == 1:
        steps = cells[TREE]["tokens_a_step"] / cells[CHAIN]["tokens_a_step"]
        found["tokens a step, tree / chain"] = steps, BARS["tokens a step"].get(case["temperature"], 1.1)
        found["speed, best tree / best chain"] = best_tree / best_chain, BARS["speed"]
    return found


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--nano", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    sizes = TINY if given.tiny else FULL
    settings: dict[str, Any] = (
        {"device": "cpu"} if given.tiny else {"device": "cuda", "dtype": "bfloat16", "graphs": "decode"}
    )
    settings |= {
        "max_model_len": 512,
        "max_running_requests": max(given.batches),
        "host_cache_gib": 0,
        "kv_pages": 5000,
    }
    settings |= {"spec": "eagle3", "spec_tree": "auto"} | ({} if given.tiny else {"attention_backend": "triton"})
    with tempfile.TemporaryDirectory() as folder:
        if given.nano:
            settings["model"] = NANO
        else:
            settings["model"] = folder
            of_head = replace(sizes.spec, heads={"eagle3": ()})
            widened(Path(folder), of_head, {"dtype": "float32" if given.tiny else "bfloat16"} | settings)
        result = Record.of(given, "python -m benchmarks.trees OUT.json COMMIT", "hiserve", "benchmarks")
        result["cases"] = []
        num_new, repeats = (16, 1) if given.tiny else (192, given.repeats)
        with LLM(in_process=True, **settings) as engine:
            result["costs"] = msgspec.to_builtins(engine.draft_costs)
            for case in measure(engine, given.batches, given.temperatures, num_new, repeats):
                result["cases"].append(case)
                result.save()
                show(case)
    return 0


def show(case: dict[str, Any]) -> None:
    print(f"{case['batch']} at {case['temperature']}:")
    for mode, cell in case["modes"].items():
        print(f"  {mode:>4} {cell['tokens_per_s']:9.1f} tokens/s {cell['tokens_a_step']:6.2f} a verifying step")
    for name, (ratio, bar) in ratios(case).items():
        print(f"  {name}: {ratio:.3f}, bar {bar}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
