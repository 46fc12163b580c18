"""Copies of pages between device and host on CUDA, against the largest copies that pinned memory allows.

Usage: ``python -m benchmarks.kernels.copy OUT.json COMMIT``. Each figure is the median of some bursts of orders,
host clock, from the first order's start to the last one's answer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.ceilings import link_rates
from benchmarks.record import Record, gpu_parser
from hiserve.cache.storage.cuda_transfer import CudaTransfers
from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.prefault import CudaRegistrar
from hiserve.cache.storage.segment import PageLayout, Segment, SegmentLayout
from hiserve.core.digest import chain, namespace_digest
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.transfers import DEVICE_KINDS, CopyKind, PageCopy, PageRun

PAGE_SIZE = 16
MIB = 1 << 20
ORDER_BYTES = 64 * MIB
SMALL_ORDER_BYTES = 4 * MIB
NUM_BURSTS = 5
BARS = {"llama-8b": 0.90, "nano": 0.80}
NAMESPACE = namespace_digest("copies")


def group(num_layers: int, num_kv_heads: int, head_dim: int) -> CacheGroupSpec:
    return CacheGroupSpec(
        name="kv", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16"
    )


SHAPES = {"llama-8b": group(32, 8, 128), "nano": group(8, 2, 64)}  # 2 MiB and 64 KiB a page


def ceiling() -> dict[str, float]:
    rates = link_rates(256 * MIB)
    return {"load": rates["pinned_to_device_bytes_per_s"], "offload": rates["device_to_pinned_bytes_per_s"]}


class Bench:
    """Pools of one shape and an engine between them; ``start_s`` are the caller's seconds for each ``start`` of the last burst."""

    def __init__(self, spec: CacheGroupSpec, num_bytes: int) -> None:
        self.page_bytes = PageLayout((spec,), PAGE_SIZE).page_bytes
        self.num_pages = num_bytes // self.page_bytes
        self.segment = Segment.anonymous(SegmentLayout(NAMESPACE, PAGE_SIZE, self.page_bytes, self.num_pages + 1))
        self.host = HostPool(self.segment, (spec,), registrar=CudaRegistrar(0), max_checksum_bytes_per_s=1)
        self.host.clear()
        assert self.host.prefault.wait(self.num_pages + 1, 120), self.host.prefault.failure
        self.device = DevicePool((spec,), self.num_pages + 1, PAGE_SIZE, "cuda")
        self.device.storage("kv").view(torch.int16).random_()
        torch.cuda.synchronize()
        self.engine = CudaTransfers(
            self.device,
            self.host,
            max_queued_bytes=1 << 40,
            max_offload_bytes_per_s=1e15,
        )
        self.start_s: list[float] = []
        self._op = 0
        self._rng = np.random.default_rng(7)

    def orders(self, kind: CopyKind, order_bytes: int, *, adjacent: bool = False) -> list[PageCopy]:
        """Orders that copy every page once."""
        pages = np.arange(1, self.num_pages + 1, dtype=np.int32)
        ours, theirs = self._rng.permutation(pages), pages if adjacent else self._rng.permutation(pages)
        size = max(1, order_bytes // self.page_bytes)
        return [self._order(kind, ours[i : i + size], theirs[i : i + size]) for i in range(0, self.num_pages, size)]

    def _order(self, kind: CopyKind, ours: np.ndarray, theirs: np.ndarray) -> PageCopy:
        self._op += 1
        run = None
        if kind is CopyKind.OFFLOAD:
            key = np.full(ours.size * PAGE_SIZE, self._op, dtype=np.int32).tobytes()
            run = PageRun(theirs, NAMESPACE, NAMESPACE, chain(NAMESPACE, key, PAGE_SIZE), key)
        return PageCopy(self._op, kind, ours, theirs, 0, run)

    def burst(self, copies: list[PageCopy]) -> float:
        begin = time.perf_counter()
        self.start_s = []
        for copy in copies:
            before = time.perf_counter()
            self.engine.start(copy)
            self.start_s.append(time.perf_counter() - before)
        acks = []
        while len(acks) < len(copies):
            acks += self.engine.poll(1.0)
        seconds = time.perf_counter() - begin
        assert all(ack.is_ok for ack in acks)
        stored = [copy.host_pages for copy in copies if copy.kind is CopyKind.OFFLOAD]
        if stored:
            self.host.free(np.concatenate(stored))
        return seconds

    def rate(self, make: Callable[[], list[PageCopy]]) -> float:
        rates = []
        for _ in range(NUM_BURSTS + 1):
            copies = make()
            rates.append(sum(copy.device_pages.size for copy in copies) * self.page_bytes / self.burst(copies))
        return statistics.median(rates[1:])


@contextmanager
def bench(spec: CacheGroupSpec, num_bytes: int) -> Iterator[Bench]:
    made = Bench(spec, num_bytes)
    try:
        yield made
    finally:
        made.engine.close()
        made.host.close()
        made.segment.close()


def forwards(num_steps: int = 20) -> Callable[[], list[float]]:
    """Returns what runs and times graphs that read 1 GiB of weights each, as decoding does: milliseconds a step."""
    weights = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.mm(x, weight)

    def run() -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(events)]

    run()
    return run


