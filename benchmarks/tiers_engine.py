"""The tiers with a model: hits of a trace against the union, time per token, and first tokens when tiers are full.

    git archive 6ab9a6f hiserve | tar -x -C BEFORE
    python -m benchmarks.tiers_engine [--before BEFORE] [--parts trace,full] [--turns N] [--out FILE]

hiserve-nano on the CPU, about 12 minutes; writes ``benchmarks/results/tiers_engine.json``. Engines of processes of their own
take turns, request by request, so that what else the machine does meets all alike.

- ``trace``: 64 conversations (``benchmarks.tier_traces``), several at once, over a host of some sizes. Prompt tokens found, of
  what one LRU cache of both sizes finds; CPU per decoded token, of all threads, against the same tree without a host tier
  and against the tree ``--before``, which has one.
- ``full``: prompts that nobody has sent before, and prompts that come back when device and host have lost them, to engines
  with a full device, a full host and a full store, against an engine that has no other tier and is emptied before each.
  Seconds and CPU from the request to its first token, and the seconds in which nothing was computed for it yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import ENGINE
from benchmarks.record import RESULTS, ROOT, Record
from benchmarks.tier_traces import Conversations, Turn, UnionLru

CHILD = ROOT / "benchmarks" / "tier_child.py"
BARS = {"found of the union": 0.95, "decode, CPU per token": 1.05, "first token, of cold": 1.1}
RATIOS = (0.25, 0.5, 1.0)
PAGE, DEVICE, LONGEST, STEP, WARM_UP, GROUP = 8, 800, 40, 128, 0.4, 4
FULL_DEVICE, FULL_HOST, STORE_GIB = 400, 200, 0.05  # the store holds some 800 pages
VOCABULARY = (7, 4096)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "kv_pages": DEVICE + 1,
    "max_model_len": (LONGEST + 2) * PAGE,
    "max_batched_tokens": STEP,
    "max_running_requests": GROUP,
    "cpu_threads": 1,
    "spec": "off",
    "log_level": "warning",
}
SEED = 2


class Child:
    """An engine in a process of its own."""

    def __init__(self, stack: ExitStack, host_pages: int = 0, tree: Path = ROOT, **settings: Any) -> None:
        command = [sys.executable, str(CHILD), json.dumps(SETTINGS | settings), str(host_pages)]
        self._tree = tree
        self._process = stack.enter_context(
            subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def serve(self, prompts: Sequence[np.ndarray], num_new: Sequence[int], *, flush: bool = False) -> dict[str, Any]:
        """Serves a group of requests at once, on an empty cache if wanted; see ``tier_child.answer``."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        asked = {"prompts": [each.tolist() for each in prompts], "num_new": list(num_new), "flush": flush}
        print(json.dumps(asked), file=pipe_in, flush=True)
        answer: dict[str, Any] = json.loads(pipe_out.readline())
        assert Path(answer["tree"]) == self._tree.resolve(), f"{answer['tree']} was measured, not {self._tree}"
        return answer


def groups(trace: Conversations, count: int) -> list[Turn]:
    """Returns the next requests, no two of them of one conversation: where one is asked again, the group ends before."""
    turns = [trace.next()]
    while len(turns) < count and trace.following not in {turn.conversation for turn in turns}:
        turns.append(trace.next())
    return turns


def measure_trace(ratio: float, num_groups: int, before: Path | None) -> dict[str, Any]:
    """Serves one trace with every engine, group by group."""
    num_host_pages = int(DEVICE * ratio)
    with ExitStack() as stack:
        engines = {"tiers": Child(stack, num_host_pages), "no host": Child(stack)}
        if before is not None:
            engines["before"] = Child(stack, num_host_pages, before.resolve())
        trace = Conversations("in turn", SEED, PAGE, LONGEST, VOCABULARY)
        union: UnionLru | None = None
        wanted, num_other_replies = 0, 0
        found = dict.fromkeys(engines, 0)
        cpu = {name: [0.0, 0] for name in engines}
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for index in range(num_groups):
            turns = groups(trace, GROUP)
            prompts, num_new = [turn.prompt for turn in turns], [turn.num_new for turn in turns]
            names = list(engines)[index % len(engines) :] + list(engines)[: index % len(engines)]
            answers = {name: engines[name].serve(prompts, num_new) for name in names}
            replies = answers["tiers"]["replies"]
            num_other_replies += sum(answer["replies"] != replies for answer in answers.values())
            union = union or UnionLru(DEVICE + answers["tiers"]["host_pages"], PAGE)
            for turn, reply in zip(turns, replies, strict=True):
                reply = np.array(reply, dtype=np.int32)
                could = union.serve(turn, reply)
                wanted += could if index >= WARM_UP * num_groups else 0
                trace.replied(turn, reply)
            if index % 10 == 0:
                print(f"host:device {ratio}: {index} of {num_groups} groups", file=sys.stderr, flush=True)
            for name, answer in answers.items() if index >= WARM_UP * num_groups else ():
                found[name] += sum(map(sum, answer["found"]))
                cpu[name][0] += answer["decode_cpu_s"]
                cpu[name][1] += answer["num_decoded"]
                steps[name] += answer["decode_s"]
    per_token = {name: seconds / count for name, (seconds, count) in cpu.items()}
    return {
        "host_to_device": ratio,
        "found_of_union": {name: tokens / wanted for name, tokens in found.items()},
        "wanted_tokens": wanted,
        "groups_with_other_replies": num_other_replies,
        "decode_cpu_us_a_token": {name: 1e6 * each for name, each in per_token.items()},
        "decode_cpu_of": {name: per_token["tiers"] / each for name, each in per_token.items() if name != "tiers"},
        "decode_step_ms": {name: 1e3 * statistics.median(each) for name, each in steps.items()},
    }


