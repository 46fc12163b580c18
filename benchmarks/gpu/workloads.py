"""Steps against the machine's ceilings, and whole workloads against a peer's recorded figures, with a host tier, over HTTP."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks.drive import Drive, copied_pages, counted, gate_between, input_rate, visit
from benchmarks.gpu.driving import Batch, Bench, Part, decode, run
from benchmarks.gpu.figures import Figure, Limits, replays, share_of_eligible
from benchmarks.gpu.sizes import (
    BARS,
    LARGE,
    PEER,
    PEER_CEILINGS,
    PEER_CONVERSATIONS_TOKENS_PER_S,
    PEER_DATE,
    PEER_PREFILL_TOKENS_PER_S,
    SMALL,
    DecodeCase,
    HttpCase,
)
from benchmarks.served import bench_serve, serving_shape


def against_peer(
    bench: Bench, name: str, ours: float, theirs: float, ceiling: str, *, unit: str = "tokens/s", bar: str = "peer"
) -> Figure:
    """Compares a rate with the peer's of its day, scaled by our ceiling over its: what bounds the workload."""
    scale = bench.ceilings[ceiling] / PEER_CEILINGS[ceiling] if ceiling in bench.ceilings else 1.0
    against = f"{PEER}, {PEER_DATE}: {theirs:g} {unit} x {scale:.3f}, our {ceiling} over its"
    return Figure(name, ours, unit, ours / (theirs * scale), BARS[bar], against)


def measure_peers(bench: Bench) -> Part:
    """Runs requests that come at once, each batch after a short one of its size."""
    part, drive = Part(), bench.engine(LARGE)
    for case in bench.sizes.peers:
        name = f"{case.rows} x {case.prompt} -> {case.output}"
        drive.engine.flush()
        run(drive, [bench.prompt(drive, case.prompt) for _ in range(case.rows)], 2)
        drive.engine.flush()
        batch = run(drive, [bench.prompt(drive, case.prompt) for _ in range(case.rows)], case.output)
        rate = batch.output_tokens / batch.seconds
        part.figures.append(against_peer(bench, name, rate, case.tokens_per_s, "copy_bytes_per_s"))
        part.samples[name] = batch.told()
    return part


def measure_chats(bench: Bench) -> Part:
    """Runs chats turn by turn; every turn sends all that was said before."""
    drive, case = bench.engine(LARGE), bench.sizes.chats
    drive.engine.flush()
    shared = bench.prompt(drive, case.shared)
    said = [shared] * case.chats
    turns: list[Batch] = []
    for _ in range(case.turns):
        prompts = [np.concatenate((before, bench.prompt(drive, case.turn_input))) for before in said]
        turns.append(run(drive, prompts, case.turn_output))
        said = [np.concatenate(both) for both in zip(prompts, turns[-1].replies, strict=True)]
    rate = sum(turn.output_tokens for turn in turns) / sum(turn.seconds for turn in turns)
    name = f"{case.chats} chats x {case.turns} turns"
    figure = against_peer(bench, name, rate, case.tokens_per_s, "copy_bytes_per_s")
    return Part([figure], {"turns": [turn.told() for turn in turns]})


def measure_conversations(bench: Bench) -> Part:
    """Visits conversations that the device cannot hold, with a host tier."""
    case = bench.sizes.conversations
    drive = bench.engine(LARGE, **bench.sizes.tiers, host_cache_gib=bench.sizes.host_gib)
    drive.engine.flush()
    groups = visit(drive, case, case.texts(partial(bench.prompt, drive)))
    drive.settle()
    name = f"{case.conversations} conversations of {case.history} over {drive.settings.cache.kv_pages} pages"
    figure = against_peer(
        bench,
        name,
        input_rate(groups),
        PEER_CONVERSATIONS_TOKENS_PER_S,
        "pinned_to_device_bytes_per_s",
        unit="input tokens/s",
        bar="peer with a host tier",
    )
    stats = drive.engine.stats().cache
    assert sum(group["host_tokens"] for group in counted(groups)), "nothing came from the host"
    return Part(
        [figure], {"groups": groups, "loads": stats.loads.num_fulfilled, "offloads": stats.offloads.num_fulfilled}
    )


