"""The cost of a worker's death to its streams, by phase, and of supervision while nothing dies.

Usage: ``python -m benchmarks.recovery OUT.json COMMIT [--cpu | --tiny]``. On a CUDA device a server of the Llama-8B shape with
random weights, 32 streams; with ``--cpu`` one of hiserve-nano on the CPU, 8 streams; ``--tiny`` is a test of this file.

The worker is killed (SIGKILL) in the middle of the load, in each of several servers. A time is from the kill to the first
token that comes over HTTP after the silence that follows it. Phases are the server's own; loading weights does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import SERVER, Record, gpu_parser, judge, medians
from benchmarks.served import cpu_s, serving_shape
from hiserve.bench.http import Pool
from hiserve.bench.load_client import NO_USAGE, Client
from hiserve.bench.online import connected
from hiserve.bench.options import ConnectionOptions
from hiserve.bench.workload import Sample
from hiserve.config.options import make_options
from hiserve.core.plan import Int32Array
from hiserve.core.request import SamplingParams
from hiserve.launch import prepare
from hiserve.scheduler import crash_isolation, ledger, supervisor, worker_process
from hiserve.scheduler.client import EngineClient

HIT_BAR = 0.9  # of the replayed tokens, those that the host tier has
SHARE_BAR = 0.01  # of the CPU time of all processes, what supervision and ledger take
WEIGHTS = "load weights"  # the phase that is not counted
LOOK_S = 0.05
MODULES = tuple(
    "/".join(each.__name__.split(".")[1:]) + ".py" for each in (supervisor, worker_process, crash_isolation, ledger)
)
SEED = 17
MEDIANS = ("first_new_token_s", "without_weights_s", "last_stream_s", "longest_pause_s", "host_share")


@dataclass(frozen=True)
class Sizes:
    """A load and its engine; lengths in tokens."""

    settings: dict[str, Any]
    vocab_size: int
    streams: int
    prompt: int
    output: int
    before: int  # tokens that each stream has when the worker is killed
    rounds: int  # servers that are started, and whose worker is killed
    bar_s: float  # longest from the kill to the first new token, weights not counted
    load_s: float  # how long supervision and ledger are watched


LARGE = Sizes(
    settings={
        "shape": "llama-8b",
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 4096,
        "max_running_requests": 64,
        "host_cache_gib": 16,
        "spec": "off",
    },
    vocab_size=128256,
    streams=32,
    prompt=1024,
    output=1024,
    before=512,
    rounds=2,
    bar_s=20.0,
    load_s=10.0,
)
SMALL = Sizes(
    settings={
        "model": "hiserve-nano",
        "device": "cpu",
        "max_model_len": 2048,
        "max_running_requests": 8,
        "host_cache_gib": 0.3,
        "cpu_threads": 1,
    },
    vocab_size=4096,
    streams=8,
    prompt=512,
    output=400,
    before=64,
    rounds=3,
    bar_s=8.0,
    load_s=20.0,
)
TINY = replace(SMALL, streams=3, prompt=256, output=240, before=16, rounds=1, load_s=1.5)


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


async def watch(sizes: Sizes) -> dict[str, Any]:
    """Runs a load of streams that come and go for a while; returns CPU seconds and the share."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scheduler.json"
        command = (sys.executable, "-m", "benchmarks.sampled_scheduler", str(out))
        settings = prepare(make_options(log_level="warning", **sizes.settings)).identified()
        client = await EngineClient.start(settings, command=command)
        pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
        os.kill(client.started.scheduler_pid, signal.SIGUSR2)
        before, own = [cpu_s(pid) for pid in pids], time.process_time()
        await asyncio.gather(*(talk(client, sizes, index) for index in range(sizes.streams)))
        os.kill(client.started.scheduler_pid, signal.SIGUSR2)
        used = [cpu_s(pid) - first for pid, first in zip(pids, before, strict=True)]
        own = time.process_time() - own
        await client.stop()
        told = json.loads(out.read_text())
    ticks = sum(told["modules"].get(name, 0) for name in MODULES)
    watched_s = ticks / told["ticks"] * told["cpu_s"] if told["ticks"] else 0.0
    total_s = sum(used) + own
    return {
        "client_cpu_s": round(own, 3),
        "scheduler_cpu_s": round(used[0], 3),
        "scheduler_main_thread_cpu_s": round(told["cpu_s"], 3),
        "worker_cpu_s": round(sum(used[1:]), 3),
        "ticks": told["ticks"],
        "ticks_by_module": told["modules"],
        "supervision_and_ledger_cpu_s": round(watched_s, 4),
        "share": round(watched_s / total_s, 5),
    }


async def talk(client: EngineClient, sizes: Sizes, index: int) -> None:
    rng = np.random.default_rng(index)
    until = time.monotonic() + sizes.load_s
    while time.monotonic() < until:
        prompt = rng.integers(7, sizes.vocab_size, sizes.prompt // 4, dtype=np.int32)
        sampling = SamplingParams(max_tokens=sizes.before, seed=index, ignore_eos=True)
        async for _ in client.generate(prompt, sampling):
            pass


def main() -> int:
    given = arguments()
    sizes, flag = (TINY, " --tiny") if given.tiny else (SMALL, " --cpu") if given.cpu else (LARGE, "")
    rounds = [one_round(sizes, SEED + index) for index in range(sizes.rounds)]
    watched = sorted((asyncio.run(watch(sizes)) for _ in range(sizes.rounds)), key=lambda each: float(each["share"]))
    supervision = watched[len(watched) // 2]
    median = medians({name: [each[name] for each in rounds] for name in MEDIANS}, 4)
    most = {"without_weights_s": sizes.bar_s, "supervision_share": SHARE_BAR}
    least = {"host_share": HIT_BAR}
    missed = judge(median | {"supervision_share": supervision["share"]}, least=least, most=most)
    command = f"python -m benchmarks.recovery OUT.json COMMIT{flag}"
    num_gpus = int(not (given.cpu or given.tiny))
    result = Record(given.out, command, *SERVER, at_commit=given.commit, num_gpus=num_gpus)
    load = {"streams": sizes.streams, "prompt_tokens": sizes.prompt, "tokens_before": sizes.before}
    result |= {"settings": sizes.settings, "load": load, "bars": most | least, "missed": missed, "median": median}
    result |= {"supervision": supervision, "supervision_shares": [each["share"] for each in watched], "rounds": rounds}
    result.save()
    print(f"the first round: {rounds[0]['phases']}; graphs back {rounds[0]['graphs_back_s']}")
    return int(bool(missed) and not given.tiny)


def arguments() -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def one_round(sizes: Sizes, seed: int) -> dict[str, Any]:
    with serving_shape(sizes.settings, sizes.vocab_size) as server:
        found = asyncio.run(kill_once(server.url, sizes, seed))
    print(f"first new token after {found['first_new_token_s']:.2f} s", flush=True)
    return {"ready_s": round(server.ready_s, 3), **found}


if __name__ == "__main__":
    raise SystemExit(main())
