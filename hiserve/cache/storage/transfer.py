"""Copies pages between device and host while steps run: the protocol, its queue, and the engine for the CPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool, empty_image, page_views
from hiserve.core.forward import LayerKV
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.plan import Int32Array
from hiserve.core.step_faults import attempt
from hiserve.core.transfers import DEVICE_KINDS, CopyAck, CopyKind, PageCopy
from hiserve.errors import InvariantError

DROPPED = "link_behind"
NOT_READY = "page_not_ready"
GARBLED = "checksum"

# Longest wait of a piece of an offload for a launch. It bounds the delay when one launch follows another: with pieces of
# 32 MiB, offloads still reach 16 GB/s.
MAX_YIELD_S = 2e-3
MAX_YIELD_FILL = 0.5  # of ``max_queued_bytes``: with more, offloads do not wait for launches


class TransferEngine(Protocol):
    """Executes orders asynchronously: loads before offloads, each kind in its order."""

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        """Queues an order; returns at once. ``by_layer``: a forward will wait for each layer of this load (``wait``)."""

    def launch_begins(self) -> None:
        """Marks the begin of a launch of a forward; work that is not urgent is delayed meanwhile."""

    def launch_ends(self) -> None:
        """Marks the end of a launch, successful or not."""

    def forward_done(self, step_id: int) -> None:
        """Marks the forwards up to this step as done, or, on a stream device, as launched."""

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one."""

    def wake(self) -> None:
        """Ends the current wait of ``poll``, or the next one. Thread-safe."""

    def wait(self, op: int, layer: int | None = None) -> None:
        """Makes later launches wait for a load, or at least for its part of one layer, counted from 0."""

    def close(self) -> None:
        """Ends; orders that have not begun are dropped without an answer."""


