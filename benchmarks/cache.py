"""The cache across device and host, by engines of this process: token ids in, token ids out.

Usage: ``python -m benchmarks.cache OUT.json COMMIT`` on a CUDA device: Llama-8B's shape in bfloat16, random weights, about
4 minutes; ``--shape`` takes another, whose prefixes have tails or latents. ``python -m benchmarks.cache --tiny OUT.json COMMIT`` runs all
parts with hiserve-nano on the CPU, as a test of this file. The parts:

- ``hit``: time to first token of a long prompt whose prefix is on the host, against the longer of its two halves (the load,
  the prefill of the rest) and against computing all of it.
- ``others``: time per token of rows that decode, while such prompts arrive, and how many steps that have a graph replayed it.
- ``write_through``: time per token of rows that hit nothing, with a host tier and without, in turns.
- ``conversations``: input tokens per second of conversations that the device cannot hold, from the second turn on, with a
  host tier and without.
- ``same_tokens``: hiserve-nano in float32 over a tiny pool and a host tier keeps the margin of an engine without cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.drive import Conversations, Drive, Seen, copied_pages, counted, gate_between, input_rate, visit
from benchmarks.gpu.figures import share_of_eligible
from benchmarks.record import ENGINE, Record, gpu_parser, judge
from hiserve import LLM
from hiserve.bench.equality import EqualityChecker, Margin
from hiserve.bench.spec_run import sampling
from hiserve.models.model_config import NANO

SEED = 20261121
DURING_LOAD = "others' p99 while loading"
REPLAYED = "replayed steps of those with a graph"
BARS = {
    "hit over the longer half": 1.5,
    "hit over recompute": 0.15,
    DURING_LOAD: 1.15,
    REPLAYED: 0.98,
    "write-through": 1.03,
    "conversations": 3.0,
}
LEAST = ("conversations", REPLAYED)  # the others are at most


@dataclass(frozen=True)
class Sizes:
    """The engines and workloads; lengths in tokens."""

    settings: dict[str, Any]  # of both engines
    host_gib: float  # host tier of the engine that has one
    prefix: int  # on the host before each measured hit
    suffix: int  # new after it
    repeats: int  # of each time to first token
    rows: int  # that decode while loads run, and with and without write-through
    row_prompt: int  # of each of them
    row_output: int  # of each of them, with and without write-through
    num_loads: int  # while others decode
    gap_steps: int  # steps between two of these, and a tenth of those before the first
    conversations: Conversations  # over both engines


FULL = Sizes(
    settings={
        "load_format": "dummy",
        "shape": "llama-8b",
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_pages": 4096,
        "page_size": 16,
        "max_model_len": 17_408,
        "max_batched_tokens": 2048,
        "max_running_requests": 32,
    },
    host_gib=34.0,
    prefix=16_384,
    suffix=256,
    repeats=5,
    rows=8,
    row_prompt=512,
    row_output=96,
    num_loads=15,
    gap_steps=10,
    conversations=Conversations(32, 4, 6144, 256, 16, 2),
)
# By shape, other sizes and settings. Two engines of Gemma-3-27B leave 40 GB of an H200: its tails take 0.4 GB each. Two of
# Qwen3.5-35B-A3B do not fit: it has the parts of one engine.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-8b": ({}, {}),
    "gpt-oss-20b": ({"host_gib": 24.0}, {}),
    "gemma-3-27b": ({"host_gib": 24.0, "rows": 4}, {"kv_pages": 2048, "max_running_requests": 16}),
    "glm-4.7-flash": ({"host_gib": 24.0}, {"kv_pages": 2048, "max_running_requests": 16}),
    "v4-flash-like": ({"host_gib": 8.0}, {"kv_pages": 512, "page_size": 128}),
    "qwen3.5-35b-a3b": ({"host_gib": 24.0}, {"max_running_requests": 16}),
}
TINY = Sizes(
    settings={
        "model": NANO,
        "device": "cpu",
        "dtype": "float32",
        "kv_pages": 160,
        "page_size": 16,
        "max_model_len": 1400,
        "max_batched_tokens": 256,
        "max_running_requests": 8,
        "cpu_threads": 1,
        "spec": "off",  # as the large shape, which has no head: one token a step
    },
    host_gib=0.1,
    prefix=1024,
    suffix=32,
    repeats=2,
    rows=4,
    row_prompt=32,
    row_output=24,
    num_loads=3,
    gap_steps=4,
    conversations=Conversations(8, 2, 512, 32, 4, 2),
)


class Bench:
    """Two engines of one shape, with a host tier and without, and random prompts for both."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.host = Drive(host_cache_gib=sizes.host_gib, **sizes.settings)
        self._device: Drive | None = None
        self._rng = np.random.default_rng(SEED)

    @property
    def device(self) -> Drive:
        """The engine without a host tier, which some parts do without: two engines of a large shape may not fit."""
        if self._device is None:
            self._device = Drive(host_cache_gib=0, **self.sizes.settings)
        return self._device

    @property
    def build_s(self) -> list[float]:
        """Seconds that each engine took to build, that with a host tier first."""
        return [each.build_s for each in (self.host, self._device) if each]

    def prompt(self, length: int) -> np.ndarray:
        return self._rng.integers(7, self.host.vocab_size, length, dtype=np.int32)

    def first_token(self, drive: Drive, prompt: np.ndarray) -> Seen:
        """Runs a request of one token, and what it leaves to be copied."""
        seen = drive.add(prompt, 1)
        drive.finish(seen)
        drive.settle()
        return seen

    def close(self) -> None:
        self.host.close()
        if self._device is not None:
            self._device.close()


