"""How many steps are still replayed as graphs while pages move between device and host all the time."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.conversations import copied_pages, gate_between, visit
from benchmarks.drive import Drive
from benchmarks.gpu.driving import Bench, Part
from benchmarks.gpu.eligible import replays, share_of_eligible
from benchmarks.gpu.sizes import BARS, LARGE


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
