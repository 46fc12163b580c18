"""Enqueues copies of pages, in one direction, on CUDA streams.

A page is one piece on the host and many on the device. Large pages go through staging memory on the device:
one launch gathers or scatters their pieces there, and the copy engine moves whole pages, or whole runs of
adjacent ones. Small pages would cost the copy engine more time each than their bytes do: for them a kernel
reads and writes the host's memory by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hiserve.cache.pools.device import DevicePool
from hiserve.cache.pools.host import HostPool
from hiserve.core.copies import CopyKind, PageCopy
from hiserve.core.plan import Int32Array
from hiserve.kernels.page_copy import copy_pages, word_type

_NUM_LANES = 2  # while the copy engine is busy in one, the other gathers or scatters
_STAGING_PROGRAMS = 64  # far from the device's bandwidth, well above the link's
_DIRECT_PROGRAMS = 32  # enough bytes in flight for the link; forwards keep the other multiprocessors


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """A stream and its own staging memory, uint8 ``[n, page_bytes]``. Its order is all that guards the memory."""

    stream: torch.cuda.Stream
    staging: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A copy that is on its way.

    Attributes:
        copy: The order.
        begin: Recorded when its waits are over.
        ends: All of them recorded: it has arrived.
    """

    copy: PageCopy
    begin: torch.cuda.Event
    ends: tuple[torch.cuda.Event, ...]

    @property
    def has_arrived(self) -> bool:
        """Asks the device; waits for nothing."""
        return all(end.query() for end in self.ends)  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """Time on the device; of a copy that has arrived."""
        milliseconds: float = max(self.begin.elapsed_time(end) for end in self.ends)
        return milliseconds / 1e3


class PageStreams:
    """The streams of one direction. Used by one thread, whose current device is the pools'.

    Args:
        device: The device pool.
        host: The host pool, pinned and mapped.
        kind: The direction.
        staging_bytes: Staging memory on the device; at least a page for each of two lanes is taken.
        max_direct_page_bytes: Pages up to this size are copied by a kernel.
    """

    def __init__(
        self, device: DevicePool, host: HostPool, kind: CopyKind, *, staging_bytes: int, max_direct_page_bytes: int
    ) -> None:
        self._device = device
        self._host = host
        self._kind = kind
        self._is_direct = host.layout.page_bytes <= max_direct_page_bytes
        self._pages_per_lane = max(1, staging_bytes // _NUM_LANES // host.layout.page_bytes)
        rows = 0 if self._is_direct else self._pages_per_lane
        self._lanes = [self._lane(rows) for _ in range(1 if self._is_direct else _NUM_LANES)]

    def _lane(self, num_rows: int) -> _Lane:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # the memory is this stream's from the start: nobody else may still use it
            staging = torch.empty((num_rows, self._host.layout.page_bytes), dtype=torch.uint8, device="cuda")
        return _Lane(stream, staging)

    def compile(self) -> None:
        """Compiles what ``begin`` launches, so that the first copy need not wait for it."""
        lane = self._lanes[0]
        with torch.cuda.stream(lane.stream):
            self._move(self._far_side(lane), torch.empty((2, 0), dtype=torch.int32, device="cuda"))

    def begin(self, copy: PageCopy, fence: torch.cuda.Event | None) -> Flight:
        """Enqueues a copy behind an event and everything enqueued before. Waits for nothing."""
        order = np.argsort(copy.host_pages, kind="stable")  # so that adjacent pages make runs
        ours, theirs = copy.device_pages[order], copy.host_pages[order]
        step = ours.size if self._is_direct else self._pages_per_lane
        chunks = range(0, ours.size, step)
        lanes = self._lanes[: len(chunks)]
        begin = _event()
        for number, lane in enumerate(lanes):
            if fence is not None:
                lane.stream.wait_event(fence)
            if number == 0:
                begin.record(lane.stream)
        for number, start in enumerate(chunks):
            lane = lanes[number % len(lanes)]
            chunk = slice(start, start + step)
            with torch.cuda.stream(lane.stream):
                self._enqueue(lane, ours[chunk], theirs[chunk])
        ends = tuple(_event() for _ in lanes)
        for lane, end in zip(lanes, ends, strict=True):
            end.record(lane.stream)
        return Flight(copy, begin, ends)

    def drain(self) -> None:
        """Blocks until everything enqueued is done."""
        for lane in self._lanes:
            lane.stream.synchronize()

    def _enqueue(self, lane: _Lane, ours: Int32Array, theirs: Int32Array) -> None:
        if self._is_direct:
            self._move(self._far_side(lane), _upload(ours, theirs))
            return
        indices = _upload(ours, np.arange(ours.size, dtype=np.int32))
        if self._kind is CopyKind.STORE:
            self._move(lane.staging, indices)
        for row, end_row, page in self._runs(theirs):
            staged, pinned = lane.staging[row:end_row], self._host.span(page, page + end_row - row)
            if self._kind is CopyKind.LOAD:
                staged.copy_(pinned, non_blocking=True)
            else:
                pinned.copy_(staged, non_blocking=True)
        if self._kind is CopyKind.LOAD:
            self._move(lane.staging, indices)

    def _far_side(self, lane: _Lane) -> Tensor:
        """What the kernel copies to or from, uint8 ``[n, page_bytes]``."""
        return self._host.span(0, self._host.num_pages) if self._is_direct else lane.staging

    def _move(self, pages: Tensor, indices: Tensor) -> None:
        """Launches one kernel a group."""
        layout = self._host.layout
        for group in layout.groups:
            piece_bytes = layout.piece_bytes(group)
            words = word_type(piece_bytes)
            start = int(layout.offsets[group.name][0, 0])
            num_planes = 2 * group.num_layers
            planes = self._device.storage(group.name).view(num_planes, -1).view(words)
            copy_pages(
                planes.view(num_planes, -1, piece_bytes // words.itemsize),
                pages[:, start : start + num_planes * piece_bytes].view(words),
                indices,
                to_planes=self._kind is CopyKind.LOAD,
                max_programs=_DIRECT_PROGRAMS if self._is_direct else _STAGING_PROGRAMS,
            )

    def _runs(self, pages: Int32Array) -> Iterator[tuple[int, int, int]]:
        """Yields first row, end row and first page of each run of adjacent pages within one pinned piece."""
        is_cut = (np.diff(pages) != 1) | (pages[1:] % self._host.touch.pages_per_piece == 0)
        edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), pages.size]
        for row, end_row in pairwise(edges):
            yield row, end_row, int(pages[row])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _upload(ours: Int32Array, theirs: Int32Array) -> Tensor:
    """Copies page numbers to the device, int32 ``[2, n]``; torch keeps the pinned memory until they are there."""
    return torch.from_numpy(np.stack((ours, theirs))).pin_memory().to("cuda", non_blocking=True)