def slowdown(subject: Bench) -> dict[str, float]:
    """Time of a step while loads, or stores, run all the time, over its time alone."""
    run = forwards()
    alone = statistics.median(run())
    result = {"alone_ms": alone}
    for kind in DEVICE_KINDS:
        copies = subject.orders(kind, ORDER_BYTES)
        for copy in copies:
            subject.engine.start(copy)
        acks = subject.engine.poll(1.0)  # they are under way
        result[kind.name.lower()] = statistics.median(run()) / alone
        acks += subject.engine.poll()
        result[f"{kind.name.lower()}_orders_left"] = len(copies) - len(acks)  # 0: the copies ended before the steps
        while len(acks) < len(copies):
            acks += subject.engine.poll(1.0)
        if kind is CopyKind.OFFLOAD:
            subject.host.free(np.concatenate([copy.host_pages for copy in copies]))
    return result


def measure_shape(subject: Bench, limits: dict[str, float]) -> dict[str, Any]:
    """Both directions, pages anywhere and adjacent, large and small orders, both at once, and what callers pay."""
    figures: dict[str, Any] = {"page_bytes": subject.page_bytes}
    for kind in DEVICE_KINDS:
        name = kind.name.lower()
        for label, order_bytes, adjacent in (
            ("anywhere", ORDER_BYTES, False),
            ("adjacent", ORDER_BYTES, True),
            ("anywhere_small_orders", SMALL_ORDER_BYTES, False),
        ):
            rate = subject.rate(lambda: subject.orders(kind, order_bytes, adjacent=adjacent))  # noqa: B023
            figures[f"{name}_{label}"] = {"bytes_per_s": rate, "of_ceiling": rate / limits[name]}
        figures[f"{name}_start_us"] = statistics.median(subject.start_s) * 1e6
        figures[f"{name}_pages_per_start"] = max(1, SMALL_ORDER_BYTES // subject.page_bytes)
    both = subject.rate(lambda: [copy for kind in DEVICE_KINDS for copy in subject.orders(kind, ORDER_BYTES)])
    figures["both_at_once"] = {"bytes_per_s": both, "of_ceiling": both / sum(limits.values())}
    figures["step_slowdown"] = slowdown(subject)
    return figures


def main() -> int:
    given = gpu_parser(__doc__).parse_args()
    assert not given.tiny, "copies of CUDA have no twin on the CPU"
    result = Record.of(given, "python -m benchmarks.kernels.copy OUT.json COMMIT", "hiserve/cache/storage")
    limits = ceiling()
    result |= {"ceiling_bytes_per_s": limits, "bars": BARS, "shapes": {}, "is_within_bars": True}
    for name, spec in SHAPES.items():
        with bench(spec, 4096 * MIB) as subject:
            figures = result["shapes"][name] = measure_shape(subject, limits)
        print(name, json.dumps(figures, indent=1), flush=True)
        rates = [figures[f"{kind.name.lower()}_anywhere"]["of_ceiling"] for kind in DEVICE_KINDS]
        result["is_within_bars"] &= min(rates) >= BARS[name]
        result.save()
    print("ceiling", limits, "within bars:", result["is_within_bars"])
    return 0 if result["is_within_bars"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
