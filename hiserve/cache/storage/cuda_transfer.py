"""Copies pages between device and host on CUDA streams while forwards run on another."""

from __future__ import annotations

from collections import deque
from functools import partial
from queue import SimpleQueue

import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.page_streams import Flight, PageStreams
from hiserve.cache.storage.transfer import TransferQueue
from hiserve.core.step_faults import attempt
from hiserve.core.transfers import DEVICE_KINDS, STAGING_BYTES, CopyKind, PageCopy

MAX_DIRECT_PAGE_BYTES = 512 << 10
MIN_LAYER_BYTES = 1 << 20  # is copied over the link in the time of a launch

# Of the staging memory. Loads get more: with larger pieces their thread takes the GIL less often. Slots have 48 and 32 MiB:
# a piece of an offload takes 0.6 ms on the link at most, and the result of a step, a small copy in the same direction, waits
# so long for it.
_STAGING_PERCENT = {CopyKind.LOAD: 60, CopyKind.OFFLOAD: 40}
_NUM_STEPS = 8  # whose events are kept; few forwards are launched ahead


class CudaTransfers(TransferQueue):
    """A thread enqueues the orders, so that ``start`` only puts them into a queue.

    One more thread per direction waits for enqueued copies. They block instead of polling, because each poll would take the
    GIL from the thread that launches forwards.

    The current device of the constructor is that of the pool, and forwards run on the current stream of the thread
    that calls ``forward_done`` and ``wait``.

    Args:
        device: The device pool.
        host: The host pool, pinned and mapped.
        max_queued_bytes: Bound on offloads that have not ended; further ones fail.
        max_offload_bytes_per_s: Bound on the bandwidth of offloads.
        max_direct_page_bytes: Pages up to this size are copied by a kernel, larger ones by the copy engine. On
            an H200 the kernel is faster up to 1 MiB, by 5 % there (``benchmarks/results/copy.json``), but slows forwards.
        staging_bytes: Memory on the device for large pages, both directions together.
        min_layer_bytes: Loads that a kernel copies may be split by layers of at least this size.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        max_queued_bytes: int,
        max_offload_bytes_per_s: float,
        max_direct_page_bytes: int = MAX_DIRECT_PAGE_BYTES,
        staging_bytes: int = STAGING_BYTES,
        min_layer_bytes: int = MIN_LAYER_BYTES,
    ) -> None:
        super().__init__(host, max_queued_bytes=max_queued_bytes, max_offload_bytes_per_s=max_offload_bytes_per_s)
        self._device_index = torch.cuda.current_device()
        self._streams = {
            kind: PageStreams(
                device,
                host,
                kind,
                staging_bytes=staging_bytes * _STAGING_PERCENT[kind] // 100,
                max_direct_page_bytes=max_direct_page_bytes,
                min_layer_bytes=min_layer_bytes,
            )
            for kind in DEVICE_KINDS
        }
        for streams in self._streams.values():
            streams.compile()
        self._flights: dict[CopyKind, SimpleQueue[Flight | None]] = {kind: SimpleQueue() for kind in DEVICE_KINDS}
        self._loads: dict[int, Flight] = {}  # in flight, by op
        self._by_layer: set[int] = set()  # loads that a forward waits for layer by layer, not begun
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_NUM_STEPS)
        self.serve(self._run)
        for flights in self._flights.values():
            self.serve(partial(self._settle, flights))

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        if by_layer:
            self._by_layer.add(copy.op)
        super().start(copy)

    def forward_done(self, step_id: int) -> None:
        """Marks the step's work as enqueued on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._launched.append((step_id, event))
        super().forward_done(step_id)

    def wait(self, op: int, layer: int | None = None) -> None:
        """Makes the current stream wait for a load, or its part of one layer; blocks only until the load is enqueued."""
        super().wait(op)
        flight = self._loads.get(op)
        if flight is not None:
            torch.cuda.current_stream().wait_event(flight.end_of(layer))

    @torch.inference_mode()
    def _run(self) -> None:
        torch.cuda.set_device(self._device_index)
        try:
            while (copy := self.next()) is not None:
                self._begin(copy, self.take_tails(copy, self._streams[copy.kind].pages_per_slot))
        finally:
            for flights in self._flights.values():
                flights.put(None)

    def _begin(self, copy: PageCopy, tails: list[PageCopy]) -> None:
        """Enqueues an order, and tails that are copied with it and answered alike."""
        reason = attempt(partial(self._execute, copy, *tails))
        if reason:
            self._streams[copy.kind].drain()  # copies enqueued before memory ran out: their pages will be reallocated
            for each in (copy, *tails):
                self.end(each, 0.0, reason)
        self._by_layer.discard(copy.op)
        if copy.kind is CopyKind.LOAD:
            self.release(copy)

    def _execute(self, copy: PageCopy, *tails: PageCopy) -> str:
        """Enqueues copies; returns the reason of a failure, empty without one."""
        is_load = copy.kind is CopyKind.LOAD
        flight = self._streams[copy.kind].begin(
            copy,
            self._fence(copy.after_step),
            partial(self._wait_for_room, copy.op) if is_load else lambda _: self.yield_to_launch(),
            tails=tails,
            by_layer=copy.op in self._by_layer,
        )
        if is_load:
            self._loads[copy.op] = flight
        self._flights[copy.kind].put(flight)
        return ""

    def _wait_for_room(self, op: int, room: torch.cuda.Event | None) -> None:
        """Enqueues no faster than the link copies, unless a forward waits: other threads' launches interleave."""
        if not (room is None or self._is_closed or self._wanted == op):
            room.synchronize()

    def _fence(self, after_step: int) -> torch.cuda.Event | None:
        """Returns the event of the first recorded step that is not before this one."""
        if after_step == 0:
            return None
        return next(event for step_id, event in tuple(self._launched) if step_id >= after_step)

    def _settle(self, flights: SimpleQueue[Flight | None]) -> None:
        """Acknowledges the copies of one direction as they end, in their order."""
        torch.cuda.set_device(self._device_index)
        while (flight := flights.get()) is not None:
            flight.end.synchronize()
            for copy in flight.copies:
                self.end(copy, flight.seconds(copy))
                self._loads.pop(copy.op, None)
