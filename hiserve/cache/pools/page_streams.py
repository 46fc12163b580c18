"""Enqueues copies of pages, in one direction, on CUDA streams.

A page is one piece on the host and many on the device. Large pages go through staging memory on the device:
one launch gathers or scatters their pieces there, and the copy engine moves whole pages, or whole runs of
adjacent ones. Small pages would cost the copy engine more time each than their bytes do: for them a kernel
reads and writes the host's memory by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.cache.pools.copy_engine import CopyEngine
from hiserve.cache.pools.device import DevicePool
from hiserve.cache.pools.host import HostPool
from hiserve.core.copies import CopyKind, PageCopy
from hiserve.core.groups import CacheGroupSpec
from hiserve.core.plan import Int32Array
from hiserve.kernels.page_copy import copy_pages, word_type

_NUM_SLOTS = 2  # while the copy engine is busy with one, the other is gathered or scattered
_STAGING_PROGRAMS = 64  # far from the device's bandwidth, well above the link's
# Few: a store that saturates the link stalls every other access to memory. On an H200, 64 KiB pages, a step that
# reads weights took 1.06 times as long beside loads of 8 programs, 1.10 beside stores of 3, 3.4 beside stores of 8.
_DIRECT_PROGRAMS = {CopyKind.LOAD: 8, CopyKind.STORE: 3}


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A copy that is on its way.

    Attributes:
        copy: The order.
        begin: Recorded when its waits are over.
        end: Recorded when it has arrived.
        layers: Recorded when all up to a layer has; one for each, or none where the whole came at once.
    """

    copy: PageCopy
    begin: torch.cuda.Event
    end: torch.cuda.Event
    layers: tuple[torch.cuda.Event, ...] = ()

    def end_of(self, layer: int | None) -> torch.cuda.Event:
        """Returns the event of a layer; that of the whole for None, or where layers have none."""
        return self.end if layer is None or not self.layers else self.layers[layer]

    @property
    def seconds(self) -> float:
        """Time on the device; of a copy that has arrived."""
        milliseconds: float = self.begin.elapsed_time(self.end)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Staging memory, uint8 ``[n, page_bytes]``.

    Attributes:
        filled: Recorded when the first stream has written it.
        drained: Recorded when the last stream has read it.
    """

    memory: Tensor
    filled: torch.cuda.Event
    drained: torch.cuda.Event


class PageStreams:
    """The streams of one direction. Used by one thread at a time, whose current device is the pools'.

    Large pages take two streams, so that the copy engine never waits for a kernel: the first fills staging
    memory, the last drains it. For small pages both are the same. Between two pieces of staging memory others have their
    turn at the copy engine.

    Args:
        device: The device pool.
        host: The host pool, pinned and mapped.
        kind: The direction.
        staging_bytes: Staging memory on the device; at least two pages are taken.
        max_direct_page_bytes: Pages up to this size are copied by a kernel.
        min_layer_bytes: Loads by a kernel may go layer by layer where each layer has at least this much.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        kind: CopyKind,
        *,
        staging_bytes: int,
        max_direct_page_bytes: int,
        min_layer_bytes: int,
    ) -> None:
        self._device = device
        self._host = host
        self._kind = kind
        page_bytes = host.layout.page_bytes
        self._pages_per_slot = max(1, staging_bytes // _NUM_SLOTS // page_bytes)
        self._min_layer_bytes = min_layer_bytes
        self._copy_engine = CopyEngine()
        self._others = _stream()
        self._passed, self._returned = _event(), _event()
        self._first = self._last = _stream()
        self._slots: deque[_Slot] = deque()
        if page_bytes > max_direct_page_bytes:
            self._last = _stream()
            with torch.cuda.stream(self._first):  # its memory from the start: nobody else may still use it
                for _ in range(_NUM_SLOTS):
                    memory = torch.empty((self._pages_per_slot, page_bytes), dtype=torch.uint8, device="cuda")
                    self._slots.append(_Slot(memory, _event(), _event()))

    def compile(self) -> None:
        """Compiles what ``begin`` launches, so that the first copy need not wait for it. No host page need be ready yet."""
        nothing = np.empty(0, dtype=np.int32)
        with torch.cuda.stream(self._kernels):
            page = torch.empty((1, self._host.layout.page_bytes), dtype=torch.uint8, device="cuda")
        self._move(page, self._upload(nothing, nothing))
        if not self._slots and self._kind is CopyKind.LOAD:
            self._move_by_layer(page, nothing, nothing)

    def begin(
        self,
        copy: PageCopy,
        fence: torch.cuda.Event | None,
        pace: Callable[[torch.cuda.Event], None],
        *,
        by_layer: bool = False,
    ) -> Flight:
        """Enqueues a copy behind an event and everything enqueued before.

        Args:
            copy: The order.
            fence: What must be done before.
            pace: Called with what a piece of staging memory waits for, before more is enqueued behind it.
            by_layer: A forward will wait for each layer of the load; it is slower so, by a third with small pages.
        """
        order = np.argsort(copy.host_pages, kind="stable")  # so that adjacent pages make runs
        ours, theirs = copy.device_pages[order], copy.host_pages[order]
        begin, end = _event(timed=True), _event(timed=True)
        layers: tuple[torch.cuda.Event, ...] = ()
        if fence is not None:
            self._first.wait_event(fence)
        begin.record(self._first)
        if self._slots:
            indices = self._upload(ours, np.arange(ours.size, dtype=np.int32) % self._pages_per_slot)
            for start in range(0, ours.size, self._pages_per_slot):
                end_page = start + self._pages_per_slot
                pace(self._slots[0].drained)
                self._enqueue(indices[:, start:end_page], theirs[start:end_page])
        elif by_layer and ours.size * self._layer_bytes() >= self._min_layer_bytes:
            layers = self._move_by_layer(self._all_pages(), ours, theirs)
        else:
            self._move(self._all_pages(), self._upload(ours, theirs))
        end.record(self._last)
        return Flight(copy, begin, end, layers)

    def drain(self) -> None:
        """Waits until nothing that was enqueued runs any more."""
        for stream in (self._first, self._last):
            stream.synchronize()

    def _enqueue(self, indices: Tensor, theirs: Int32Array) -> None:
        """Copies at most as many pages as a slot has room for; ``indices`` names them on the device and in the slot."""
        slot = self._slots[0]
        self._slots.rotate()
        self._first.wait_event(slot.drained)
        if self._kind is CopyKind.LOAD:
            self._cross(slot.memory, theirs, self._first)
        else:
            self._move(slot.memory, indices)
        slot.filled.record(self._first)
        self._last.wait_event(slot.filled)
        if self._kind is CopyKind.LOAD:
            self._move(slot.memory, indices)
        else:
            self._cross(slot.memory, theirs, self._last)
        slot.drained.record(self._last)
        self._let_others_pass(self._first if self._kind is CopyKind.LOAD else self._last)

    def _let_others_pass(self, crossing: torch.cuda.Stream) -> None:
        """Has the copy engine wait a moment for another stream: only then does it turn to copies of others."""
        self._passed.record(crossing)
        self._others.wait_event(self._passed)
        self._returned.record(self._others)
        crossing.wait_event(self._returned)

    def _cross(self, memory: Tensor, pages: Int32Array, stream: torch.cuda.Stream) -> None:
        """Sends rows of staging memory to host pages, or the other way: runs of adjacent pages in one pinned piece."""
        page_bytes = self._host.layout.page_bytes
        is_cut = (np.diff(pages) != 1) | (pages[1:] % self._host.touch.pages_per_piece == 0)
        edges = np.concatenate(([0], np.flatnonzero(is_cut) + 1, [pages.size])).astype(np.uint64)
        firsts, sizes = edges[:-1], np.diff(edges) * np.uint64(page_bytes)
        ours = np.uint64(memory.data_ptr()) + firsts * np.uint64(page_bytes)
        theirs = np.uint64(self._all_pages().data_ptr()) + pages[firsts].astype(np.uint64) * np.uint64(page_bytes)
        targets, sources = (ours, theirs) if self._kind is CopyKind.LOAD else (theirs, ours)
        self._copy_engine.copy(targets, sources, sizes, stream.cuda_stream)

    def _all_pages(self) -> Tensor:
        return self._host.span(0, self._host.num_pages)

    @property
    def _kernels(self) -> torch.cuda.Stream:
        """The stream on which pieces are gathered or scattered."""
        return self._last if self._kind is CopyKind.LOAD else self._first

    def _upload(self, ours: Int32Array, rows: Int32Array) -> Tensor:
        """Copies page numbers to the device, int32 ``[2, n]``; torch keeps the pinned memory until they are there."""
        with torch.cuda.stream(self._kernels):
            return torch.from_numpy(np.stack((ours, rows))).pin_memory().to("cuda", non_blocking=True)

    def _move(self, pages: Tensor, indices: Tensor) -> None:
        """Gathers or scatters: one kernel a group, between pages of the device and rows of ``[n, page_bytes]``."""
        max_programs = _STAGING_PROGRAMS if self._slots else _DIRECT_PROGRAMS[self._kind]
        with torch.cuda.stream(self._kernels):
            for group in self._host.layout.groups:
                self._launch(pages, indices, group, range(group.num_layers), max_programs)

    def _layer_bytes(self) -> int:
        """Returns the bytes of a page that belong to one layer of the first group, the model's own."""
        return 2 * self._host.layout.piece_bytes(self._host.layout.groups[0])

    def _move_by_layer(self, pages: Tensor, ours: Int32Array, theirs: Int32Array) -> tuple[torch.cuda.Event, ...]:
        """Scatters pages of the host: other groups first, then the first one layer after layer, with an event each."""
        own, *others = self._host.layout.groups
        max_programs, events = _DIRECT_PROGRAMS[self._kind], []
        indices = self._upload(ours, theirs)
        with torch.cuda.stream(self._kernels):
            for group in others:
                self._launch(pages, indices, group, range(group.num_layers), max_programs)
            for layer in range(own.num_layers):
                self._launch(pages, indices, own, range(layer, layer + 1), max_programs)
                events.append(_event())
                events[-1].record(self._kernels)
        return tuple(events)

    def _launch(self, pages: Tensor, indices: Tensor, group: CacheGroupSpec, layers: range, max_programs: int) -> None:
        """One kernel for adjacent layers of a group."""
        layout = self._host.layout
        piece_bytes = layout.piece_bytes(group)
        words = word_type(piece_bytes)
        start = int(layout.offsets[group.name][layers.start, 0])
        planes = self._device.storage(group.name).view(2 * group.num_layers, -1).view(words)
        copy_pages(
            planes.view(2 * group.num_layers, -1, piece_bytes // words.itemsize)[2 * layers.start : 2 * layers.stop],
            pages[:, start : start + 2 * len(layers) * piece_bytes].view(words),
            indices,
            to_planes=self._kind is CopyKind.LOAD,
            max_programs=max_programs,
        )


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
