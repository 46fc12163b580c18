"""Sums of two GPUs with the norm behind them, by writes into each other's memory against NCCL and the norm's own launch.

Usage: ``python -m benchmarks.kernels.exchange OUT.json COMMIT`` on two CUDA devices that map each other's memory. Each figure is the median
microseconds of an exchange in a graph of 40, of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.record import Record, judge
from hiserve.core.devices import environment_with
from hiserve.distributed.collectives import Collectives
from hiserve.distributed.shard import Shard
from hiserve.kernels import fused
from hiserve.runners.capture import Capture, Graph

ROWS = (1, 8, 32, 64, 128)
COLUMNS = 4096
PER_GRAPH, REPLAYS, REPEATS = 40, 20, 15
BARS = {1: 0.55, 32: 0.6, 128: 0.75}  # of NCCL's time, by rows
DEVICE = torch.device("cuda", 0)


def main() -> int:
    """Writes the result file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.rank, given.out)
        return 0
    command = "python -m benchmarks.kernels.exchange OUT.json COMMIT"
    result = Record(given.out, command, "hiserve/kernels", "hiserve/distributed", at_commit=given.commit, num_gpus=2)
    first, second = run_ranks(given.commit)
    result["times_us"] = {case: max(first[case], second[case]) for case in first}
    result["shares"] = {
        f"{rows} rows": result["times_us"][f"push {rows}"] / result["times_us"][f"nccl {rows}"] for rows in ROWS
    }
    result["bars"] = {f"{rows} rows": bar for rows, bar in BARS.items()}
    result.save()
    for case, microseconds in result["times_us"].items():
        print(f"{case:<12} {microseconds:8.2f} us", flush=True)
    return int(bool(judge(result["shares"], most=result["bars"])))


def run_ranks(commit: str) -> list[dict[str, float]]:
    """Returns the times that each of two ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [
            subprocess.Popen(
                (sys.executable, "-m", "benchmarks.kernels.exchange", rendezvous, commit, "--rank", str(rank)),
                stdout=subprocess.PIPE,
                text=True,
                env=environment_with(devices),
            )
            for rank, devices in enumerate(((0, 1), (1,)))
        ]
        return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def measure(rank: int, rendezvous: Path) -> None:
    """Prints the times of one rank."""
    torch.cuda.set_device(DEVICE)
    exchange = Collectives(Shard(rank, 2), DEVICE, rendezvous, may_push=True)
    assert exchange._push is not None, "devices do not map each other's memory"
    times: dict[str, float] = {}
    for rows in ROWS:
        for name in ("push", "nccl", "norm"):
            graph = capture(exchange, name, rows)
            samples = []
            for _ in range(REPEATS):
                exchange.sum(torch.zeros((256, COLUMNS), device=DEVICE))  # both begin alike
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
                end.synchronize()
                samples.append(1e3 * begin.elapsed_time(end) / (REPLAYS * PER_GRAPH))
            times[f"{name} {rows}"] = statistics.median(samples)
    print(json.dumps(times), flush=True)
    exchange.sum(torch.zeros((256, COLUMNS), device=DEVICE))
    torch.cuda.synchronize()
    os._exit(0)


def capture(exchange: Collectives, name: str, rows: int) -> Graph:
    """Returns a graph of exchanges of one kind."""
    delta, residual = (torch.zeros((rows, COLUMNS), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    weight = torch.ones(COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    kept: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(PER_GRAPH):
            if name == "push":
                kept.append(exchange.reduce_add_norm(delta, residual, weight, 1e-6))
            else:
                if name == "nccl":
                    exchange._all_reduce(delta)
                kept.append(fused.add_rms_norm(delta, residual, weight, 1e-6))
        kept.clear()

    recorder = Capture(DEVICE, exchange)
    with recorder.on_stream(), torch.inference_mode():
        work()
        return recorder.record(work)


if __name__ == "__main__":
    raise SystemExit(main())
