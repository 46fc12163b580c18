"""Enqueues copies of pages, in one direction, on CUDA streams.

A page is contiguous on the host and has many pieces on the device. Large pages pass through staging memory on the
device: one launch gathers or scatters their pieces there, and the copy engine copies whole pages, or runs of
adjacent ones. For small pages a call of the copy engine costs more than their bytes: for them a kernel
reads and writes host memory directly.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.kernels.page_copy import PreparedCopy, copy_pages, word_type

_AS_STREAMS_GO = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source may change after the copy in stream order
_BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_NUM_SLOTS = 2  # the copy engine uses one while a kernel gathers or scatters the other
_STAGING_PROGRAMS = 64  # less than the bandwidth of the device, more than that of the link
# Few: an offload that saturates the link stalls every other access to memory. On an H200, 64 KiB pages, a step that
# reads weights took 1.06 times as long beside loads of 8 programs, 1.10 beside offloads of 3, 3.4 beside offloads of 8.
_DIRECT_PROGRAMS = {CopyKind.LOAD: 8, CopyKind.OFFLOAD: 3}


class CopyEngine:
    """Enqueues copies through the driver, many by one call, which releases the GIL.

    ``Tensor.copy_`` took 13 µs per copy on an H200's host. Drivers before CUDA 13 lack the batched call, and get one copy
    per call.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._one = driver.cuMemcpyAsync
        self._one.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._many = getattr(driver, "cuMemcpyBatchAsync_v2", None)
        if self._many is not None:
            size, pointer = ctypes.c_size_t, ctypes.c_void_p
            self._many.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
        self._attributes, self._first = _Attributes(_AS_STREAMS_GO, flags=_BESIDE_KERNELS), ctypes.c_size_t(0)
        self._of_all = ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1  # from the first copy on

    def copy(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> None:
        """Enqueues copies between addresses on the device and in pinned memory; does not wait.

        Args:
            targets: uint64 ``[n]``, addresses of disjoint ranges; n is at least 1.
            sources: uint64 ``[n]``, addresses.
            sizes: uint64 ``[n]``, bytes, at least 1 each.
            stream: Handle of a stream of the current device, not the default one.

        Raises:
            RuntimeError: CUDA refuses, for example because the bytes span two pieces pinned apart.
        """
        if self._many is not None and len(sizes) > 1:
            arrays = [np.ascontiguousarray(each) for each in (targets, sources, sizes)]
            error = self._many(*(each.ctypes.data for each in arrays), len(sizes), *self._of_all, stream)
            _check(error, f"{len(sizes)} copies")
            return
        for target, source, num_bytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            error = self._one(target, source, num_bytes, stream)
            _check(error, f"{num_bytes} bytes from {source:#x} to {target:#x}")


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A copy in flight."""

    copy: PageCopy
    begin: torch.cuda.Event  # recorded after the waits of the copy
    end: torch.cuda.Event  # recorded after the copy
    layers: tuple[torch.cuda.Event, ...] = ()  # recorded after each layer; empty for a copy without such events

    def end_of(self, layer: int | None) -> torch.cuda.Event:
        """Returns the event of a layer; ``end`` for None, or without events of layers."""
        return self.end if layer is None or not self.layers else self.layers[layer]

    @property
    def seconds(self) -> float:
        """Time on the device of an ended copy."""
        milliseconds: float = self.begin.elapsed_time(self.end)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Staging memory."""

    address: int  # of the first byte
    moves: list[PreparedCopy]  # between the device pool and its rows, uint8 ``[n, page_bytes]``: one kernel a group
    crossed: torch.cuda.Event  # recorded when the copy engine has filled or emptied it


class _Runs(NamedTuple):
    """The copies of one slot over the link: adjacent pages in one pinned piece are one copy.

    Attributes:
        offsets: uint64 ``[n]``, bytes from the start of staging memory.
        addresses: uint64 ``[n]``, on the host.
        sizes: uint64 ``[n]``, bytes.
    """

    offsets: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class PageStreams:
    """The streams of one direction. Used by one thread at a time, whose current device is that of the pools.

    Large pages use two streams, so that the copy engine never waits for a kernel: one gathers or scatters, the other
    copies staging memory over the link. Small pages use one stream. Between two pieces of staging memory, copies of other
    streams may use the copy engine.

    Enqueuing takes the GIL from the thread that launches forwards, so all possible work is done once, in the constructor or
    once per order.

    Args:
        device: The device pool.
        host: The host pool, pinned and mapped.
        kind: The direction.
        staging_bytes: Staging memory on the device; at least two pages are allocated.
        max_direct_page_bytes: Pages up to this size are copied by a kernel.
        min_layer_bytes: Loads by a kernel may be split by layers of at least this size.
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
        self._max_programs = _DIRECT_PROGRAMS[kind]
        self._copy_engine = CopyEngine()
        self._kernels = self._crossing = _stream()
        self._slots: deque[_Slot] = deque()
        self._yielded = _event()
        if page_bytes > max_direct_page_bytes:
            self._max_programs = _STAGING_PROGRAMS
            self._crossing = _stream()
            with torch.cuda.stream(self._first):  # no other stream may still use its memory
                shape = self._pages_per_slot, page_bytes
                memories = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(_NUM_SLOTS)]
            self._slots.extend(_Slot(memory.data_ptr(), self._moves(memory), _event()) for memory in memories)
        else:
            self._direct = self._moves(self._all_pages())

    def compile(self) -> None:
        """Compiles the kernels of ``begin``, so that the first copy does not wait for it. Host pages need not be ready."""
        nothing = np.empty(0, dtype=np.int32)
        with torch.cuda.stream(self._kernels):
            page = torch.empty((1, self._host.layout.page_bytes), dtype=torch.uint8, device="cuda")
            _move(self._moves(page), self._upload(nothing, nothing))
            if not self._slots and self._kind is CopyKind.LOAD:
                self._move_by_layer(page, nothing, nothing)

    def begin(
        self,
        copy: PageCopy,
        fence: torch.cuda.Event | None,
        before_piece: Callable[[torch.cuda.Event | None], None],
        *,
        by_layer: bool = False,
    ) -> Flight:
        """Enqueues a copy after an event and everything enqueued before.

        Args:
            copy: The order.
            fence: Event before the copy.
            before_piece: Called with None before the copy is prepared, and before each piece of staging memory is enqueued
                with the event it waits for.
            by_layer: A forward will wait for each layer of the load. With small pages this load takes a third longer.
        """
        before_piece(None)
        order = np.argsort(copy.host_pages, kind="stable")  # so that adjacent pages make runs
        ours, theirs = copy.device_pages[order], copy.host_pages[order]
        begin, end = _event(timed=True), _event(timed=True)
        layers: tuple[torch.cuda.Event, ...] = ()
        with torch.cuda.stream(self._kernels):
            if fence is not None:
                self._first.wait_event(fence)
            begin.record(self._first)
            if self._slots:
                self._stage(ours, theirs, before_piece)
            elif by_layer and ours.size * self._layer_bytes() >= self._min_layer_bytes:
                layers = self._move_by_layer(self._all_pages(), ours, theirs)
            else:
                _move(self._direct, self._upload(ours, theirs))
            end.record(self._last)
        return Flight(copy, begin, end, layers)

    def drain(self) -> None:
        """Waits until everything that was enqueued has ended."""
        for stream in (self._kernels, self._crossing):
            stream.synchronize()

    @property
    def _first(self) -> torch.cuda.Stream:
        """The stream on which a copy begins."""
        return self._crossing if self._kind is CopyKind.LOAD else self._kernels

    @property
    def _last(self) -> torch.cuda.Stream:
        """The stream on which it ends."""
        return self._kernels if self._kind is CopyKind.LOAD else self._crossing

    def _stage(
        self, ours: Int32Array, theirs: Int32Array, before_piece: Callable[[torch.cuda.Event | None], None]
    ) -> None:
        """Copies through staging memory, in pieces of equal size: while one crosses, the next is enqueued.

        After a short piece, the link would be idle until the thread has prepared the next copy. All is prepared before the
        first wait, for the same reason.
        """
        num_pieces = -(-ours.size // self._pages_per_slot)
        size = -(-ours.size // num_pieces)
        rows = np.arange(ours.size, dtype=np.int32) % size
        indices, all_runs = self._upload(ours, rows), self._runs(rows, theirs)
        enqueue = self._load_piece if self._kind is CopyKind.LOAD else self._offload_piece
        for start, runs in zip(range(0, ours.size, size), all_runs, strict=True):
            before_piece(self._slots[0].crossed)
            enqueue(indices[:, start : start + size], runs)
            self._slots.rotate()

    def _load_piece(self, indices: Tensor, runs: _Runs) -> None:
        """Fills a slot and scatters it. The next copy to a slot waits until the slot before this one was scattered."""
        slot = self._slots[0]
        self._copy_engine.copy(runs.offsets + slot.address, runs.addresses, runs.sizes, self._crossing.cuda_stream)
        slot.crossed.record(self._crossing)
        self._yield_copy_engine(slot.crossed)
        _move(slot.moves, indices)

    def _offload_piece(self, indices: Tensor, runs: _Runs) -> None:
        """Gathers a slot and empties it. The next gather waits until the slot before this one was emptied."""
        slot = self._slots[0]
        _move(slot.moves, indices)
        self._yield_copy_engine(self._slots[1].crossed)
        self._copy_engine.copy(runs.addresses, runs.offsets + slot.address, runs.sizes, self._crossing.cuda_stream)
        slot.crossed.record(self._crossing)

    def _yield_copy_engine(self, crossed: torch.cuda.Event) -> None:
        """Makes the two streams wait for each other, so that the copy engine executes copies of other streams meanwhile.

        Later copies of staging memory follow all kernels enqueued so far, and later kernels follow ``crossed``.
        """
        self._kernels.wait_event(crossed)
        self._yielded.record(self._kernels)
        self._crossing.wait_event(self._yielded)

    def _runs(self, rows: Int32Array, pages: Int32Array) -> list[_Runs]:
        """Returns the copies between rows of staging memory and host pages, for each time that it is filled."""
        page_bytes = np.uint64(self._host.layout.page_bytes)
        is_cut = (np.diff(pages) != 1) | (pages[1:] % self._host.prefault.pages_per_piece == 0) | (rows[1:] == 0)
        edges = np.concatenate(([0], np.flatnonzero(is_cut) + 1, [pages.size]))
        firsts = edges[:-1]
        offsets = rows[firsts].astype(np.uint64) * page_bytes
        addresses = pages[firsts].astype(np.uint64) * page_bytes + np.uint64(self._all_pages().data_ptr())
        sizes = np.diff(edges).astype(np.uint64) * page_bytes
        refills = np.flatnonzero(offsets == 0)[1:]
        return [_Runs(*each) for each in zip(*(np.split(x, refills) for x in (offsets, addresses, sizes)), strict=True)]

    def _all_pages(self) -> Tensor:
        return self._host.span(0, self._host.num_pages)

    def _upload(self, ours: Int32Array, rows: Int32Array) -> Tensor:
        """Copies page numbers to the device, int32 ``[2, n]``; torch keeps the pinned memory until the copy has ended."""
        return torch.from_numpy(np.stack((ours, rows))).pin_memory().to("cuda", non_blocking=True)

    def _moves(self, pages: Tensor) -> list[PreparedCopy]:
        """Prepares gathers or scatters between device pages and rows of ``[n, page_bytes]``: one kernel per group."""
        return [
            PreparedCopy(
                *self._views(pages, group, range(group.num_layers)),
                to_planes=self._kind is CopyKind.LOAD,
                max_programs=self._max_programs,
            )
            for group in self._host.layout.groups
        ]

    def _layer_bytes(self) -> int:
        """Returns the bytes of a page in one layer of the first group, the model's own."""
        own = self._host.layout.groups[0]
        return own.num_planes * self._host.layout.piece_bytes(own)

    def _move_by_layer(self, pages: Tensor, ours: Int32Array, theirs: Int32Array) -> tuple[torch.cuda.Event, ...]:
        """Scatters host pages: other groups first, then each layer of the first group with an event."""
        own, *others = self._host.layout.groups
        parts = [(group, range(group.num_layers)) for group in others]
        parts += [(own, range(layer, layer + 1)) for layer in range(own.num_layers)]
        indices, events = self._upload(ours, theirs), []
        for group, layers in parts:
            views = self._views(pages, group, layers)
            copy_pages(*views, indices, to_planes=self._kind is CopyKind.LOAD, max_programs=self._max_programs)
            if group is own:
                events.append(_event())
                events[-1].record(self._kernels)
        return tuple(events)

    def _views(self, pages: Tensor, group: CacheGroupSpec, layers: range) -> tuple[Tensor, Tensor]:
        """Returns the planes of adjacent layers of a group, and their columns of ``[n, page_bytes]``."""
        layout = self._host.layout
        piece_bytes, per_layer = layout.piece_bytes(group), group.num_planes
        words = word_type(piece_bytes)
        start = int(layout.offsets[group.name][layers.start, 0])
        planes = self._device.storage(group.name).view(per_layer * group.num_layers, -1).view(words)
        pieces = planes.view(per_layer * group.num_layers, -1, piece_bytes // words.itemsize)
        return (
            pieces[per_layer * layers.start : per_layer * layers.stop],
            pages[:, start : start + per_layer * len(layers) * piece_bytes].view(words),
        )


class _Location(ctypes.Structure):
    """CUmemLocation; all zeros is unspecified."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


def _check(error: int, what: str) -> None:
    if error:
        raise RuntimeError(f"the copy engine refuses {what}: error {error}")


def _move(moves: list[PreparedCopy], indices: Tensor) -> None:
    """Gathers or scatters on the current stream; ``indices`` are device pages and rows."""
    for move in moves:
        move(indices)


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