def measure_hit(bench: Bench) -> dict[str, Any]:
    """Times a prompt whose prefix is on the host, and what it could be at best and at worst."""
    sizes, drive = bench.sizes, bench.host
    prefix = bench.prompt(sizes.prefix)

    def longer() -> np.ndarray:
        return np.concatenate((prefix, bench.prompt(sizes.suffix)))

    def from_host() -> dict[str, Any]:
        drive.leave_device()
        drive.loads.clear()
        seen = bench.first_token(drive, longer())
        return {
            "ttft_s": seen.ttft_s,
            "host_tokens": seen.cached.host if seen.cached else 0,
            "load_s": sum(load.seconds for load in drive.loads),
            "load_bytes": sum(load.num_bytes for load in drive.loads),
        }

    def from_device() -> dict[str, Any]:
        seen = bench.first_token(drive, longer())
        return {"ttft_s": seen.ttft_s, "device_tokens": seen.cached.device if seen.cached else 0}

    bench.first_token(drive, longer())
    for warm_up in (from_host, from_device):
        warm_up()
    hits = [from_host() for _ in range(sizes.repeats)]
    rests = [from_device() for _ in range(sizes.repeats)]
    whole = sizes.prefix + sizes.suffix
    recomputed = [bench.first_token(bench.device, bench.prompt(whole)).ttft_s for _ in range(sizes.repeats + 1)][1:]
    ttft_s, load_s = median(hits, "ttft_s"), median(hits, "load_s")
    longer_half_s = max(load_s, median(rests, "ttft_s"))
    return {
        "ttft_s": ttft_s,
        "load_s": load_s,
        "load_bytes_per_s": median(hits, "load_bytes") / load_s if load_s else 0.0,
        "rest_s": median(rests, "ttft_s"),
        "recompute_s": statistics.median(recomputed),
        "ratios": {
            "hit over the longer half": ttft_s / longer_half_s,
            "hit over recompute": ttft_s / statistics.median(recomputed),
        },
        "samples": {"hits": hits, "rests": rests, "recomputed_s": recomputed},
    }


