"""The large shape with weights in 8 and 4 bits against itself in 16 bits, in one run."""

from __future__ import annotations

import statistics

from benchmarks.gpu.driving import Bench, Part, decode, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import BARS, LARGE

CONTEXT = 1024  # tokens of a row that decodes
# Rows that decode, the most first: others find their prefixes in the cache.
ROWS = {"off": (32, 8, 1), "fp8": (32, 8, 1), "int4": (32, 8, 1)}
BARRED_ROWS = {"fp8": (32, 8, 1), "int4": (8, 1)}


def measure_few_bits(bench: Bench) -> Part:
    """Times steps that decode, and prompts, of three engines one after the other."""
    part, base = Part(), dict[str, float]()
    num_prompts, length = bench.sizes.prefill
    context = min(CONTEXT, min(case.context for case in bench.sizes.decode))
    for scheme, batches in ROWS.items():
        drive = bench.engine(LARGE, quantize=scheme)
        for rows in batches:
            rows = min(rows, drive.settings.scheduler.max_running_requests)
            pace = decode(bench, drive, rows, context)
            _note(part, base, scheme, f"decode, {rows} x {context}", pace.median_s, rows in BARRED_ROWS.get(scheme, ()))
        run(drive, [bench.prompt(drive, length)], 1)
        times = []
        for _ in range(bench.sizes.repeats):
            drive.engine.flush()
            times.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1).seconds)
        _note(part, base, scheme, f"prefill, {num_prompts} x {length}", statistics.median(times), scheme == "fp8")
        part.samples[f"{scheme} weights"] = drive.memory
    return part


def _note(part: Part, base: dict[str, float], scheme: str, what: str, seconds: float, has_bar: bool) -> None:
    """Adds a figure; its ratio is that of the time with 16 bits."""
    base.setdefault(what, seconds)
    kind = what.split(",", maxsplit=1)[0]
    bar = BARS[f"{scheme} {kind}"] if has_bar else None
    name = f"{LARGE} --quantize {scheme}, {what}"
    part.figures.append(Figure(name, seconds * 1e3, "ms", base[what] / seconds, bar, "weights in 16 bits"))
