"""Kills the worker of a loaded server, and takes the time until its streams go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.recovery.sizes import WEIGHTS, Sizes

LOOK_S = 0.05


@dataclass
class Stream:
    """One reply over HTTP.

    Attributes:
        at: ``time.monotonic()`` of each piece of text.
        end: Its finish reason, or an error.
    """

    at: list[float] = field(default_factory=list)
    end: str = ""

    def pause_s(self, killed: float) -> tuple[float, float]:
        """Returns its longest silence that ends after the kill, and when after the kill that ended."""
        times = np.array(self.at)
        after = np.flatnonzero(times[1:] > killed) + 1
        longest = int(after[np.argmax(times[after] - times[after - 1])])
        return float(times[longest] - times[longest - 1]), float(times[longest] - killed)


async def read(http: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> None:
    """Reads a reply to its end."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            stream.at.append(time.monotonic())
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                stream.end = event["error"]["message"]
            for choice in event.get("choices", ()):
                stream.end = choice["finish_reason"] or stream.end


async def kill_once(url: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Returns what a death in the middle of a load cost."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(7, sizes.vocab_size, (sizes.streams, sizes.prompt)).tolist()
    streams = [Stream() for _ in prompts]
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            body = {"prompt": prompt, "max_tokens": sizes.output, "ignore_eos": True, "stream": True}
            body |= {"temperature": 0.8 * (index % 2), "seed": index}
            group.create_task(read(http, body, stream))
        info = await info_of(http)
        while min(tokens_told(info), *(len(stream.at) for stream in streams)) < sizes.before:
            await asyncio.sleep(LOOK_S)
            info = await info_of(http)
        (worker,) = info["workers"]
        killed = time.monotonic()
        os.kill(worker["pid"], signal.SIGKILL)
        graphs_s = await until_graphs(http, worker["incarnation"], killed)
    assert [stream.end for stream in streams] == ["length"] * sizes.streams, streams
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return found(await info_of(http), [stream.pause_s(killed) for stream in streams], graphs_s)


def tokens_told(info: dict[str, Any]) -> int:
    """Tokens generated for each request that runs, on average; text comes in larger pieces with drafts."""
    (worker,) = info["workers"]
    stats = worker["stats"]
    return int(stats["generated_tokens"] // max(1, stats["running"]))


async def info_of(http: httpx.AsyncClient) -> dict[str, Any]:
    """Returns ``/server_info``."""
    return dict((await http.get("/server_info")).raise_for_status().json())


async def until_graphs(http: httpx.AsyncClient, dead: int, killed: float) -> float | None:
    """Waits for a successor that ran steps; returns the seconds until one was a graph, None where there are none."""
    while True:
        for worker in (await info_of(http))["workers"]:  # none is shown before it is ready
            gate = worker["stats"]["graph_gate"]
            if worker["incarnation"] > dead and gate:
                return time.monotonic() - killed if "replay" in gate else None
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
