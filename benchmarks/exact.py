"""``--exact`` against the default: steps that decode, and prompts, of the Llama-8B shape with random weights, in one run.

Usage: ``python -m benchmarks.exact OUT.json COMMIT [--set NAME=VALUE ...] [--tiny]`` on a CUDA device. One engine after the other;
ratios are of the time with ``--exact`` to that without. ``--set`` gives both engines a setting. The file is written after each engine.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.driving import Bench, setting
from benchmarks.gpu.sizes import FULL, SEED, TINY
from benchmarks.quantized import measure
from benchmarks.record import ENGINE, Record, gpu_parser

CASES = ((128, 1024), (32, 1024), (8, 1024), (1, 1024))  # rows, tokens that each attends over; cached by the one before
BARS = {"128 x 1024": 1.15, "32 x 1024": 1.1, "8 x 1024": 1.1, "1 x 1024": 1.1, "prompts": 1.15}


def main() -> int:
    """Writes the result file; returns 1 if a bar is missed."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    sizes = TINY if given.tiny else replace(FULL, steps=32, repeats=3)
    flags = "".join(f" --set {name}={value}" for name, value in given.set)
    result = Record.of(given, f"python -m benchmarks.exact OUT.json COMMIT{flags}", *ENGINE)
    result |= {"seed": SEED, "bars": BARS, "times_s": {}, "ratios": {}}
    for name, is_exact in (("default", False), ("exact", True)):
        bench = Bench(sizes, {}, {"exact": is_exact, **dict(given.set)})
        result["times_s"][name] = measure(bench, CASES, tiny=given.tiny)
        bench.close()
        result.save()
        print(name, {case: f"{1e3 * s:.2f} ms" for case, s in result["times_s"][name].items()}, flush=True)
    default, exact = result["times_s"]["default"], result["times_s"]["exact"]
    result["ratios"] = {case: exact[case] / s for case, s in default.items()}
    result.save()
    missed = []
    for case, ratio in result["ratios"].items():
        bar = BARS.get(case)
        missed += [case] * (bar is not None and ratio > bar)
        print(f"{case:10} {ratio:.3f}" + (f" of {bar}" if bar else ""))
    return int(bool(missed) and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
