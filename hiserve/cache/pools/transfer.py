"""Copies pages between device and host while steps run: the protocol, and the engine for a device that is the CPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hiserve.cache.pools.device import DevicePool
from hiserve.cache.pools.host import HostPool
from hiserve.core.copies import CopyAck, CopyKind, PageCopy
from hiserve.core.groups import CacheGroupSpec

DROPPED = "link_behind"


class TransferEngine(Protocol):
    """Carries out orders asynchronously: loads before stores, each kind in its order."""

    def start(self, copy: PageCopy) -> None:
        """Takes an order; returns at once."""

    def forward_done(self, step_id: int) -> None:
        """Tells that the forwards up to this step are done, or, on a stream device, were launched."""

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one."""

    def wait(self, op: int) -> None:
        """Makes the next forward wait for an order."""

    def close(self) -> None:
        """Ends; orders that have not begun are dropped, unanswered."""


class ThreadTransfers:
    """A thread plays the copy stream: real asynchrony where device memory is the CPU's.

    Args:
        device: The device pool.
        host: The host pool.
        groups: The model's KV groups.
        max_queued_bytes: Stores are dropped, and answered as failed, while more than this waits.
        max_store_bytes_per_s: Bound on what stores take of the memory's bandwidth.
        hold: Called in the thread before each copy; a test holds the stream with it.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        groups: Sequence[CacheGroupSpec],
        *,
        max_queued_bytes: int,
        max_store_bytes_per_s: float,
        hold: Callable[[PageCopy], None] | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._groups = tuple(groups)
        self._page_size = host.layout.page_size
        self._page_bytes = host.layout.page_bytes
        self._max_queued_pages = max_queued_bytes // self._page_bytes
        self._store_s_per_page = self._page_bytes / max_store_bytes_per_s
        self._hold = hold
        self._queues: dict[CopyKind, deque[PageCopy]] = {kind: deque() for kind in CopyKind}
        self._num_queued_stores = 0  # pages
        self._ended: deque[CopyAck] = deque()
        self._last_ended = dict.fromkeys(CopyKind, 0)
        self._done_step = 0
        self._store_free_at = 0.0
        self._is_closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hiserve-transfers", daemon=True)
        self._thread.start()

    def start(self, copy: PageCopy) -> None:
        """Takes an order; a store that comes while the link is behind is dropped."""
        num_pages = copy.device_pages.size
        with self._news:
            if copy.kind is CopyKind.STORE:
                if self._num_queued_stores + num_pages > self._max_queued_pages:
                    self._ended.append(CopyAck(copy.op, DROPPED))
                    return
                assert copy.run is not None, f"store {copy.op} does not say what it stores"
                self._host.begin(copy.run)
                self._num_queued_stores += num_pages
            self._queues[copy.kind].append(copy)
            self._news.notify_all()

    def forward_done(self, step_id: int) -> None:
        """Tells that the forwards up to this step are done."""
        with self._news:
            self._done_step = max(self._done_step, step_id)
            self._news.notify_all()

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the orders that have ended since the last call; waits up to ``wait_s`` seconds for one."""
        if wait_s and not self._ended:
            with self._news:
                self._news.wait_for(lambda: bool(self._ended), wait_s)
        acks = []
        while self._ended:
            acks.append(self._ended.popleft())
        return acks

    def wait(self, op: int) -> None:
        """Blocks until a load has ended."""
        with self._news:
            self._news.wait_for(lambda: self._is_closed or self._last_ended[CopyKind.LOAD] >= op)

    def close(self) -> None:
        """Ends after the copy that runs."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            if self._hold is not None:
                self._hold(copy)
            begin = time.perf_counter()
            reason = self._copy(copy)
            seconds = time.perf_counter() - begin
            num_bytes = 0 if reason else copy.device_pages.size * self._page_bytes
            with self._news:
                if copy.kind is CopyKind.STORE:
                    self._num_queued_stores -= copy.device_pages.size
                self._last_ended[copy.kind] = copy.op
                self._ended.append(CopyAck(copy.op, reason, num_bytes, seconds))
                self._news.notify_all()

    def _next(self) -> PageCopy | None:
        """Waits for an order that may begin; None at the end."""
        with self._news:
            while not self._is_closed:
                delay_s: float | None = None
                for kind in CopyKind:  # loads first
                    queue = self._queues[kind]
                    if not queue or queue[0].after_step > self._done_step:
                        continue
                    delay_s = self._store_free_at - time.monotonic() if kind is CopyKind.STORE else 0.0
                    if delay_s <= 0:
                        copy = queue.popleft()
                        if kind is CopyKind.STORE:
                            pause = copy.device_pages.size * self._store_s_per_page
                            self._store_free_at = time.monotonic() + pause
                        return copy
                self._news.wait(delay_s)
            return None

    @torch.inference_mode()
    def _copy(self, copy: PageCopy) -> str:
        """Copies all pages, one layer's keys or values at a time; returns why it failed, or nothing."""
        is_load = copy.kind is CopyKind.LOAD
        ours = torch.from_numpy(copy.device_pages).long()
        theirs = torch.from_numpy(copy.host_pages).long()
        for group in self._groups:
            for device, host in zip(self._device.layers(group.name), self._host.layers(group.name), strict=True):
                for slots, pages in ((device.k, host.k), (device.v, host.v)):
                    pieces = slots.view(-1, *pages.shape[1:])
                    if is_load:
                        pieces.index_copy_(0, ours, pages.index_select(0, theirs))
                    else:
                        pages.index_copy_(0, theirs, pieces.index_select(0, ours))
        if not is_load:
            self._host.finish(copy.host_pages)
        return ""
