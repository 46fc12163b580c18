"""Whole workloads: against a peer's recorded figures scaled by both machines' ceilings, with a host tier, and over HTTP."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks.conversations import copied_pages, counted, gate_between, input_rate, visit
from benchmarks.drive import Drive
from benchmarks.gpu.driving import Batch, Bench, Part, run
from benchmarks.gpu.figures import Figure, replays, share_of_eligible
from benchmarks.gpu.sizes import (
    BARS,
    LARGE,
    PEER,
    PEER_CEILINGS,
    PEER_CONVERSATIONS_TOKENS_PER_S,
    PEER_DATE,
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
    return Part([figure], {"groups": groups, "loads": stats.loads.num_fulfilled, "stores": stats.stores.num_fulfilled})


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


def measure_http(bench: Bench, shape: str) -> Part:
    """Runs the workload in this process, then over HTTP, on engines of the same settings; first runs are not counted."""
    case, settings = bench.sizes.http, bench.settings(shape)
    batches, vocab_size = in_process(bench, shape)
    offline = statistics.median(batch.output_tokens / batch.seconds for batch in batches[1:])
    bench.close()
    options = {"input_length": case.prompt, "output_length": case.output, "num_prompts": case.requests}
    options["max_concurrency"] = case.streams
    with serving_shape(settings, vocab_size) as server:
        summaries = [bench_serve(server.url, **options, seed=seed) for seed in range(case.runs + 1)]
    http = statistics.median(summary["output_tokens_per_s"] for summary in summaries[1:])
    name = f"{shape} over HTTP, {case.streams} streams"
    figure = Figure(name, http, "tokens/s", http / offline, BARS["http"], "offline in one process")
    runs = {"offline": [batch.told() for batch in batches], "http": summaries, "ready_s": server.ready_s}
    return Part([figure], {"offline_tokens_per_s": offline} | runs)


def in_process(bench: Bench, shape: str) -> tuple[list[Batch], int]:
    """Returns the runs of the workload in this process, and the shape's vocabulary; keeps no engine."""
    drive, case = bench.engine(shape), bench.sizes.http
    batches = []
    for _ in range(case.runs + 1):
        drive.engine.flush()
        prompts = [bench.prompt(drive, case.prompt) for _ in range(case.requests)]
        batches.append(run(drive, prompts, case.output, case.streams))
    return batches, drive.vocab_size
