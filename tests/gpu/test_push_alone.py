"""Sums by writes into inboxes where there is a single GPU: two ranks on two streams, and as two processes that map memory of each other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiserve.kernels import reference
from hiserve.kernels.push_sum import MAX_ROWS, MAX_WORDS, Inboxes, push_add_norm, push_sum
from hiserve.runners.capture import Capture, Graph

pytestmark = pytest.mark.gpu
SHAPES = ((torch.bfloat16, 2880), (torch.float32, 96))
ROWS = (1, 128, 3, 1, 32, 8, 128, 1, 2, 64)
REPLAYS = 1_000  # of as many exchanges as there are rows
LIMIT_S = 60.0  # then nothing waits any more


class Pair:
    """Two ranks on one device. Kernels and graphs are loaded in a rehearsal: what loads one may wait for kernels that wait for it."""

    def __init__(self) -> None:
        self._boxes = torch.zeros((2, 2, 2, MAX_ROWS, MAX_WORDS), dtype=torch.int64, device="cuda")
        self._counts = torch.zeros((2, MAX_ROWS), dtype=torch.int32, device="cuda")
        self.is_ended = torch.zeros(1).int().pin_memory()
        addresses = torch.tensor([each.data_ptr() for each in self._boxes]).cuda()
        self.views = [Inboxes(addresses, self._counts[rank], self.is_ended, rank) for rank in range(2)]
        self.streams = [torch.cuda.Stream() for _ in self.views]  # type: ignore[no-untyped-call]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within, no sum waits for long, and none is right."""
        self.is_ended.fill_(1)
        yield
        self.wait()
        self.is_ended.zero_()
        self._boxes.zero_()
        self._counts.zero_()
        torch.cuda.current_stream().synchronize()

    def wait(self) -> None:
        """Waits for both."""
        for stream in self.streams:
            stream.synchronize()
        torch.cuda.current_stream().synchronize()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    timer = threading.Timer(LIMIT_S, pair.is_ended.fill_, (1,))
    timer.start()
    torch.cuda.current_stream().synchronize()
    yield pair
    timer.cancel()
    assert not pair.is_ended.any(), "a word did not come"


def test_two_streams_have_the_sums_of_both(pair: Pair) -> None:
    for dtype, columns in SHAPES:
        weight = torch.rand(columns, device="cuda").to(dtype)
        with pair.rehearsal():
            sums_of(pair, torch.ones((2, 1, columns), device="cuda").to(dtype), weight[None], weight)
        for rows in sorted({*ROWS, 127}):
            parts, residual = (torch.randn((size, rows, columns), device="cuda").to(dtype) for size in (2, 1))
            total, expected = (parts[0].float() + parts[1].float()).to(dtype), residual[0].clone()
            normed = reference.add_rms_norm(total, expected, weight, 1e-6)
            summed, streamed, out = sums_of(pair, parts, residual[0], weight)
            for rank in range(2):
                assert torch.equal(summed[rank], total) and torch.equal(streamed[rank], expected), (dtype, rows)
                torch.testing.assert_close(out[rank], normed, rtol=1e-2, atol=1e-2)
            assert torch.equal(out[0], out[1])


def sums_of(pair: Pair, parts: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum, the residual stream and its norm of each rank."""
    summed, streamed, out = parts.clone(), residual.repeat(2, 1, 1), torch.empty_like(parts)
    torch.cuda.current_stream().synchronize()
    for rank, view in enumerate(pair.views):
        with torch.cuda.stream(pair.streams[rank]):
            push_sum(summed[rank], view)
            push_add_norm(parts[rank], streamed[rank], weight, 1e-6, out[rank], view)
    pair.wait()
    return summed, streamed, out


class Loop:
    """Sums that feed each other, in a graph; the checksum keeps each bit that was ever wrong. Without a view in torch, of both ranks."""

    def __init__(self, view: Inboxes | None, rank: int) -> None:
        self._view, self._rank = view, rank
        self._weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
        self._start = (torch.arange(128 * 4096, device="cuda").view(128, 4096) % 251 / 251).bfloat16()
        self._state = self._start.clone()
        self.check = torch.zeros(1, dtype=torch.int64, device="cuda")

    def reset(self) -> None:
        """Goes back to the start."""
        self._state.copy_(self._start)
        self.check.zero_()

    def work(self) -> None:
        """Makes as many sums as there are rows."""
        for number, rows in enumerate(ROWS):
            state = self._state[:rows]
            deltas = [state * factor + self._start[:rows] for factor in (0.5, 1.5)]
            if self._view is None:
                state += (deltas[0].float() + deltas[1].float()).bfloat16()
            else:
                if number % 3 == self._rank:
                    torch.cuda._sleep(5_000)  # type: ignore[no-untyped-call]
                delta = deltas[self._rank]
                push_add_norm(delta, state, self._weight, 1e-6, torch.empty_like(delta), self._view)
            self.check.mul_(31).add_(state.view(torch.int16).sum())
            state *= 0.125


def test_graphs_lose_no_word(pair: Pair) -> None:
    loops = [Loop(view, rank) for rank, view in enumerate((*pair.views, None))]
    graphs: list[Graph] = []
    with torch.inference_mode():
        with pair.rehearsal():
            for loop in loops:
                capture = Capture(torch.device("cuda", torch.cuda.current_device()))
                with capture.on_stream():
                    loop.work()
                    graphs.append(capture.record(loop.work))
                graphs[-1].replay()
        for loop in loops:
            loop.reset()
        pair.wait()
        for _ in range(REPLAYS):
            graphs[2].replay()
            for graph, stream in zip(graphs, pair.streams, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
        pair.wait()
    checks = [int(loop.check) for loop in loops]
    assert checks[0] == checks[1] == checks[2]


def test_two_processes_map_memory_of_each_other(tmp_path: Path) -> None:
    """And the one that is left ends its wait when it is told."""
    command = (sys.executable, "-m", "tests.gpu.push_peer")
    ranks = [subprocess.Popen((*command, str(rank), str(tmp_path / "rendezvous"))) for rank in range(2)]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