def measure_traffic(bench: Bench) -> Part:
    """Runs one trace with a host tier; tells how many of the steps that a graph was made for were replayed.

    Without the tier the same trace computes more, in larger steps for which no graph is made: its share of all steps would
    say nothing about loads. Its gate's counts are kept beside the others.
    Some rows decode all the time; conversations that the device cannot hold are visited in groups, so that there are
    loads, stores and evictions in all but the first turn.
    """
    host = trace(bench, bench.engine(LARGE, **bench.sizes.tiers, host_cache_gib=bench.sizes.host_gib))
    device = trace(bench, bench.engine(LARGE, **bench.sizes.tiers))
    assert host["loaded_pages"] > 0 and not device["loaded_pages"], f"pages loaded: {host}, without a tier: {device}"
    return Part(
        [replays(host["gate"], BARS["replays"])],
        {
            "host": host,
            "device": device,
            "of_eligible_by_reason": share_of_eligible(host["gate"]),
            "of_eligible_by_reason_without_a_tier": share_of_eligible(device["gate"]),
        },
    )


def trace(bench: Bench, drive: Drive) -> dict[str, Any]:
    """Runs it; returns what the gate said to each step of it, the pages that were copied, and each group."""
    sizes, case = bench.sizes, bench.sizes.conversations
    drive.engine.flush()
    texts = case.texts(partial(bench.prompt, drive), sizes.traffic_conversations)
    before = drive.engine.stats()
    room = drive.max_len - case.turn_input - 1
    rows = [drive.add(bench.prompt(drive, case.turn_input), room) for _ in range(sizes.traffic_rows)]
    groups = visit(drive, case, texts)
    still = sum(not row.is_done for row in rows)
    drive.abort(*rows)
    after = drive.engine.stats()
    return {
        "gate": gate_between(before.graph_gate, after.graph_gate),
        "rows_still_decoding_at_the_end": still,
        **copied_pages(before.cache, after.cache),
        "groups": groups,
    }


def measure_http(bench: Bench, shape: str, *, is_crowd: bool = False) -> Part:
    """Runs the workload in this process, then over HTTP, on engines of the same settings; first runs are not counted.

    A crowd has a row for each stream.
    """
    case = bench.sizes.crowd if is_crowd else bench.sizes.http
    more = {"max_running_requests": case.streams} if is_crowd else {}
    settings = bench.settings(shape, **more)
    batches, vocab_size = in_process(bench, case, bench.engine(shape, **more))
    offline = statistics.median(batch.output_tokens / batch.seconds for batch in batches[1:])
    bench.close()
    options = {"input_length": case.prompt, "output_length": case.output, "num_prompts": case.requests}
    options["max_concurrency"] = case.streams
    with serving_shape(settings, vocab_size) as server:
        summaries = [bench_serve(server.url, **options, seed=seed) for seed in range(case.runs + 1)]
    http = statistics.median(summary["output_tokens_per_s"] for summary in summaries[1:])
    name = f"{shape} over HTTP, {case.streams} streams"
    bar = BARS["crowd over http" if is_crowd else "http"]
    figure = Figure(name, http, "tokens/s", http / offline, bar, "offline in one process")
    runs = {"offline": [batch.told() for batch in batches], "http": summaries, "ready_s": server.ready_s}
    return Part([figure], {"offline_tokens_per_s": offline} | runs)


def in_process(bench: Bench, case: HttpCase, drive: Drive) -> tuple[list[Batch], int]:
    """Returns the runs of the workload in this process, and the shape's vocabulary; keeps no engine."""
    batches = []
    for _ in range(case.runs + 1):
        drive.engine.flush()
        prompts = [bench.prompt(drive, case.prompt) for _ in range(case.requests)]
        batches.append(run(drive, prompts, case.output, case.streams))
    return batches, drive.vocab_size


