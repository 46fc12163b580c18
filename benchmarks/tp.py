"""A group of two GPUs against one: steps that decode, and prompts, of the Llama-8B shape with random weights, in one run.

Usage: ``python -m benchmarks.tp OUT.json COMMIT [--sizes 1 2] [--set NAME=VALUE ...] [--tiny]`` on as many CUDA devices as the
largest group has. One engine after the other; ratios are of its speed to that of the first. ``--set`` gives every engine a setting. The
file is written after each engine.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.gpu.driving import Bench, decode, run, setting
from benchmarks.gpu.sizes import FULL, LARGE, SEED, TINY
from benchmarks.record import ENGINE, Record, gpu_parser

CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024))  # rows, tokens that each attends over; cached by the one before
BARS = {"decode": 1.5, "prompts": 1.6}  # of two devices


def main() -> int:
    """Writes the result file; returns 1 if a bar of two devices is missed."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    sizes = TINY if given.tiny else replace(FULL, steps=32, repeats=3)
    flags = "".join(f" --set {name}={value}" for name, value in given.set)
    result = Record.of(given, f"python -m benchmarks.tp OUT.json COMMIT{flags}", *ENGINE)
    result |= {"seed": SEED, "bars": BARS, "times_s": {}, "memory_bytes": {}, "ratios": {}}
    times: dict[str, dict[str, float]] = result["times_s"]
    missed = []
    for size in given.sizes:
        bench, name = Bench(sizes, {}, {"tp": size, "spec": "off", **dict(given.set)}), f"tp {size}"
        times[name] = measure(bench, tiny=given.tiny)
        result["memory_bytes"][name] = bench.built[0]["memory_bytes"]
        bench.close()
        first = times[f"tp {given.sizes[0]}"]
        result["ratios"][name] = {case: first[case] / seconds for case, seconds in times[name].items()}
        result.save()
        for case, ratio in result["ratios"][name].items():
            bar = BARS["prompts" if case == "prompts" else "decode"] if size == 2 and given.sizes[0] == 1 else None
            missed += [case] * (bar is not None and ratio < bar)
            print(
                f"{name} {case:12} {1e3 * times[name][case]:9.2f} ms  {ratio:.3f}" + (f" of {bar}" if bar else ""),
                flush=True,
            )
    return int(bool(missed) and not given.tiny)


def measure(bench: Bench, *, tiny: bool) -> dict[str, float]:
    """Returns the median seconds of a step that decodes, by rows and context, and of a batch of prompts."""
    drive = bench.engine(LARGE)
    found = {}
    for rows, context in [(4, 64)] if tiny else CASES:
        found[f"{rows} x {context}"] = decode(bench, drive, rows, context).median_s
    num_prompts, length = (2, 64) if tiny else (4, 8192)
    run(drive, [bench.prompt(drive, length)], 1)
    seconds = []
    for _ in range(bench.sizes.repeats):
        drive.engine.flush()
        seconds.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1).seconds)
    return found | {"prompts": statistics.median(seconds)}


if __name__ == "__main__":
    raise SystemExit(main())
