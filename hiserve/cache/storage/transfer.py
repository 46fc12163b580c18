"""Copies pages between device and host while steps run: the protocol, and the engine for a device that is the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.transfer_queue import TransferQueue
from hiserve.core.step_faults import attempt
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy


class TransferEngine(Protocol):
    """Carries out orders asynchronously: loads before stores, each kind in its order."""

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        """Takes an order; returns at once.

        Args:
            copy: The order.
            by_layer: A forward is about to wait for each layer of this load (``wait``).
        """

    def launch_begins(self) -> None:
        """Tells that the caller launches a forward now; what is not urgent stays out of its way meanwhile."""

    def launch_ends(self) -> None:
        """Tells that it does so no more, also where the launch failed."""

    def forward_done(self, step_id: int) -> None:
        """Tells that the forwards up to this step are done, or, on a stream device, were launched."""

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one."""

    def wake(self) -> None:
        """Ends the wait of ``poll``, or of the next one: there is news from elsewhere. Any thread may call it."""

    def wait(self, op: int, layer: int | None = None) -> None:
        """Makes what is launched next wait for a load, or at least for its part of one layer, counted from 0."""

    def close(self) -> None:
        """Ends; orders that have not begun are dropped, unanswered."""


class ThreadTransfers:
    """A thread plays the copy stream: real asynchrony where device memory is the CPU's.

    Args:
        device: The device pool.
        host: The host pool.
        max_queued_bytes: Stores are dropped, and answered as failed, while more than this waits.
        max_store_bytes_per_s: Bound on what stores take of the memory's bandwidth.
        hold: Called in the thread before each copy; a test holds the stream with it, or lets the copy fail by
            returning why.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        max_queued_bytes: int,
        max_store_bytes_per_s: float,
        hold: Callable[[PageCopy], str | None] | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._hold = hold
        self._queue = TransferQueue(
            host, max_queued_bytes=max_queued_bytes, max_store_bytes_per_s=max_store_bytes_per_s
        )
        self._queue.serve(self._run)

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        """Takes an order; a store that comes while the link is behind is dropped."""
        self._queue.add(copy)

    def launch_begins(self) -> None:
        """Changes nothing: copies of memory leave the interpreter to others."""

    def launch_ends(self) -> None:
        """Changes nothing either."""

    def forward_done(self, step_id: int) -> None:
        """Tells that the forwards up to this step are done."""
        self._queue.forward_done(step_id)

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one."""
        return self._queue.poll(wait_s)

    def wake(self) -> None:
        """Ends the wait of ``poll``, or of the next one."""
        self._queue.wake()

    def wait(self, op: int, layer: int | None = None) -> None:
        """Blocks until a load has ended, all of it whatever the layer."""
        self._queue.wait(op)

    def close(self) -> None:
        """Ends after the copy that runs."""
        self._queue.close()

    def _run(self) -> None:
        while (copy := self._queue.next()) is not None:
            begin = time.perf_counter()
            reason = attempt(partial(self._carry_out, copy))
            self._queue.end(copy, time.perf_counter() - begin, reason)
            if copy.kind is CopyKind.LOAD:
                self._queue.release(copy)

    def _carry_out(self, copy: PageCopy) -> str:
        reason = (self._hold(copy) if self._hold is not None else None) or ""
        if not reason:
            self._copy(copy)
        return reason

    @torch.inference_mode()
    def _copy(self, copy: PageCopy) -> None:
        """Copies all pages, one layer's keys or values at a time."""
        is_load = copy.kind is CopyKind.LOAD
        ours = torch.from_numpy(copy.device_pages).long()
        theirs = torch.from_numpy(copy.host_pages).long()
        for group in self._host.layout.groups:
            for device, host in zip(self._device.layers(group.name), self._host.layers(group.name), strict=True):
                for slots, pages in ((device.k, host.k), (device.v, host.v)):
                    pieces = slots.view(-1, *pages.shape[1:])
                    if is_load:
                        pieces.index_copy_(0, ours, pages.index_select(0, theirs))
                    else:
                        pages.index_copy_(0, theirs, pieces.index_select(0, ours))
