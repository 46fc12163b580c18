"""The tiers with a model: hits of a trace against the union, time per token, and first tokens when tiers are full.

    python -m benchmarks.tiers_engine [--parts trace,full] [--turns N] [--out FILE]

hiserve-nano on the CPU, about 12 minutes; writes ``benchmarks/results/tiers_engine.json``. Engines of this process take turns,
request by request, so that other work on the machine meets all alike.

- ``trace``: 64 conversations (``benchmarks.tier_traces``), several at once, over a host of some sizes. Prompt tokens found, of
  those that one LRU cache of both sizes finds; CPU per decoded token, of all threads, against an engine without a host tier.
- ``full``: new prompts, and prompts that come back when device and host have lost them, to engines with a full device, a full
  host and a full store, against an engine that has no other tier and is emptied before each.
  Seconds and CPU from the request to its first token, and the seconds in which nothing was computed for it yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drive import Drive
from benchmarks.record import ENGINE, RESULTS, Record
from benchmarks.tier_traces import Conversations, Turn, UnionLru
from hiserve.models.model_config import NANO

BARS = {"found of the union": 0.95, "decode, CPU per token": 1.05, "first token, of cold": 1.1}
RATIOS = (0.25, 0.5, 1.0)
PAGE, DEVICE, LONGEST, STEP, WARM_UP, GROUP = 8, 800, 40, 128, 0.4, 4
FULL_DEVICE, FULL_HOST, STORE_GIB = 400, 200, 0.05  # the store holds some 800 pages
VOCABULARY = (7, 4096)
SETTINGS: dict[str, Any] = {
    "model": NANO,
    "device": "cpu",
    "dtype": "float32",
    "page_size": PAGE,
    "kv_pages": DEVICE + 1,
    "max_model_len": (LONGEST + 2) * PAGE,
    "max_batched_tokens": STEP,
    "max_running_requests": GROUP,
    "cpu_threads": 1,
    "spec": "off",
}
SEED = 2
PAGES_OF_GIB = 1 << 14  # of 8 tokens of hiserve-nano in float32: 64 KiB each


class Answer:
    """The measurements of one group of requests that are given at once."""

    def __init__(self, drive: Drive, prompts: Sequence[np.ndarray], num_new: Sequence[int]) -> None:
        self.decode_s: list[float] = []  # of each step in which all rows decoded
        self.decode_cpu_s, self.num_decoded, self.waited_s = 0.0, 0, 0.0  # CPU of all threads in those steps
        executor: Any = drive.engine._executor
        submit, begin, cpu_begin = executor.submit, time.perf_counter(), time.process_time()

        def watched(plan: Any) -> Any:
            if not self.waited_s and plan.num_new.sum():
                self.waited_s = time.perf_counter() - begin  # until anything was computed
            return submit(plan)

        executor.submit = watched
        rows = [drive.add(*request) for request in zip(prompts, num_new, strict=True)]
        first_cpu_s = 0.0
        while not all(row.is_done for row in rows):
            decodes = all(row.times for row in rows)
            said, wall, cpu = sum(len(row.tokens) for row in rows), time.perf_counter(), time.process_time()
            drive.step()
            if new := sum(len(row.tokens) for row in rows) - said:
                first_cpu_s = first_cpu_s or time.process_time() - cpu_begin
            if decodes and new:
                self.decode_s.append(time.perf_counter() - wall)
                self.decode_cpu_s += time.process_time() - cpu
                self.num_decoded += new
        executor.submit = submit
        self.replies = [row.tokens for row in rows]
        self.found = sum(use.device + use.host + use.store for row in rows if (use := row.cached))
        self.first = (min(row.ttft_s for row in rows), first_cpu_s, self.waited_s)


def engine(host_pages: int = 0, **settings: Any) -> Drive:
    """Returns an engine with so many host pages."""
    return Drive(host_cache_gib=host_pages / PAGES_OF_GIB, **(SETTINGS | settings))


def host_pages_of(drive: Drive) -> int:
    cache: Any = drive.engine._planner._cache
    return int(cache.host.pages.num_pages) - 1


def groups(trace: Conversations, count: int) -> list[Turn]:
    """Returns the next requests, no two of them of one conversation: where one is asked again, the group ends before."""
    turns = [trace.next()]
    while len(turns) < count and trace.following not in {turn.conversation for turn in turns}:
        turns.append(trace.next())
    return turns


def turned(names: Sequence[str], index: int) -> list[str]:
    """Returns the names, another one first each time."""
    return [*names[index % len(names) :], *names[: index % len(names)]]


def measure_trace(ratio: float, num_groups: int) -> dict[str, Any]:
    """Serves one trace with every engine, group by group."""
    engines = {"tiers": engine(int(DEVICE * ratio)), "no host": engine()}
    trace = Conversations("in turn", SEED, PAGE, LONGEST, VOCABULARY)
    union = UnionLru(DEVICE + host_pages_of(engines["tiers"]), PAGE)
    answers: dict[str, list[Answer]] = {name: [] for name in engines}
    wanted, num_other_replies = 0, 0
    for index in range(num_groups):
        turns = groups(trace, GROUP)
        made = {
            name: Answer(engines[name], [turn.prompt for turn in turns], [turn.num_new for turn in turns])
            for name in turned(list(engines), index)
        }
        num_other_replies += made["tiers"].replies != made["no host"].replies
        could = 0
        for turn, reply in zip(turns, made["tiers"].replies, strict=True):
            could += union.serve(turn, np.array(reply, dtype=np.int32))
            trace.replied(turn, np.array(reply, dtype=np.int32))
        if index >= WARM_UP * num_groups:
            wanted += could
            for name, answer in made.items():
                answers[name].append(answer)
        if index % 10 == 0:
            print(f"host:device {ratio}: {index} of {num_groups} groups", file=sys.stderr, flush=True)
    for drive in engines.values():
        drive.close()
    cpu_s = {
        name: sum(a.decode_cpu_s for a in each) / sum(a.num_decoded for a in each) for name, each in answers.items()
    }
    return {
        "host_to_device": ratio,
        "found_of_union": {name: sum(a.found for a in each) / wanted for name, each in answers.items()},
        "wanted_tokens": wanted,
        "groups_with_other_replies": num_other_replies,
        "decode_cpu_us_a_token": {name: 1e6 * each for name, each in cpu_s.items()},
        "decode_cpu_of": {"no host": cpu_s["tiers"] / cpu_s["no host"]},
        "decode_step_ms": {
            name: 1e3 * statistics.median(s for a in each for s in a.decode_s) for name, each in answers.items()
        },
    }


def measure_full(num_requests: int) -> list[dict[str, Any]]:
    """Serves new prompts and prompts that come back to engines with full tiers, and to one that has nothing."""
    rng, length = np.random.default_rng(SEED), LONGEST * PAGE - 8
    samples: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small: dict[str, Any] = {"kv_pages": FULL_DEVICE + 1}
        engines = {
            "cold": engine(**small),
            "full device": engine(**small),
            "full host": engine(FULL_HOST, **small),
            "full store": engine(FULL_HOST, store=f"file:{folder}/full", store_gib=STORE_GIB, **small),
            "store below a full host": engine(FULL_HOST, store=f"file:{folder}/large", **small),
        }
        known: list[np.ndarray] = []
        num_to_fill = 3 * FULL_DEVICE // LONGEST
        for index in range(num_to_fill + 2 * num_requests):
            is_new = index < num_to_fill or index % 2 == 0
            if is_new:
                known.append(rng.integers(*VOCABULARY, length, dtype=np.int32))
            # A prompt that comes back has left device and host: as many prompts as they hold came since.
            prompt = known[-1] if is_new else known[-num_to_fill]
            for name in turned(list(engines), index):
                if name == "cold":
                    engines[name].engine.flush()
                answer = Answer(engines[name], [prompt], [2])
                if index >= num_to_fill:
                    key = name, "new" if is_new else "back"
                    samples.setdefault(key, []).append([*answer.first, answer.found])
            if index % 10 == 0:
                print(f"{index} of {num_to_fill + 2 * num_requests} requests", file=sys.stderr, flush=True)
        for drive in engines.values():
            drive.close()
    return [
        figures_of(*key, np.array(each), np.array(samples["cold", key[1]]))
        for key, each in samples.items()
        if key[0] != "cold"
    ]


def figures_of(name: str, kind: str, ours: np.ndarray, cold: np.ndarray) -> dict[str, Any]:
    """Compares requests with the same ones on an engine that has nothing; columns: seconds, CPU, waits, tokens found."""
    figures: dict[str, Any] = {"engine": name, "prompts": kind, "requests": len(ours)}
    for column, what in enumerate(("seconds", "CPU")):
        for percent in (50, 90):
            value, base = (float(np.percentile(each[:, column], percent)) for each in (ours, cold))
            figures[f"{what} p{percent}"] = {"value": value, "cold": base, "of_cold": value / base}
    for percent in (50, 90):
        wait_s = float(np.percentile(ours[:, 2], percent) - np.median(cold[:, 2]))
        figures[f"waits p{percent}"] = {"value": wait_s, "of_cold_first_token": wait_s / float(np.median(cold[:, 0]))}
    figures["found tokens a request"] = float(ours[:, 3].mean())
    bar = BARS["first token, of cold"]
    return figures | {"met": all(figures[f"seconds p{percent}"]["of_cold"] <= bar for percent in (50, 90))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="trace,full", help="some of them, separated by commas")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of host to device pages")
    parser.add_argument("--turns", type=int, default=480, help="of the trace; of full, a quarter as many of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers_engine.json", help="result file")
    options = parser.parse_args()
    record = Record(options.out, " ".join(["python -m benchmarks.tiers_engine", *sys.argv[1:]]), *ENGINE)
    record |= {"settings": SETTINGS, "bars": BARS, "parts": {}}
    if "trace" in options.parts:
        record["parts"]["trace"] = [measure_trace(ratio, options.turns // GROUP) for ratio in options.ratios]
    if "full" in options.parts:
        record["parts"]["full"] = measure_full(options.turns // 4)
    record.save()
    print(json.dumps(record["parts"], indent=1))


if __name__ == "__main__":
    main()
