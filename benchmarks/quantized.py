"""Weights in fewer bits against bfloat16: steps that decode, and prompts, of the Llama-8B shape with random weights, in one run.

Usage: ``python -m benchmarks.quantized OUT.json COMMIT [--quantize fp8 int4] [--set NAME=VALUE ...] [--tiny]`` on a CUDA
device. One engine after the other, each with a setting of ``--quantize``; ratios are of its speed to that of ``off``. ``--set`` gives
every engine a setting. The file is written after each engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.driving import Bench, decode, run, setting
from benchmarks.gpu.sizes import FULL, LARGE, SEED, TINY
from benchmarks.record import ENGINE, Record, gpu_parser

CASES = ((32, 1024), (8, 1024), (1, 1024))  # rows, tokens that each attends over; cached by the one before
BARS = {
    "fp8": {"32 x 1024": 1.7, "8 x 1024": 1.7, "1 x 1024": 1.7, "prompts": 1.5},
    "int4": {"8 x 1024": 2.4, "1 x 1024": 2.4},
}


def main() -> int:
    """Writes the result file; returns 1 if a bar is missed."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--quantize", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    sizes = TINY if given.tiny else replace(FULL, steps=32, repeats=3)
    flags = "".join(f" --set {name}={value}" for name, value in given.set)
    result = Record.of(given, f"python -m benchmarks.quantized OUT.json COMMIT{flags}", *ENGINE)
    result |= {"seed": SEED, "bars": BARS, "times_s": {}, "memory_bytes": {}, "ratios": {}}
    times: dict[str, dict[str, float]] = result["times_s"]
    for quantize in ("off", *given.quantize):
        bench = Bench(sizes, {}, {"quantize": quantize, **dict(given.set)})
        times[quantize] = measure(bench, CASES, tiny=given.tiny)
        result["memory_bytes"][quantize] = bench.built[0]["memory_bytes"]
        bench.close()
        result["ratios"][quantize] = {name: times["off"][name] / s for name, s in times[quantize].items()}
        result.save()
        print(quantize, {name: f"{1e3 * s:.2f} ms" for name, s in times[quantize].items()}, flush=True)
    missed = []
    for quantize in given.quantize:
        for name, ratio in result["ratios"][quantize].items():
            bar = BARS[quantize].get(name)
            missed += [name] * (bar is not None and ratio < bar)
            print(f"{quantize:5} {name:10} {ratio:.3f}" + (f" of {bar}" if bar else ""))
    return int(bool(missed) and not given.tiny)


def measure(bench: Bench, cases: Sequence[tuple[int, int]], *, tiny: bool) -> dict[str, float]:
    """Returns the median seconds of a step that decodes, by rows and context, and of a batch of prompts."""
    sizes: Any = bench.sizes
    drive = bench.engine(LARGE)
    found = {}
    for rows, context in [(4, 64)] if tiny else cases:
        found[f"{rows} x {context}"] = decode(bench, drive, rows, context).median_s
    num_prompts, length = (2, 64) if tiny else (4, 8192)
    run(drive, [bench.prompt(drive, length)], 1)
    seconds = []
    for _ in range(sizes.repeats):
        drive.engine.flush()
        seconds.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1).seconds)
    return found | {"prompts": statistics.median(seconds)}


if __name__ == "__main__":
    raise SystemExit(main())