def measure_others(bench: Bench) -> dict[str, Any]:
    """Times the tokens of rows that decode while long prompts come from the host."""
    sizes, drive = bench.sizes, bench.host
    prefix = bench.prompt(sizes.prefix)
    bench.first_token(drive, prefix)
    steps = sizes.num_loads * (2 * sizes.gap_steps + 40) + 10 * sizes.gap_steps
    output = min(steps, drive.max_len - sizes.row_prompt - 1)
    rows = [drive.add(bench.prompt(sizes.row_prompt), output) for _ in range(sizes.rows)]
    while not all(len(row.times) > 3 for row in rows):
        drive.step()
    quiet_from = time.perf_counter()
    drive.steps(10 * sizes.gap_steps)
    quiet_to = time.perf_counter()
    drive.loads.clear()
    arrivals, gate = [], drive.engine.stats().graph_gate
    for _ in range(sizes.num_loads):
        drive.leave_device()
        drive.steps(sizes.gap_steps)
        arrivals.append(drive.add(np.concatenate((prefix, bench.prompt(sizes.suffix))), 1))
        drive.finish(arrivals[-1])
        drive.steps(sizes.gap_steps)
    gate = gate_between(gate, drive.engine.stats().graph_gate)
    still_decoding = sum(not row.is_done for row in rows)
    loading = [(load.begin, load.end) for load in drive.loads if load.end]
    loaded_at = [max((end for _, end in loading if end <= seen.times[0]), default=seen.added) for seen in arrivals]
    prefilling = [(at, seen.times[0]) for at, seen in zip(loaded_at, arrivals, strict=True)]
    gaps = [gap for row in rows for gap in pairwise(row.times)]
    quiet = [end - begin for begin, end in gaps if quiet_from <= begin and end <= quiet_to]
    during_prefill = [end - begin for begin, end in gaps if overlaps(begin, end, prefilling)]
    during_load = [
        end - begin for begin, end in gaps if overlaps(begin, end, loading) and not overlaps(begin, end, prefilling)
    ]
    drive.abort(*rows)
    figures = {"quiet": quiet, "while loading": during_load, "while the rest is prefilled": during_prefill}
    return {
        "rows_still_decoding_at_the_end": still_decoding,
        "host_tokens": [seen.cached.host if seen.cached else 0 for seen in arrivals],
        "arrivals_ttft_s": [seen.ttft_s for seen in arrivals],
        "tpot_s": {name: percentiles(values) for name, values in figures.items() if values},
        "gate": gate,
        "ratios": {
            DURING_LOAD: ratio_of_p99(during_load, quiet),
            REPLAYED: share_of_eligible(gate),
        },
        "samples": figures,
    }


def measure_write_through(bench: Bench) -> dict[str, Any]:
    """Times decoding with a host tier, which stores every full page, and without, in turns; nothing is hit."""
    sizes = bench.sizes
    samples: dict[str, list[dict[str, float]]] = {"host": [], "device": []}
    stored = bench.host.engine.stats().cache.offloads.num_fulfilled
    for _ in range(4):
        for name, drive in (("host", bench.host), ("device", bench.device)):
            rows = [drive.add(bench.prompt(sizes.row_prompt), sizes.row_output) for _ in range(2 * sizes.rows)]
            drive.finish(*rows)
            drive.settle()
            started = max(row.times[0] for row in rows)
            gaps = [end - begin for row in rows for begin, end in pairwise(row.times) if begin >= started]
            samples[name].append({"median_s": statistics.median(gaps), "mean_s": statistics.fmean(gaps)})
    host_s, device_s = (median(values[1:], "median_s") for values in samples.values())  # the first warms up
    mean_host_s, mean_device_s = (median(values[1:], "mean_s") for values in samples.values())
    return {
        "tpot_s": {"host": host_s, "device": device_s, "mean_host": mean_host_s, "mean_device": mean_device_s},
        "stored_pages": bench.host.engine.stats().cache.offloads.num_fulfilled - stored,
        "ratios": {"write-through": host_s / device_s},
        "samples": samples,
    }


def measure_conversations(bench: Bench) -> dict[str, Any]:
    """Visits conversations in groups, turn after turn, with a host tier and without."""
    case = bench.sizes.conversations
    texts = case.texts(bench.prompt)
    result: dict[str, Any] = {}
    for name, drive in (("host", bench.host), ("device", bench.device)):
        drive.engine.flush()
        before = drive.engine.stats().cache
        groups = visit(drive, case, texts)
        drive.settle()
        after = drive.engine.stats().cache
        result[name] = {
            "input_tokens_per_s": input_rate(groups),
            "seconds_per_group": statistics.median(group["seconds"] for group in counted(groups)),
            **copied_pages(before, after),
            "unfulfilled": {"loads": dict(after.loads.unfulfilled), "offloads": dict(after.offloads.unfulfilled)},
            "groups": groups,
        }
    ratio = result["host"]["input_tokens_per_s"] / result["device"]["input_tokens_per_s"]
    return result | {"ratios": {"conversations": ratio}}