class TransferQueue:
    """The orders of a transfer engine and their acknowledgements; a subclass serves them in its threads.

    Args:
        host: The host pool; its records are updated before and after an offload writes pages.
        max_queued_bytes: Bound on offloads that have not ended; further ones fail.
        max_offload_bytes_per_s: Bound on the bandwidth of offloads.
    """

    def __init__(self, host: HostPool, *, max_queued_bytes: int, max_offload_bytes_per_s: float) -> None:
        self._host = host
        self._page_bytes = host.layout.page_bytes
        self._max_offload_pages = max_queued_bytes // self._page_bytes
        self._offload_s_per_page = self._page_bytes / max_offload_bytes_per_s
        self._queues: dict[CopyKind, deque[PageCopy]] = {kind: deque() for kind in DEVICE_KINDS}
        self._num_offload_pages = 0  # of offloads that have not ended
        self._awaited: set[int] = set()  # loads that are not enqueued yet
        self._wanted = 0  # the load that a forward waits for now
        self._ended: deque[CopyAck] = deque()
        self._done_step = 0
        self._is_launching = False
        self._offload_free_at = 0.0
        self._is_woken = False
        self._is_closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def serve(self, work: Callable[[], None]) -> None:
        """Starts a thread of the engine; errors of ``work`` are raised by ``poll`` and ``wait``."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by poll and wait
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()

        self._threads.append(threading.Thread(target=run, name="hiserve-transfers", daemon=True))
        self._threads[-1].start()

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        """Queues an order, or acknowledges it as failed; see ``TransferEngine``."""
        is_offload = copy.kind is CopyKind.OFFLOAD
        num_pages = copy.num_host_pages
        is_ready = int(copy.all_host_pages.max()) < self._host.num_ready_pages
        with self._changed:
            if not is_ready or (is_offload and self._num_offload_pages + num_pages > self._max_offload_pages):
                self._ended.append(CopyAck(copy.op, DROPPED if is_ready else NOT_READY))
                self._changed.notify_all()
                return
            if is_offload:
                assert copy.run is not None or copy.image is not None, f"offload {copy.op} has no run"
                if copy.run is not None:
                    self._host.begin(copy.run)
                if copy.image is not None:
                    self._host.begin_tail(copy.image)
                self._num_offload_pages += num_pages
            else:
                self._awaited.add(copy.op)
            self._queues[copy.kind].append(copy)
            self._changed.notify_all()

    def launch_begins(self) -> None:
        """Delays offloads until ``forward_done`` or ``launch_ends``."""
        self._is_launching = True  # without the lock: no thread waits for this, and the enqueuing thread may hold it

    def launch_ends(self) -> None:
        """Ends the delay of offloads, whether the launch succeeded or not."""
        if self._is_launching:
            with self._changed:
                self._is_launching = False
                self._changed.notify_all()

    def forward_done(self, step_id: int) -> None:
        """Releases orders that come after this step or an earlier one; its launch is over."""
        with self._changed:
            self._is_launching = False
            self._done_step = max(self._done_step, step_id)
            # Waking a thread is the largest cost of this call: the thread takes the GIL.
            if self._num_offload_pages or self._queues[CopyKind.LOAD]:
                self._changed.notify_all()

    def yield_to_launch(self) -> None:
        """Waits while a forward is launched; called before each piece of an offload, which would delay the launch.

        It returns at once if a load is ready, because the load waits for the offload. It also returns at once if offloads fill
        more than half of their limit, so that none is dropped because of these waits.
        """
        if self._is_launching:
            with self._changed:
                self._changed.wait_for(self._may_go_on, MAX_YIELD_S)

    def _may_go_on(self) -> bool:
        is_filling = self._num_offload_pages > MAX_YIELD_FILL * self._max_offload_pages
        return not self._is_launching or self._is_closed or is_filling or self._may_begin(CopyKind.LOAD)

    def next(self) -> PageCopy | None:
        """Waits for an order that may begin; None when the queue is closed.

        A load of pages that fail their check is answered here and not executed.
        """
        while (copy := self._pop()) is not None:
            if copy.kind is not CopyKind.LOAD or self._host.is_intact(copy.all_host_pages):
                return copy
            self.end(copy, 0.0, GARBLED)
            self.release(copy)
        return None

    def _pop(self) -> PageCopy | None:
        with self._changed:
            while not self._is_closed:
                now, until = time.monotonic(), None
                if self._may_begin(CopyKind.LOAD):
                    return self._queues[CopyKind.LOAD].popleft()
                if self._may_begin(CopyKind.OFFLOAD):
                    if self._offload_free_at <= now:
                        copy = self._queues[CopyKind.OFFLOAD].popleft()
                        self._offload_free_at = now + copy.num_host_pages * self._offload_s_per_page
                        return copy
                    until = self._offload_free_at
                self._changed.wait(None if until is None else until - now)
            return None

    def take_tails(self, first: PageCopy, max_pages: int) -> list[PageCopy]:
        """Takes the offloads of tails alone that follow one, while all of them have no more frames than this, without waiting.

        Args:
            first: From ``next``.
            max_pages: Host pages of all of them, ``first`` included.

        Returns:
            Those that were taken, in their order; none behind another kind of order.
        """
        taken: list[PageCopy] = []
        if first.kind is CopyKind.OFFLOAD and first.is_tail_alone:
            max_pages -= first.num_host_pages
            with self._changed:
                queue = self._queues[CopyKind.OFFLOAD]
                while self._may_begin(CopyKind.OFFLOAD) and queue[0].is_tail_alone:
                    max_pages -= queue[0].num_host_pages
                    if max_pages < 0:
                        break
                    taken.append(queue.popleft())
                    self._offload_free_at += taken[-1].num_host_pages * self._offload_s_per_page
        return taken

    def release(self, load: PageCopy) -> None:
        """Allows forwards to follow this load."""
        with self._changed:
            self._awaited.discard(load.op)
            self._changed.notify_all()

    def end(self, copy: PageCopy, seconds: float, reason: str = "") -> None:
        """Records that all bytes have arrived, or the reason why they will not."""
        num_pages = copy.num_host_pages
        if copy.kind is CopyKind.OFFLOAD and not reason:
            self._host.finish(copy.all_host_pages)
        with self._changed:
            if copy.kind is CopyKind.OFFLOAD:
                self._num_offload_pages -= num_pages
            self._ended.append(CopyAck(copy.op, reason, 0 if reason else num_pages * self._page_bytes, seconds))
            self._changed.notify_all()

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one, or for ``wake``.

        Raises:
            InvariantError: The engine's thread has failed; no more orders are executed.
        """
        if wait_s and not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._is_woken or self._failure is not None, wait_s)
        self._is_woken = False
        self._check()
        acks = []
        while self._ended:
            acks.append(self._ended.popleft())
        return acks

    def wake(self) -> None:
        """Ends the current wait of ``poll``, or the next one."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait(self, op: int, layer: int | None = None) -> None:
        """Blocks until a forward may follow a load.

        Raises:
            InvariantError: As ``poll``.
        """
        with self._changed:
            late = [copy.op for copy in self._queues[CopyKind.LOAD] if copy.after_step > self._done_step]
            assert not late or op < late[0], f"load {late[0]} waits for a step that waits for load {op}"
            self._wanted = op
            self._changed.wait_for(lambda: self._is_closed or self._failure is not None or op not in self._awaited)
            self._wanted = 0
        self._check()

    def close(self) -> None:
        """Ends the threads; orders that have not begun are dropped without an answer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _may_begin(self, kind: CopyKind) -> bool:
        queue = self._queues[kind]
        return bool(queue) and queue[0].after_step <= self._done_step

    def _check(self) -> None:
        if self._failure is not None:
            raise InvariantError("copies between tiers have stopped") from self._failure


