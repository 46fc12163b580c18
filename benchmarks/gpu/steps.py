"""Times of single steps against what the machine could do: decoding, prefill, graphs, overlap."""

from __future__ import annotations

import statistics

from benchmarks.gpu.driving import Batch, Bench, Part, decode, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.peers import against_peer
from benchmarks.gpu.sizes import BARS, LARGE, PEER_PREFILL_TOKENS_PER_S, SMALL, DecodeCase


def measure_decode(bench: Bench, shape: str) -> Part:
    """Times steady decode steps against the bytes that they must read, at the rate of a copy."""
    part, drive = Part(), bench.engine(shape)
    limits, rate = bench.limits(drive), 0.0
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
    """Returns what a decode case is called."""
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
    flop = num_prompts * bench.limits(drive).prefill_flop(length)
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
    """Times steps of one row with graphs and without."""
    return _compare(bench, LARGE, bench.sizes.compare_rows[0], "graphs", {"all": "all", "off": "off"})


def measure_overlap(bench: Bench) -> Part:
    """Times steps of the small shape with the next one planned meanwhile, and after."""
    return _compare(bench, SMALL, bench.sizes.compare_rows[1], "overlap", {"1": 1, "0": 0})


def _compare(bench: Bench, shape: str, rows: int, setting: str, values: dict[str, str | int]) -> Part:
    """Times the same decoding under two values of a setting; the ratio is how much faster the first is."""
    context = min(case.context for case in bench.sizes.decode if case.shape == shape)
    paces = {}
    for name, value in values.items():
        if setting == "graphs" and bench.sizes.settings["device"] == "cpu":
            value = "off"
        drive = bench.engine(shape, **{setting: value})
        paces[name] = decode(bench, drive, rows, context)
    first, second = paces.values()
    label = f"{shape} decode, {rows} x {context}, {setting} " + " / ".join(values)
    ratio = second.mean_s / first.mean_s
    figure = Figure(label, first.mean_s * 1e3, "ms", ratio, BARS[setting], " ".join((setting, list(values)[1])))
    return Part([figure], {name: pace.told() for name, pace in paces.items()})