def measure_full(num_requests: int) -> list[dict[str, Any]]:
    """Serves new prompts and prompts that come back to engines with full tiers, and to one that has nothing."""
    rng, length = np.random.default_rng(SEED), LONGEST * PAGE - 8
    samples: dict[tuple[str, str], list[list[float]]] = {}
    last: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        small: dict[str, Any] = {"kv_pages": FULL_DEVICE + 1}
        engines = {
            "cold": Child(stack, **small),
            "full device": Child(stack, **small),
            "full host": Child(stack, FULL_HOST, **small),
            "full store": Child(stack, FULL_HOST, store=f"file:{folder}/full", store_gib=STORE_GIB, **small),
            "store behind a full host": Child(stack, FULL_HOST, store=f"file:{folder}/large", **small),
        }
        known: list[np.ndarray] = []
        num_to_fill = 3 * FULL_DEVICE // LONGEST
        for index in range(num_to_fill + 2 * num_requests):
            is_new = index < num_to_fill or index % 2 == 0
            if is_new:
                known.append(rng.integers(*VOCABULARY, length, dtype=np.int32))
            # What comes back has left device and host: as many prompts as they hold came since.
            prompt = known[-1] if is_new else known[-num_to_fill]
            start = index % len(engines)
            for name in list(engines)[start:] + list(engines)[:start]:
                last[name] = engines[name].serve([prompt], [2], flush=name == "cold")
                if index >= num_to_fill:
                    found = sum(map(sum, last[name]["found"]))
                    key = name, "new" if is_new else "back"
                    samples.setdefault(key, []).append([*last[name]["first"][0], found])
            if index % 10 == 0:
                print(f"{index} of {num_to_fill + 2 * num_requests} requests", file=sys.stderr, flush=True)
    return [
        figures_of(name, kind, each, samples["cold", kind], last[name])
        for (name, kind), each in samples.items()
        if name != "cold"
    ]


def figures_of(
    name: str, kind: str, ours: list[list[float]], cold: list[list[float]], last: dict[str, Any]
) -> dict[str, Any]:
    """Compares requests with the same ones on an engine that has nothing."""
    figures: dict[str, Any] = {"engine": name, "prompts": kind, "requests": len(ours)}
    for column, what in enumerate(("seconds", "CPU")):
        for percent in (50, 90):
            value, base = (float(np.percentile(np.array(each)[:, column], percent)) for each in (ours, cold))
            figures[f"{what} p{percent}"] = {"value": value, "cold": base, "of_cold": value / base}
    cold_s = statistics.median(each[0] for each in cold)
    figures |= {
        f"waits p{percent}": {"value": wait_s, "of_cold_first_token": wait_s / cold_s}
        for percent in (50, 90)
        for wait_s in [float(np.percentile(np.array(ours)[:, 2], percent) - np.percentile(np.array(cold)[:, 2], 50))]
    }
    figures["found tokens a request"] = float(np.mean([each[3] for each in ours]))
    figures["evicted"], figures["unfulfilled"] = last["evicted"], last["unfulfilled"]
    bar = BARS["first token, of cold"]
    figures["met"] = all(figures[f"seconds p{percent}"]["of_cold"] <= bar for percent in (50, 90))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a tree to compare with: a folder that holds hiserve")
    parser.add_argument("--parts", default="trace,full", help="of them, separated by commas")
    parser.add_argument(
        "--ratios", default=",".join(map(str, RATIOS)), help="of host to device pages, separated by commas"
    )
    parser.add_argument("--turns", type=int, default=480, help="of the trace; of full, a quarter as many of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers_engine.json", help="result file")
    options = parser.parse_args()
    parts: dict[str, Any] = {}
    if "trace" in options.parts:
        parts["trace"] = []
        for ratio in map(float, options.ratios.split(",")):
            parts["trace"].append(measure_trace(ratio, options.turns // GROUP, options.before))
            print(json.dumps(parts["trace"][-1], indent=1), flush=True)
    if "full" in options.parts:
        parts["full"] = measure_full(options.turns // 4)
        for each in parts["full"]:
            print(json.dumps(each), flush=True)
    record = Record(options.out, " ".join(["python -m benchmarks.tiers_engine", *sys.argv[1:]]), *ENGINE)
    record |= {
        "what": "Tiers with a model: hits of a trace, time per token, first tokens when tiers are full.",
        "settings": SETTINGS,
        "bars": BARS,
        "parts": parts,
    }
    record.save()


if __name__ == "__main__":
    main()
