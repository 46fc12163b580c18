"""Kills the worker of a loaded server, and takes the time until its streams go on."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.recovery.sizes import WEIGHTS, Sizes
from hiserve.bench.http import Pool
from hiserve.bench.load_client import Client
from hiserve.bench.online import connected
from hiserve.bench.options import ConnectionOptions
from hiserve.bench.server_backends import NO_USAGE
from hiserve.bench.workload import Sample
from hiserve.core.plan import Int32Array

LOOK_S = 0.05


def pause_s(chunk_s: Sequence[float], killed_s: float) -> tuple[float, float]:
    """Returns a stream's longest silence that ends after the kill, and when after the kill that ended; by one clock."""
    times = np.array(chunk_s)
    after = np.flatnonzero(times[1:] > killed_s) + 1
    longest = int(after[np.argmax(times[after] - times[after - 1])])
    return float(times[longest] - times[longest - 1]), float(times[longest] - killed_s)


async def read(client: Client, prompt: Int32Array, num_tokens: int, sample: Sample) -> None:
    """Reads a reply; one that does not reach its length ends the round."""
    await client.send(prompt, num_tokens, sample)
    assert sample.finish == "length", f"{sample.error or sample.finish}: {sample.detail}"


async def kill_once(url: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Returns what a death in the middle of a load cost."""
    prompts = np.random.default_rng(seed).integers(7, sizes.vocab_size, (sizes.streams, sizes.prompt), dtype=np.int32)
    samples = [Sample() for _ in prompts]
    async with connected(ConnectionOptions(url=url, timeout=300), "openai", ignore_eos=True) as server:
        async with asyncio.TaskGroup() as group:
            for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
                client = server.client.asking_for(temperature=0.8 * (index % 2), seed=index, usage=NO_USAGE)
                group.create_task(read(client, prompt, sizes.output, sample))
            info = await info_of(server.pool)
            while min(tokens_told(info), *(len(sample.chunk_s) for sample in samples)) < sizes.before:
                await asyncio.sleep(LOOK_S)
                info = await info_of(server.pool)
            (worker,) = info["workers"]
            killed_s = time.perf_counter()
            os.kill(worker["pid"], signal.SIGKILL)
            graphs_s = await until_graphs(server.pool, worker["incarnation"], killed_s)
        return found(await info_of(server.pool), [pause_s(sample.chunk_s, killed_s) for sample in samples], graphs_s)


def tokens_told(info: dict[str, Any]) -> int:
    """Tokens generated for each request that runs, on average; text comes in larger pieces with drafts."""
    (worker,) = info["workers"]
    stats = worker["stats"]
    return int(stats["generated_tokens"] // max(1, stats["running"]))


async def info_of(pool: Pool) -> dict[str, Any]:
    """Returns ``/server_info``."""
    status, info = await pool.ask("GET", "/server_info")
    assert status == 200, f"/server_info answered {status}: {info}"
    return dict(info)


async def until_graphs(pool: Pool, dead: int, killed_s: float) -> float | None:
    """Waits for a successor that ran steps; returns the seconds until one was a graph, None where there are none."""
    while True:
        for worker in (await info_of(pool))["workers"]:  # none is shown before it is ready
            gate = worker["stats"]["graph_gate"]
            if worker["incarnation"] > dead and gate:
                return time.perf_counter() - killed_s if "replay" in gate else None
        await asyncio.sleep(LOOK_S)


def found(info: dict[str, Any], pauses: list[tuple[float, float]], graphs_s: float | None) -> dict[str, Any]:
    """Returns a round's figures: what the server says of its recovery, and what its clients saw of it."""
    recovery, replays = info["recovery"], info["replays"]
    firsts = [after_s for _, after_s in pauses]
    first_s = min(firsts)
    return {
        "first_new_token_s": round(first_s, 3),
        "without_weights_s": round(first_s - recovery["phases"].get(WEIGHTS, 0.0), 3),
        "median_stream_s": round(statistics.median(firsts), 3),
        "last_stream_s": round(max(firsts), 3),
        "longest_pause_s": round(max(pause_s for pause_s, _ in pauses), 3),
        "graphs_back_s": None if graphs_s is None else round(graphs_s, 3),
        "phases": recovery["phases"],
        "total_s": recovery["total_s"],
        "replayed_requests": replays["requests"],
        "replayed_tokens": replays["tokens"],
        "cached_tokens": replays["cached"],
        "host_share": round(replays["cached"]["host"] / replays["tokens"], 4),
    }