def measure_decode(bench: Bench, shape: str) -> Part:
    """Times steady decode steps against the bytes that they must read, at the rate of a copy."""
    part, drive = Part(), bench.engine(shape)
    rate = 0.0
    filled: dict[int, int] = {}  # tokens of each row's text that the cache holds
    for case in (case for case in bench.sizes.decode if case.shape == shape):
        missing = sum(max(0, case.context - filled.get(row, 0)) for row in range(case.rows))
        if rate and missing / rate > bench.sizes.max_fill_s:
            part.notes.append(f"{name_of(case)}: left out, its prompts would take {missing / rate:.0f} s")
            continue
        figure, samples = time_steps(bench, drive, case)
        rate = missing / samples["fill_s"] if missing > case.rows else rate
        filled |= {row: max(case.context, filled.get(row, 0)) for row in range(case.rows)}
        part.figures.append(figure)
        part.samples[figure.name] = samples
    return part


def time_steps(bench: Bench, drive: Drive, case: DecodeCase) -> tuple[Figure, dict[str, Any]]:
    """Returns the time of a step beside that of the bytes that it must read, and the samples."""
    pace = decode(bench, drive, case.rows, case.context)
    limits = Limits.of(drive.model, drive.settings.model.dtype)
    limit_s = limits.decode_bytes(case.rows * pace.mean_context) / bench.ceilings["copy_bytes_per_s"]
    samples = pace.told() | {"limit_s": limit_s, "of_limit_by_mean": limit_s / pace.mean_s}
    share = limit_s / pace.median_s
    return Figure(name_of(case), pace.median_s * 1e3, "ms", share, case.bar, "bandwidth limit"), samples


def name_of(case: DecodeCase) -> str:
    return f"{case.shape} decode, {case.rows} x {case.context}"


def measure_prefill(bench: Bench) -> Part:
    """Times long prompts that come at once, to the first token of each, against the rate of a matrix product."""
    num_prompts, length = bench.sizes.prefill
    figure, samples = time_prompts(bench, bench.engine(LARGE), num_prompts, length, BARS["prefill"])
    name = f"{num_prompts} x {length} -> 1"
    peer = against_peer(bench, name, figure.value, PEER_PREFILL_TOKENS_PER_S, "matmul_flop_per_s")
    return Part([figure, peer], samples)


def time_prompts(
    bench: Bench, drive: Drive, num_prompts: int, length: int, bar: float
) -> tuple[Figure, dict[str, Any]]:
    """Returns their rate beside that of a matrix product, and the samples; the first prompt is not counted."""
    run(drive, [bench.prompt(drive, length)], 1)
    batches: list[Batch] = []
    while len(batches) < bench.sizes.repeats and sum(batch.seconds for batch in batches) < bench.sizes.max_fill_s / 3:
        drive.engine.flush()
        batches.append(run(drive, [bench.prompt(drive, length) for _ in range(num_prompts)], 1))
    seconds = statistics.median(batch.seconds for batch in batches)
    flop = num_prompts * Limits.of(drive.model, drive.settings.model.dtype).prefill_flop(length)
    share = flop / seconds / bench.ceilings["matmul_flop_per_s"]
    name = f"{LARGE} prefill, {num_prompts} x {length}"
    samples = {"flop": flop, "flop_per_s": flop / seconds, "runs": [batch.told() for batch in batches]}
    return Figure(name, num_prompts * length / seconds, "tokens/s", share, bar, "matrix product"), samples


def measure_long(bench: Bench) -> Part:
    """Times one long prompt, and steps of one row behind as long a context."""
    case = bench.sizes.long
    length = case.context * 5 // 4
    drive = bench.engine(case.shape, max_running_requests=1, max_model_len=length, kv_pages=1 + 2 * length // 16)
    figure, samples = time_prompts(bench, drive, 1, case.context, BARS["long prompt"])
    drive.engine.flush()
    steps, of_steps = time_steps(bench, drive, case)
    return Part([figure, steps], {"prompts": samples, "steps": of_steps})


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
