"""One rank of two that sum by writes into each other's memory: what ``test_push.py`` starts twice and compares.

Usage: ``python -m tests.gpu.push_rank RANK RENDEZVOUS``. Prints one JSON object. Sums of two ranks have the bits of NCCL's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiserve.distributed.collectives import Collectives
from hiserve.distributed.shard import Shard
from hiserve.kernels import fused
from hiserve.runners.capture import Capture, Graph

DEVICE = torch.device("cuda", 0)
SIZES = (1, 2, 7, 32, 127, 128)  # rows
SHAPES = ((torch.bfloat16, 4096), (torch.bfloat16, 2880), (torch.float16, 96), (torch.float32, 4096))
LOOP_ROWS = (1, 128, 3, 1, 32, 8, 128, 1, 2, 64)
REPLAYS, PER_GRAPH = 2_500, 40  # 100,000 exchanges
MIXED = 100  # launches of as many, of which one rank replays a graph
ABORT_S = 5.0


def sums(exchange: Collectives) -> dict[str, Any]:
    """Sums and norms of each shape against NCCL's; more rows go there."""
    found: dict[str, Any] = {}
    for dtype, columns in SHAPES:
        weight = torch.rand(columns, dtype=dtype, device=DEVICE)
        torch.manual_seed(3)
        for rows in (*SIZES, 129):
            x, residual, expected = (torch.randn((rows, columns), dtype=dtype, device=DEVICE) for _ in range(3))
            x *= 1 + 0.37 * exchange.shard.rank
            expected.copy_(residual)
            total = x.clone()
            exchange._all_reduce(total)
            summed = exchange.sum(x.clone())
            normed = exchange.reduce_add_norm(x.clone(), residual, weight, 1e-6)
            reference = fused.add_rms_norm(total, expected, weight, 1e-6)
            torch.testing.assert_close(normed, reference, rtol=1e-2, atol=1e-3)
            assert torch.equal(summed, total) and torch.equal(residual, expected), (rows, columns, dtype)
            assert exchange._push is not None and exchange._push.takes(x) == (rows <= 128)
            found[f"{rows} x {columns} {dtype}"] = [checksum(each) for each in (summed, residual, normed)]
    return found


class Loop:
    """Exchanges that feed each other, of changing sizes; checksums keep each bit that was ever wrong."""

    def __init__(self, exchange: Collectives, *, is_pushed: bool, naps: bool) -> None:
        self._exchange, self._is_pushed = exchange, is_pushed
        self._factor = 0.5 + exchange.shard.rank
        self._weight = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
        self._naps = np.random.default_rng(exchange.shard.rank).random(PER_GRAPH) < 0.2 * naps
        rows = torch.arange(128 * 4096, device=DEVICE).view(128, 4096)
        self._state = (rows % 251 / 251).bfloat16()
        self._residual = self._state.clone()
        self.checks = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def work(self) -> None:
        for number in range(PER_GRAPH):
            rows = LOOP_ROWS[number % len(LOOP_ROWS)]
            residual = self._residual[:rows]
            delta = residual * self._factor + self._state[:rows]
            if self._naps[number]:
                torch.cuda._sleep(20_000)  # type: ignore[no-untyped-call]
            if self._is_pushed:
                normed = self._exchange.reduce_add_norm(delta, residual, self._weight, 1e-6)
            else:
                self._exchange._all_reduce(delta)
                normed = fused.add_rms_norm(delta, residual, self._weight, 1e-6)
            self.checks *= 31
            self.checks[0] += residual.view(torch.int16).sum()
            self.checks[1] += normed.view(torch.int16).sum()
            residual *= 0.125

    def graph(self) -> Graph:
        capture = Capture(DEVICE, self._exchange)
        with capture.on_stream(), torch.inference_mode():
            self.work()
            return capture.record(self.work)


def many(exchange: Collectives) -> dict[str, Any]:
    """Graphs with random delays, against NCCL."""
    found: dict[str, Any] = {}
    for is_pushed in (True, False):
        loop = Loop(exchange, is_pushed=is_pushed, naps=is_pushed)
        graph, delays = loop.graph(), np.random.default_rng(10 + exchange.shard.rank)
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            if is_pushed and delays.random() < 0.1:
                torch.cuda._sleep(int(delays.integers(0, 200_000)))  # type: ignore[no-untyped-call]
            graph.replay()
        torch.cuda.current_stream().synchronize()
        found["push" if is_pushed else "nccl"] = loop.checks.tolist()
        found[f"{is_pushed} s"] = time.perf_counter() - begin
    return found


def mixed(exchange: Collectives) -> dict[str, Any]:
    """One rank replays a graph, while the other launches the same exchanges one by one."""
    loop = Loop(exchange, is_pushed=True, naps=False)
    graph = loop.graph()
    launch: Callable[[], None] = graph.replay if exchange.shard.rank else loop.work
    with torch.inference_mode():
        for _ in range(MIXED):
            launch()
    torch.cuda.current_stream().synchronize()
    return {"checks": loop.checks.tolist()}


def left_alone(exchange: Collectives, x: Tensor) -> dict[str, Any]:
    """The other rank has ended; a sum that waits for it ends when this one is told."""
    exchange.sum(x)
    time.sleep(0.5)
    waited = not is_idle()
    begin = time.perf_counter()
    exchange.abort()
    while not is_idle() and time.perf_counter() < begin + ABORT_S:
        time.sleep(0.001)
    return {"waited": waited, "ended": is_idle(), "s": time.perf_counter() - begin}


def is_idle() -> bool:
    """Whether all launches have ended."""
    return bool(torch.cuda.current_stream().query())


def checksum(x: Tensor) -> int:
    """Returns a number of the bits of a tensor."""
    return int(x.view(torch.uint8).flatten().long().mul(torch.arange(1, 1 + x.nbytes, device=DEVICE)).sum())


def main(rank: int, rendezvous: Path) -> None:
    """Runs all parts."""
    torch.cuda.set_device(DEVICE)
    exchange = Collectives(Shard(rank, 2), DEVICE, rendezvous, may_push=True)
    assert exchange._push is not None, "devices do not map each other's memory"
    found = {"sums": sums(exchange), "mixed": mixed(exchange), "many": many(exchange)}
    x = torch.ones((4, 4096), dtype=torch.bfloat16, device=DEVICE)
    exchange.sum(x.clone())
    torch.cuda.current_stream().synchronize()
    if rank:
        found["alone"] = {}
    else:
        time.sleep(2.0)  # the other rank is gone
        found["alone"] = left_alone(exchange, x)
    print(json.dumps(found), flush=True)
    os._exit(0)  # NCCL would wait for the rank that is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
