"""Times of single steps against what the machine could do: decoding, prefill, graphs, overlap."""

from __future__ import annotations

import statistics

from benchmarks.gpu.driving import Batch, Bench, Part, decode, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.sizes import BARS, LARGE, PEER_PREFILL_TOKENS_PER_S, SMALL, DecodeCase
from benchmarks.gpu.workloads import against_peer


def measure_decode(bench: Bench, shape: str) -> Part:
    """Times steady decode steps against the bytes that they must read, at the rate of a copy."""
    part, drive = Part(), bench.engine(shape)
    limits, rate = Limits.of(drive.model, drive.settings.model.dtype), 0.0
    filled: dict[int, int] = {}  # tokens of each row's text that the cache holds
    for case in (case for case in bench.sizes.decode if case.shape == shape):
        missing = sum(max(0, case.context - filled.get(row, 0)) for row in range(case.rows))
        if rate and missing / rate > bench.sizes.max_fill_s:
            part.notes.append(f"{name_of(case)}: left out, its prompts would take {missing / rate:.0f} s")
            continue
        pace = decode(bench, drive, case.rows, case.context)
        rate = missing / pace.fill_s if missing > case.rows else rate
        filled |= {row: max(case.context, filled.get(row, 0)) for row in range(case.rows)}
        limit_s = limits.decode_bytes(case.rows * pace.mean_context) / bench.ceilings["copy_bytes_per_s"]
        share = limit_s / pace.median_s
        part.figures.append(Figure(name_of(case), pace.median_s * 1e3, "ms", share, case.bar, "bandwidth limit"))
        part.samples[name_of(case)] = pace.told() | {"limit_s": limit_s, "of_limit_by_mean": limit_s / pace.mean_s}
    return part


def name_of(case: DecodeCase) -> str:
    return f"{case.shape} decode, {case.rows} x {case.context}"


def measure_prefill(bench: Bench) -> Part:
    """Times long prompts that come at once, to the first token of each, against the rate of a matrix product."""
    drive = bench.engine(LARGE)
    num_prompts, length = bench.sizes.prefill
    run(drive, [bench.prompt(drive, length)], 1)
    batches: list[Batch] = []
    while len(batches) < bench.sizes.repeats and sum(batch.seconds for batch in batches) < bench.sizes.max_fill_s / 3:
        drive.engine.flush()
        batches.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1))
    seconds = statistics.median(batch.seconds for batch in batches)
    flop = num_prompts * Limits.of(drive.model, drive.settings.model.dtype).prefill_flop(length)
    share = flop / seconds / bench.ceilings["matmul_flop_per_s"]
    name = f"{LARGE} prefill, {num_prompts} x {length}"
    rate = num_prompts * length / seconds
    figures = [
        Figure(name, rate, "tokens/s", share, BARS["prefill"], "matrix product"),
        against_peer(bench, f"{num_prompts} x {length} -> 1", rate, PEER_PREFILL_TOKENS_PER_S, "matmul_flop_per_s"),
    ]
    samples = {"flop": flop, "flop_per_s": flop / seconds, "runs": [batch.told() for batch in batches]}
    return Part(figures, samples)


def measure_graphs(bench: Bench) -> Part:
    """Times steps of one row as they are by default, and without graphs."""
    return _compare(bench, LARGE, bench.sizes.compare_rows[0], "graphs", "off")


def measure_overlap(bench: Bench) -> Part:
    """Times steps of the small shape as they are by default, and planned one after the other."""
    return _compare(bench, SMALL, bench.sizes.compare_rows[1], "overlap", 0)


def _compare(bench: Bench, shape: str, rows: int, setting: str, without: str | int) -> Part:
    """Times the same decoding with a setting left alone and without what it brings; the ratio is what that is."""
    context = min(case.context for case in bench.sizes.decode if case.shape == shape)
    default = decode(bench, bench.engine(shape), rows, context)
    changed = decode(bench, bench.engine(shape, **{setting: without}), rows, context)
    figure = Figure(
        f"{shape} decode, {rows} x {context}, {setting} default / {without}",
        default.mean_s * 1e3,
        "ms",
        changed.mean_s / default.mean_s,
        BARS[setting],
        f"{setting} {without}",
    )
    return Part([figure], {"default": default.told(), str(without): changed.told()})
