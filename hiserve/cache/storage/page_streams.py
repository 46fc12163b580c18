"""Enqueues copies of pages, in one direction, on CUDA streams.

A page is contiguous on the host and has many pieces on the device. Large pages pass through staging memory on the
device: one launch gathers or scatters their pieces there, and the copy engine copies whole pages, or runs of
adjacent ones. For small pages a call of the copy engine costs more than their bytes: for them a kernel
reads and writes host memory directly. The image of a window page is cut into frames, host pages anywhere in the pool, so
that images of any size pass through staging memory: there they are whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.cache.storage.copy_engine import CopyEngine
from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.segment import PageLayout
from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.kernels.page_copy import PreparedCopy, copy_pages, word_type

_NUM_SLOTS = 2  # the copy engine uses one while a kernel gathers or scatters the other
_STAGING_PROGRAMS = 64  # less than the bandwidth of the device, more than that of the link
# Few: an offload that saturates the link stalls every other access to memory. On an H200, 64 KiB pages, a step that
# reads weights took 1.06 times as long beside loads of 8 programs, 1.10 beside offloads of 3, 3.4 beside offloads of 8.
_DIRECT_PROGRAMS = {CopyKind.LOAD: 8, CopyKind.OFFLOAD: 3}


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A copy in flight, or several of tails alone."""

    copies: tuple[PageCopy, ...]
    begin: torch.cuda.Event  # recorded after the waits of the copy
    end: torch.cuda.Event  # recorded after the copy
    layers: tuple[torch.cuda.Event, ...] = ()  # recorded after each layer; empty for a copy without such events

    def end_of(self, layer: int | None) -> torch.cuda.Event:
        """Returns the event of a layer; ``end`` for None, or without events of layers."""
        return self.end if layer is None or not self.layers else self.layers[layer]

    def seconds(self, copy: PageCopy) -> float:
        """Returns the time on the device of one of the copies, which have ended: its share by bytes."""
        milliseconds: float = self.begin.elapsed_time(self.end)
        return milliseconds / 1e3 * copy.num_host_pages / sum(each.num_host_pages for each in self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Staging memory."""

    address: int  # of the first byte
    # Between the device pool and its rows, uint8 ``[n, page_bytes]``, or the images of window pages: one kernel a group.
    moves: dict[Space, list[PreparedCopy]]
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


class _Piece(NamedTuple):
    """Device pages and host pages that pass through one slot at once.

    Attributes:
        space: Of the device pages.
        indices: int32 ``[2, n]`` on the device: device pages, and their rows or images in the slot.
        runs: Between the slot and the host.
    """

    space: Space
    indices: Tensor
    runs: _Runs


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
        staging_bytes: Staging memory on the device; two pages, or images of window pages, are allocated at least.
        max_direct_page_bytes: Pages of history up to this size are copied by a kernel.
        min_layer_bytes: Loads by a kernel may be split by layers of at least this size.

    Attributes:
        pages_per_slot: Host pages that cross the link at once, at most.
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
        self._has_windows = bool(host.window_layout.groups)
        self._has_snapshots = host.snapshot_image.num_bytes > 0
        self._pages_per_image = max(1, host.frames_per_page)
        images_per_slot = max(1, staging_bytes // _NUM_SLOTS // (self._pages_per_image * page_bytes))
        self.pages_per_slot = images_per_slot * self._pages_per_image
        self._min_layer_bytes = min_layer_bytes
        self._copy_engine = CopyEngine()
        self._kernels = self._crossing = _stream()
        self._slots: deque[_Slot] = deque()
        self._yielded = _event()
        self._is_direct = page_bytes <= max_direct_page_bytes
        if self._is_direct:
            self._direct = self._moves(self._all_pages(), host.layout, _DIRECT_PROGRAMS[kind])
        else:
            self._crossing = _stream()
        if self._has_windows or not self._is_direct:
            with torch.cuda.stream(self._first):  # no other stream may still use its memory
                shape = self.pages_per_slot, page_bytes
                memories = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(_NUM_SLOTS)]
            self._slots.extend(_Slot(memory.data_ptr(), self._staged(memory), _event()) for memory in memories)

    def compile(self) -> None:
        """Compiles the kernels of ``begin``, so that the first copy does not wait for it. Host pages need not be ready."""
        nothing = np.empty(0, dtype=np.int32)
        with torch.cuda.stream(self._kernels):
            shape = self._pages_per_image, self._host.layout.page_bytes
            page = torch.empty(shape, dtype=torch.uint8, device="cuda")
            for moves in self._staged(page).values():
                _move(moves, self._upload(nothing, nothing))
            if self._is_direct and self._kind is CopyKind.LOAD:
                self._move_by_layer(page, nothing, nothing)

    def begin(
        self,
        copy: PageCopy,
        fence: torch.cuda.Event | None,
        before_piece: Callable[[torch.cuda.Event | None], None],
        *,
        tails: Sequence[PageCopy] = (),
        by_layer: bool = False,
    ) -> Flight:
        """Enqueues a copy after an event and everything enqueued before.

        Args:
            copy: The order.
            fence: Event before the copy.
            tails: Offloads of tails alone, as ``copy`` is then: all are gathered and cross the link together.
            before_piece: Called with None before the copy is prepared, and before each piece of staging memory is enqueued
                with the event it waits for.
            by_layer: A forward will wait for each layer of the load. With small pages this load takes a third longer. A
                model with window pages has no such loads: its resume points arrive whole, and its groups have not all layers.
        """
        before_piece(None)
        copies = copy, *tails
        assert not tails or all(each.is_tail_alone for each in copies), f"{len(copies)} orders, not all of tails alone"
        order = np.argsort(copy.host_pages, kind="stable")  # so that adjacent pages make runs
        ours, theirs = copy.device_pages[order], copy.host_pages[order]
        images = [_window_frames(each, self._host.frames_per_page) for each in copies if each.window_pages.size]
        begin, end = _event(timed=True), _event(timed=True)
        layers: tuple[torch.cuda.Event, ...] = ()
        with torch.cuda.stream(self._kernels):
            if fence is not None:
                self._first.wait_event(fence)
            begin.record(self._first)
            pieces: list[_Piece] = []
            if not self._is_direct:
                pieces += self._pieces(Space.HISTORY, ours, theirs)
            elif self._may_split(by_layer, ours.size):
                layers = self._move_by_layer(self._all_pages(), ours, theirs)
            elif ours.size:
                _move(self._direct, self._upload(ours, theirs))
            if images:
                window_pages = np.concatenate([each.window_pages for each in copies])
                pieces += self._pieces(Space.WINDOW, window_pages, np.concatenate(images))
            self._stage(pieces, before_piece)
            for each in copies:
                self._move_snapshot(each, begin, before_piece)
            end.record(self._last)
        return Flight(copies, begin, end, layers)

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

    def _may_split(self, by_layer: bool, num_pages: int) -> bool:
        """Whether a load of so many pages goes layer by layer."""
        is_large = num_pages * self._layer_bytes() >= self._min_layer_bytes
        return by_layer and is_large and not (self._has_windows or self._has_snapshots)

    def _pieces(self, space: Space, ours: Int32Array, theirs: Int32Array) -> list[_Piece]:
        """Returns copies of equal size through staging memory, of device pages in a space and their host pages or frames.

        After a short piece, the link would be idle until the thread has prepared the next copy. All is prepared before the
        first wait, for the same reason.
        """
        if not ours.size:
            return []
        count = self._pages_per_image if space is Space.WINDOW else 1
        assert theirs.size == count * ours.size, (
            f"{theirs.size} host pages for {ours.size} pages that take {count} each"
        )
        num_pieces = -(-theirs.size // self.pages_per_slot)
        size = -(-ours.size // num_pieces)
        rows = np.arange(theirs.size, dtype=np.int32) % (size * count)
        indices = self._upload(ours, np.arange(ours.size, dtype=np.int32) % size)
        starts = range(0, ours.size, size)
        return [
            _Piece(space, indices[:, start : start + size], runs)
            for start, runs in zip(starts, self._runs(rows, theirs), strict=True)
        ]

    def _stage(self, pieces: list[_Piece], before_piece: Callable[[torch.cuda.Event | None], None]) -> None:
        """Copies pieces through staging memory: while one crosses, the next is enqueued."""
        enqueue = self._load_piece if self._kind is CopyKind.LOAD else self._offload_piece
        for piece in pieces:
            before_piece(self._slots[0].crossed)
            enqueue(piece)
            self._slots.rotate()

    def _move_snapshot(
        self, copy: PageCopy, begin: torch.cuda.Event, before_piece: Callable[[torch.cuda.Event | None], None]
    ) -> None:
        """Copies the snapshot of a tail without staging: what a slot holds of a layer is contiguous on the device."""
        if not copy.slots.size or copy.image is None:
            return
        host, page_bytes = self._host, self._host.layout.page_bytes
        frames = copy.image.frames[copy.image.frames.size - host.frames_per_snapshot :]
        ours, theirs, sizes = host.snapshot_image.runs(self._device.carried, int(copy.slots[0]), frames, page_bytes)
        theirs = theirs + np.uint64(self._all_pages().data_ptr())
        self._last.wait_event(begin)
        if self._kind is CopyKind.LOAD:
            ours, theirs = theirs, ours
        num_before = np.cumsum(sizes) - sizes
        ends = np.flatnonzero(np.diff(num_before // np.uint64(self.pages_per_slot * page_bytes))) + 1
        for sources, targets, part in zip(*(np.split(each, ends) for each in (ours, theirs, sizes)), strict=True):
            before_piece(None)
            self._copy_engine.copy(targets, sources, part, self._last.cuda_stream)

    def _load_piece(self, piece: _Piece) -> None:
        """Fills a slot and scatters it. The next copy to a slot waits until the slot before this one was scattered."""
        slot, runs = self._slots[0], piece.runs
        self._copy_engine.copy(runs.offsets + slot.address, runs.addresses, runs.sizes, self._crossing.cuda_stream)
        slot.crossed.record(self._crossing)
        self._yield_copy_engine(slot.crossed)
        _move(slot.moves[piece.space], piece.indices)

    def _offload_piece(self, piece: _Piece) -> None:
        """Gathers a slot and empties it. The next gather waits until the slot before this one was emptied."""
        slot, runs = self._slots[0], piece.runs
        _move(slot.moves[piece.space], piece.indices)
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

    def _staged(self, memory: Tensor) -> dict[Space, list[PreparedCopy]]:
        """Prepares copies between device pages and staging memory, uint8 ``[n, page_bytes]``: whole images."""
        images = memory.view(-1, self._pages_per_image * self._host.layout.page_bytes)
        return {
            Space.HISTORY: self._moves(memory, self._host.layout, _STAGING_PROGRAMS),
            Space.WINDOW: self._moves(images, self._host.window_layout, _STAGING_PROGRAMS),
        }

    def _moves(self, pages: Tensor, layout: PageLayout, max_programs: int) -> list[PreparedCopy]:
        """Prepares gathers or scatters between device pages and rows of ``[n, num_bytes]``: one kernel per group."""
        return [
            PreparedCopy(
                *self._views(pages, layout, group, range(group.num_layers)),
                to_planes=self._kind is CopyKind.LOAD,
                max_programs=max_programs,
            )
            for group in layout.groups
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
            views = self._views(pages, self._host.layout, group, layers)
            copy_pages(*views, indices, to_planes=True, max_programs=_DIRECT_PROGRAMS[CopyKind.LOAD])
            if group is own:
                events.append(_event())
                events[-1].record(self._kernels)
        return tuple(events)

    def _views(self, pages: Tensor, layout: PageLayout, group: CacheGroupSpec, layers: range) -> tuple[Tensor, Tensor]:
        """Returns the planes of adjacent layers of a group, and their columns of ``[n, num_bytes]``."""
        piece_bytes, per_layer = layout.piece_bytes(group), group.num_planes
        words = word_type(piece_bytes)
        start = int(layout.offsets[group.name][layers.start, 0])
        planes = self._device.storage(group.name).view(per_layer * group.num_layers, -1).view(words)
        pieces = planes.view(per_layer * group.num_layers, -1, piece_bytes // words.itemsize)
        return (
            pieces[per_layer * layers.start : per_layer * layers.stop],
            pages[:, start : start + per_layer * len(layers) * piece_bytes].view(words),
        )


def _window_frames(copy: PageCopy, frames_per_page: int) -> Int32Array:
    """Returns the frames of a tail's window pages, which come before those of its snapshot."""
    assert copy.image is not None
    frames: Int32Array = copy.image.frames[: copy.window_pages.size * frames_per_page]
    return frames


def _move(moves: list[PreparedCopy], indices: Tensor) -> None:
    """Gathers or scatters on the current stream; ``indices`` are device pages and rows."""
    for move in moves:
        move(indices)


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
