"""Throughput of whole workloads against a peer's recorded figures, scaled by what both machines could do."""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.conversations import counted, input_rate, visit
from benchmarks.gpu.driving import Batch, Bench, Part, run
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.sizes import (
    BARS,
    LARGE,
    PEER,
    PEER_CEILINGS,
    PEER_CONVERSATIONS_TOKENS_PER_S,
    PEER_DATE,
)


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