class ThreadTransfers(TransferQueue):
    """A thread executes the orders, for device memory on the CPU: copies are asynchronous, and release the GIL.

    ``wait`` blocks until a load has ended, for every ``layer`` all of it.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        max_queued_bytes: int,
        max_offload_bytes_per_s: float,
    ) -> None:
        super().__init__(host, max_queued_bytes=max_queued_bytes, max_offload_bytes_per_s=max_offload_bytes_per_s)
        self._device = device
        self.serve(self._run)

    def _run(self) -> None:
        while (copy := self.next()) is not None:
            begin = time.perf_counter()
            reason = attempt(partial(self._execute, copy))
            self.end(copy, time.perf_counter() - begin, reason)
            if copy.kind is CopyKind.LOAD:
                self.release(copy)

    @torch.inference_mode()
    def _execute(self, copy: PageCopy) -> str:
        """Copies all pages, then the tail; returns the reason of a failure, empty without one."""
        is_load, host = copy.kind is CopyKind.LOAD, self._host
        for group in host.layout.groups if copy.device_pages.size else ():
            self._move(group, copy.device_pages, host.layers(group.name), copy.host_pages, is_load=is_load)
        if copy.image is not None:
            of_windows, of_snapshot = np.split(copy.image.frames, [copy.window_pages.size * host.frames_per_page])
            if of_windows.size:
                self._move_windows(copy.window_pages, of_windows, is_load=is_load)
            for slot in copy.slots.tolist():
                self._move_snapshot(slot, of_snapshot, is_load=is_load)
        return ""

    def _move_windows(self, window_pages: Int32Array, frames: Int32Array, *, is_load: bool) -> None:
        """Copies the window pages of a tail."""
        host, count = self._host, window_pages.size
        num_bytes = host.frames_per_page * host.layout.page_bytes
        images = host.images(frames) if is_load else torch.zeros((count, num_bytes), dtype=torch.uint8)
        for group in host.window_layout.groups:
            layers = page_views(images, host.window_layout, group)
            self._move(group, window_pages, layers, np.arange(count, dtype=np.int32), is_load=is_load)
        if not is_load:
            host.put_images(frames, images)

    def _move_snapshot(self, slot: int, frames: Int32Array, *, is_load: bool) -> None:
        """Copies the snapshot in a slot."""
        host = self._host
        image = host.contents(frames).view(-1) if is_load else empty_image(frames.size * host.layout.page_bytes)
        for kept, part in host.snapshot_image.parts(image, self._device.carried, slot):
            (kept if is_load else part).copy_(part if is_load else kept)
        if not is_load:
            host.put_images(frames, image)

    def _move(
        self,
        group: CacheGroupSpec,
        device_pages: Int32Array,
        host_layers: tuple[LayerKV, ...],
        host_pages: Int32Array,
        *,
        is_load: bool,
    ) -> None:
        """Copies pages of a group, one layer's keys or values at a time."""
        ours, theirs = torch.from_numpy(device_pages).long(), torch.from_numpy(host_pages).long()
        for device, host in zip(self._device.layers(group.name), host_layers, strict=True):
            planes = [(device.k, host.k)]
            planes += [(device.v, host.v)] if group.value_dim is None else []
            for slots, pages in planes:
                pieces = slots.view(-1, *pages.shape[1:])
                if is_load:
                    pieces.index_copy_(0, ours, pages.index_select(0, theirs))
                else:
                    pages.index_copy_(0, theirs, pieces.index_select(0, ours))