def measure_same_tokens(bench: Bench) -> dict[str, Any]:
    """Runs hiserve-nano over a pool that holds a third of the work, twice; judges the second pass by an engine without cache."""
    settings = {"model": NANO, "device": bench.sizes.settings["device"], "dtype": "float32", "max_model_len": 512}
    settings |= {"page_size": 16, "max_running_requests": 4, "max_batched_tokens": 64}
    drive = Drive(kv_pages=60, host_cache_gib=0.1, **settings)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, 160 + 11 * row, dtype=np.int32) for row in range(1, 9)]
    for _ in range(2):
        seen = [drive.add(prompt, 40) for prompt in prompts]
        drive.finish(*seen)
        drive.settle()
    stats = drive.engine.stats()
    drive.close()
    asked, replies = [prompt.tolist() for prompt in prompts], [each.tokens for each in seen]
    with LLM(in_process=True, disable_prefix_cache=True, spec="off", log_level="warning", **settings) as plain:
        expected = [result.outputs[0].token_ids for result in plain.generate(asked, sampling(len(asked), 0.0, 40))]
        equality = EqualityChecker(plain).compare(asked, expected, replies, 0.0)
    verdict = equality.margin or Margin(0.0, 0.0, 0, equality.num_tokens)
    return {
        "is_kept": equality.is_kept and verdict.is_kept,
        "worst": verdict.worst,
        "epsilon": verdict.epsilon,
        "needed": verdict.num_needed,
        "positions": verdict.num_positions,
        "distinct_tokens": len({token for reply in replies for token in reply}),
        "host_tokens": sum(each.cached.host for each in seen if each.cached),
        "loaded_pages": stats.cache.loads.num_fulfilled,
    }


def sizes_of(shape: str) -> Sizes:
    """Returns the sizes for a built-in shape."""
    sizes, settings = SHAPES[shape]
    return replace(FULL, settings=FULL.settings | {"shape": shape} | settings, **sizes)


def overlaps(begin: float, end: float, windows: Sequence[tuple[float, float]]) -> bool:
    """Whether a stretch of time meets any of the windows."""
    return any(begin < window_end and window_begin < end for window_begin, window_end in windows)


def median(samples: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(sample[name] for sample in samples)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "count": len(values)}


def ratio_of_p99(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns how many times longer the 99th percentile is; None where one of them is empty."""
    return float(np.percentile(values, 99) / np.percentile(others, 99)) if values and others else None


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "hit": measure_hit,
    "others": measure_others,
    "write_through": measure_write_through,
    "conversations": measure_conversations,
    "same_tokens": measure_same_tokens,
}


def show(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Prints the ratios of parts beside their bars; returns the names of those that miss theirs."""
    ratios = {k: v for part in parts.values() for k, v in part.get("ratios", {}).items() if v is not None}
    least = {k: BARS[k] for k in ratios if k in LEAST}
    return judge(ratios, least=least, most={k: BARS[k] for k in ratios if k not in LEAST})


def main() -> int:
    """Writes the result file, part by part; returns 1 if the tokens are not the same."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the large engines")
    given = parser.parse_args()
    sizes = TINY if given.tiny else sizes_of(given.shape)
    flags = " --tiny" * given.tiny + f" --shape {given.shape}" * (given.shape != "llama-8b")
    flags += f" --parts {' '.join(given.parts)}" if given.parts != list(PARTS) else ""
    result = Record.of(given, f"python -m benchmarks.cache OUT.json COMMIT{flags}", *ENGINE)
    result |= {"seed": SEED, "workload": asdict(sizes), "bars": BARS}
    begin = time.perf_counter()
    bench = Bench(sizes)
    result |= {"build_s": bench.build_s, "memory_bytes": bench.host.memory, "parts": {}}
    print(f"engines built after {time.perf_counter() - begin:.1f} s", flush=True)
    for name in given.parts:
        started = time.perf_counter()
        result["parts"][name] = PARTS[name](bench)
        result["parts"][name]["wall_s"] = time.perf_counter() - started
        result["build_s"] = bench.build_s
        result.save()
        print(f"{name} took {result['parts'][name]['wall_s']:.1f} s", flush=True)
    bench.close()
    if sizes.settings["device"] == "cuda":
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        result.save()
    show(result["parts"])
    return int(not result["parts"].get("same_tokens", {"is_kept": True})["is_kept"])


if __name__ == "__main__":
    raise SystemExit(main())
