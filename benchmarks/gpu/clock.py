"""How work of a device is timed: by its events, in graphs where launches would take longer than the work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_s(device: str, work: Callable[[], object], repeats: int) -> float:
    """Median seconds of some work after a first time that does not count: by events on a CUDA device, else by the clock."""
    work()
    if device == "cpu":
        return statistics.median(clocked(work) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def host_s(work: Callable[[], object]) -> float:
    """Median seconds of the host until some work for the device is done, which takes the device less."""

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    whole()
    return statistics.median(clocked(whole) for _ in range(5))


def clocked(work: Callable[[], object]) -> float:
    """Seconds by the clock."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def recorded(work: Callable[[], object]) -> Callable[[], None]:
    """Runs some work once, captures it, and returns what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # what it compiles and allocates first is no part of the graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
