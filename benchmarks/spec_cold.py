"""The cost of drafts that are never right: an engine that chooses their number against one that has no head.

Usage: ``python -m benchmarks.spec_cold [--scale nano|large] [--rounds N] [--heads eagle3,mtp] [--json FILE]``. Heads of
drawn weights, in turns with ``--spec off``: the same prompts, greedily, one batch after the other. ``nano`` is timed by
the CPU time of the process, so that whoever else is busy counts little; ``large`` is hiserve-nano widened to 8B on a GPU,
timed by the clock. Bar: at every batch at least 0.97 of the tokens per second without a head, as the median over rounds of both engines'
rates in that round; the share of all rounds' time, trials included, is told too. The first run of each batch, in which
the head is found out, is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sizes import FULL, LARGE, SEED, SPEC_SHAPES
from benchmarks.record import RESULTS, Record
from benchmarks.widen import widen, widen_head, write, write_head
from hiserve import LLM, SamplingParams
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import read_prompts
from hiserve.core.usage import DraftUse
from hiserve.models.model_config import NANO, find_model
from tools.nano.head_files import export_head, load_target
from tools.nano.heads import HEADS

BAR = 0.97
HEAD_SEED = 7


@dataclass(frozen=True)
class Scale:
    """Engines, workloads and clock."""

    settings: dict[str, Any]  # of the engines, but the model and the head
    batches: tuple[int, ...]
    num_tokens: int  # of each reply
    prompt: int  # tokens of a prompt, at most
    rounds: int
    clock: Callable[[], float]


SCALES = {
    "nano": Scale(
        {
            "device": "cpu",
            "cpu_threads": 1,
            "max_running_requests": 32,
            "max_model_len": 1024,
            "kv_pages": 2200,
            "host_cache_gib": 0,
        },
        batches=(1, 4, 16, 32),
        num_tokens=300,
        prompt=64,
        rounds=9,
        clock=time.process_time,
    ),
    "large": Scale(
        FULL.settings | FULL.spec.settings | {"max_model_len": 1536, "kv_pages": 10_000},
        batches=(1, 4, 16, 32, 64, 128),
        num_tokens=512,
        prompt=128,
        rounds=3,
        clock=time.perf_counter,
    ),
}


def never_right(kind: str, folder: Path) -> Path:
    """Saves a head of drawn weights for hiserve-nano."""
    target = load_target(find_model(NANO), torch.device("cpu"))
    torch.manual_seed(HEAD_SEED)
    export_head(HEADS[kind](target), target.config, folder)
    return folder


def prepare(name: str, kinds: list[str], folder: Path) -> tuple[str, dict[str, str]]:
    """Writes what is served; returns the model, and what ``--spec`` says for each kind of head."""
    narrow = {kind: never_right(kind, folder / "narrow" / kind) for kind in kinds}
    if name == "nano":
        return NANO, {kind: f"{kind}:{path}" for kind, path in narrow.items()}
    wide, dtype, device = widen(find_model(NANO), SPEC_SHAPES[LARGE], SEED), torch.bfloat16, torch.device("cuda")
    write(wide, dtype, device, folder / "wide")
    for kind, path in narrow.items():
        write_head(wide, widen_head(wide, path), dtype, device, folder / "wide" / kind)
    torch.cuda.empty_cache()
    return str(folder / "wide"), {kind: kind for kind in kinds}


def compare(scale: Scale, off: LLM, auto: LLM, batch: int, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second of a batch on both engines, in turns, and what became of the drafts."""
    prompts = read_prompts(off.settings, SweepOptions(batches=scale.batches, prompt_length=scale.prompt))[:batch]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=scale.num_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    use, num_equal = DraftUse(), 0
    for number in range(1 + rounds):
        replies = {}
        for name, engine in sorted({"off": off, "auto": auto}.items(), reverse=bool(number % 2)):
            begin = scale.clock()
            outputs = engine.generate(prompts, params)
            rates[name].append(batch * scale.num_tokens / (scale.clock() - begin))
            replies[name] = [output.outputs[0].token_ids for output in outputs]
            if number and name == "auto":
                use = sum((output.outputs[0].drafts or DraftUse() for output in outputs), use)
        num_equal += sum(ours == theirs for ours, theirs in zip(replies["auto"], replies["off"], strict=True))
    medians = {name: statistics.median(each[1:]) for name, each in rates.items()}
    seconds = {name: sum(1 / rate for rate in each[1:]) for name, each in rates.items()}
    shares = sorted(auto / off for auto, off in zip(rates["auto"][1:], rates["off"][1:], strict=True))
    return {
        "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "share": round(statistics.median(shares), 4),
        "least_and_most": [round(shares[0], 4), round(shares[-1], 4)],
        "share_of_all_time": round(seconds["off"] / seconds["auto"], 4),
        "share_while_learning": round(rates["auto"][0] / rates["off"][0], 4),
        "rounds": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
        "drafts": use.shown(),
        "replies_equal": f"{num_equal} of {(1 + rounds) * batch}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="nano")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--heads", default="eagle3")
    parser.add_argument("--batches", help="as 1,4; all of the scale unless given")
    parser.add_argument("--json", type=Path, help="instead of benchmarks/results/spec_cold_SCALE.json")
    parser.add_argument("--commit", help="that is measured; needed where there is no checkout to ask")
    args = parser.parse_args()
    scale, kinds = SCALES[args.scale], args.heads.split(",")
    rounds = args.rounds or scale.rounds
    batches = scale.batches if args.batches is None else tuple(map(int, args.batches.split(",")))
    command = f"python -m benchmarks.spec_cold --scale {args.scale} --rounds {rounds} --heads {args.heads}"
    path = args.json or RESULTS / f"spec_cold_{args.scale}.json"
    num_gpus = int(args.scale == "large")
    result, shares = Record(path, command, "hiserve", "benchmarks", at_commit=args.commit, num_gpus=num_gpus), []
    result |= {"bar": BAR, "timed_by": scale.clock.__name__}
    with tempfile.TemporaryDirectory() as folder:
        model, specs = prepare(args.scale, kinds, Path(folder))
        settings = scale.settings | {"model": model, "in_process": True, "log_level": "warning"}
        settings.pop("load_format", None)
        with LLM(**settings, spec="off") as off:
            for kind, spec in specs.items():
                with LLM(**settings, spec=spec, spec_steps="auto") as auto:
                    for batch in batches:
                        result[f"{kind}, batch {batch}"] = found = compare(scale, off, auto, batch, rounds)
                        shares.append(found["share"])
                        result.save()
                        print(f"{kind}, batch {batch}: {found['share']} of off {found}", flush=True)
    return int(min(shares) < BAR)


if __name__ == "__main__":
    raise SystemExit(main())
