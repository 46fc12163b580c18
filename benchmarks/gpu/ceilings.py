"""The best rates of this machine, measured in the run whose figures are compared with them.

``python -m benchmarks.gpu.ceilings`` prints them. Work of the device is timed by its events, in graphs where launches would
take longer than the work.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

MIB = 1 << 20
NUM_NODES = 1000


def measure(device: str) -> dict[str, float]:
    """Returns copy and matmul rates; on a CUDA device also those of pinned memory and what launches cost.

    Copies count what they read and what they write; products and sums are two operations.
    """
    if device == "cpu":
        return {"copy_bytes_per_s": copy_rate(device, 64 * MIB), "matmul_flop_per_s": matmul_rate(device, 512)}
    found = {"copy_bytes_per_s": copy_rate(device, 8192 * MIB), "matmul_flop_per_s": matmul_rate(device, 8192)}
    found |= link_rates(512 * MIB) | launch_costs()
    torch.cuda.empty_cache()
    return found


def copy_rate(device: str, num_bytes: int) -> float:
    """Bytes per second of one large copy within the device, read and written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(device, lambda: target.copy_(source), 10)


def matmul_rate(device: str, size: int) -> float:
    """Operations per second of a square product of random matrices, bfloat16 on a CUDA device."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_s(device, lambda: torch.mm(a, b, out=out), 40)


def link_rates(num_bytes: int) -> dict[str, float]:
    """Bytes per second between pinned memory and the device: each way alone, and both at once, added up."""
    device = torch.randint(0, 255, (2, num_bytes), dtype=torch.uint8, device="cuda")
    host = torch.empty((2, num_bytes), dtype=torch.uint8, pin_memory=True).copy_(device)
    other = torch.cuda.Stream()

    def load() -> None:
        device[0].copy_(host[0], non_blocking=True)

    def store() -> None:
        host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            store()
        load()
        torch.cuda.current_stream().wait_stream(other)

    return {
        "pinned_to_device_bytes_per_s": num_bytes / median_s("cuda", load, 5),
        "device_to_pinned_bytes_per_s": num_bytes / median_s("cuda", store, 5),
        "pinned_both_ways_bytes_per_s": 2 * num_bytes / median_s("cuda", both, 5),
    }


def launch_costs() -> dict[str, float]:
    """Seconds of a kernel that does nothing: as a node of a graph, launched by Triton, and a small one launched by torch."""
    import triton  # noqa: PLC0415 - a machine without GPUs has none, and its memory is measured here too

    @triton.jit
    def nothing(pointer):  # type: ignore[no-untyped-def]
        """Does nothing, on one program."""

    small = torch.zeros(1, device="cuda")

    def by_triton() -> None:
        for _ in range(NUM_NODES):
            nothing[(1,)](small)

    def by_torch() -> None:
        for _ in range(NUM_NODES):
            small.add_(1)

    return {
        "graph_node_s": median_s("cuda", recorded(by_triton), 20) / NUM_NODES,
        "triton_launch_s": host_s(by_triton) / NUM_NODES,
        "torch_launch_s": host_s(by_torch) / NUM_NODES,
    }


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


if __name__ == "__main__":
    print(json.dumps(measure("cuda" if torch.cuda.is_available() else "cpu"), indent=1))
