"""Streams and events without a GPU: what is enqueued runs later, in any order that streams and events allow.

So an order that only luck kept is found. Memory of the device is the CPU's.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve.cache.storage import cuda_transfer, page_streams


class Done:
    """Whether what was recorded has run."""

    def __init__(self, is_over: bool = False) -> None:
        self.is_over = is_over


class Stream:
    """Runs what is enqueued, first to last; ``log`` of the device has what has run."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.cuda_stream = len(device.streams)
        self.ops: deque[tuple[str, Callable[[], object], Done]] = deque()
        device.streams.append(self)

    def enqueue(self, what: str, work: Callable[[], object], after: Done | None = None) -> None:
        self._device.num_calls += 1
        self.ops.append((what, work, after or Done(is_over=True)))

    def wait_event(self, event: Event) -> None:
        self.enqueue("wait", lambda: None, after=event.recorded)

    def synchronize(self) -> None:
        while self.ops:
            self._device.run(1)


class Event:
    """Of the latest ``record``, as CUDA's."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.recorded = Done(is_over=True)

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = done = Done()
        (stream or self._device.current).enqueue("record", lambda: setattr(done, "is_over", True))

    def synchronize(self) -> None:
        self._device.run()

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class FakeCuda:
    """A device, and what ``page_streams`` and ``cuda_transfer`` know of torch.

    Args:
        seed: Of the order in which streams run.

    Attributes:
        log: What has run: number of the stream, and what it was.
        num_calls: What was enqueued: launches, copies, records and waits.
        runs: What the copy engine was told: target, source, bytes.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.streams: list[Stream] = []
        self.log: list[tuple[int, str]] = []
        self.num_calls = 0
        self.runs: list[tuple[int, int, int]] = []
        self._of_thread = threading.local()
        self.default = Stream(self)
        self.cuda = SimpleNamespace(
            Stream=lambda: Stream(self),
            Event=lambda **options: Event(self),
            stream=self._on,
            current_stream=lambda: self.default,
            current_device=lambda: 0,
            set_device=lambda index: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: str, **options: Any) -> Tensor:
        return torch.empty(*shape, **options)

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._of_thread, "stream", self.default)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        yield
        self._of_thread.stream = before

    def run_until(self, event: Event) -> None:
        """Runs what is enqueued, in any order, until an event was recorded."""
        while not event.recorded.is_over:
            self.run(1)

    def run(self, most: int = 1 << 30) -> None:
        """Runs up to so many ops; all, if no more is said."""
        with self._lock:
            while most and (ready := [each for each in list(self.streams) if each.ops and each.ops[0][2].is_over]):
                stream = self._rng.choice(ready)
                what, work, _ = stream.ops.popleft()
                work()
                self.log.append((stream.cuda_stream, what))
                most -= 1


def install(patch: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Puts a device in the place of CUDA."""

    class Moves:
        """As ``PreparedCopy``, enqueued on the current stream."""

        def __init__(self, planes: Tensor, pages: Tensor, *, to_planes: bool, max_programs: int) -> None:
            self._planes, self._pages, self._to_planes = planes, pages, to_planes

        def __call__(self, indices: Tensor) -> None:
            device.current.enqueue("kernel", lambda: self._move(*indices.long()))

        def _move(self, ours: Tensor, rows: Tensor) -> None:
            planes, pages = self._planes, self._pages
            if self._to_planes:
                planes[:, ours] = pages[rows].view(len(rows), len(planes), planes.shape[2]).transpose(0, 1)
            else:
                pages[rows] = planes[:, ours].transpose(0, 1).reshape(len(rows), pages.shape[1])

    class Engine:
        """As ``CopyEngine``."""

        def copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
            runs = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
            assert runs and all(num_bytes > 0 for _, _, num_bytes in runs), runs
            device.runs += runs
            device.streams[stream].enqueue("cross", lambda: [ctypes.memmove(*run) for run in runs])

    def upload(self: object, *both: np.ndarray) -> Tensor:
        return torch.from_numpy(np.stack(both))

    patch.setattr(page_streams, "torch", device)
    patch.setattr(cuda_transfer, "torch", device)
    patch.setattr(page_streams, "PreparedCopy", Moves)
    patch.setattr(page_streams, "copy_pages", lambda *views, **how: Moves(*views[:2], **how)(views[2]))
    patch.setattr(page_streams, "CopyEngine", Engine)
    patch.setattr(page_streams.PageStreams, "_upload", upload)
