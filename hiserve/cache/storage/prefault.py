"""Brings the pages of a segment into memory, and pins them for the device, in the background, first page first."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from hiserve.cache.storage.segment import Segment, no_memory
from hiserve.core.machine import GIB
from hiserve.errors import ResourceError

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14
# Pinning delays launches on the device: up to 5 ms for this many bytes, half a second for 4 GiB (H200).
_PIECE_BYTES = 64 << 20
_IDLE_S = 0.05  # without a launch: the device is idle
_SHARE, _SHORT_SHARE = (
    1 / 32,
    1 / 2,
)  # of the time for pinning while steps run; the second while few ready pages are free
_FREE_BYTES = 512 << 20  # of free ready pages; fewer are few
_PORTABLE = 1  # every device of this process may copy to and from the memory
_MAPPED = 2  # kernels may read and write it by its own address


class Registrar(Protocol):
    """Pins memory, so that a device can copy to and from it."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a piece of this process's memory.

        Raises:
            OSError: It cannot be pinned; the text says why.
        """

    def unregister(self, address: int) -> None:
        """Undoes ``register``."""


class CudaRegistrar:
    """Registers memory with CUDA, in the context of the device of this index.

    After a refusal, CUDA reports the same error at the next launch of that thread: register from threads that launch nothing.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, num_bytes: int) -> None:
        """Pins memory of this process.

        Raises:
            OSError: CUDA or a limit on locked memory refuses.
        """
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        if error != self._cuda.cudaError.success:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3g} GiB"
            fact = f"it cannot be pinned: {self._cuda.cudaGetErrorString(error)}, and ulimit -l is {locked}"
            raise OSError(errno.ENOMEM, fact)

    def unregister(self, address: int) -> None:
        """Unpins what was pinned at this address."""
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostUnregister(address)
        assert error == self._cuda.cudaError.success, f"unpinning {address:#x}: {self._cuda.cudaGetErrorString(error)}"


class PinningThrottle:
    """Limits the share of the time that pinning takes while steps run; an idle device has no limit.

    The share is small while many ready pages are free, and a half otherwise.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._step_s = self._pinned_s = -math.inf
        self._taken_s = 0.0

    def step(self) -> None:
        """Records a launch. Called from the launching thread."""
        self._step_s = self.clock()

    def pinned(self, taken_s: float) -> None:
        """Records the end and the duration of pinning a piece."""
        self._pinned_s, self._taken_s = self.clock(), taken_s

    def pause_s(self, free_bytes: int) -> float:
        """Returns how long to wait before the next piece is pinned, at least 0.

        Args:
            free_bytes: Of free ready pages.
        """
        now_s = self.clock()
        if now_s > self._step_s + _IDLE_S:
            return 0.0
        share = _SHARE if free_bytes >= _FREE_BYTES else _SHORT_SHARE
        return max(0.0, self._pinned_s + self._taken_s * (1 / share - 1) - now_s)


class Prefault:
    """Makes pages resident in parallel, piece by piece; each piece is then pinned if there is a registrar.

    The content of the pages stays. No copy may use a page that is not ready: a write to memory that is not resident may
    kill the process, and the page may not be pinned. A copy must not span two pieces, because each is pinned on its own.

    Args:
        segment: Of the pages.
        num_threads: At least 1.
        registrar: Pins each piece; None without a device.
        piece_bytes: Of a piece; rounded down to whole pages of cache and of memory, at least one.
        populate: Makes memory resident (offset in the segment, address, bytes); raises OSError.
        throttle: Delays the pinning of pieces.
        num_used: Returns the number of pages in use.

    Attributes:
        num_pieces: Pieces in all.
        pages_per_piece: Piece i has the pages from ``i * pages_per_piece``.
        failure: Reason why ``num_ready_pages`` stopped growing; None if it did not.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        num_threads: int = 4,
        registrar: Registrar | None = None,
        piece_bytes: int = _PIECE_BYTES,
        populate: Callable[[int, int, int], None] | None = None,
        throttle: PinningThrottle | None = None,
        num_used: Callable[[], int] = lambda: 0,
    ) -> None:
        layout = segment.layout
        # Pieces end at page boundaries of cache and memory: two registrations must not share a page of memory.
        stride = math.lcm(layout.page_bytes, mmap.PAGESIZE)
        self.pages_per_piece = max(1, piece_bytes // stride) * stride // layout.page_bytes
        self.num_pieces = -(-layout.num_pages // self.pages_per_piece)
        self.throttle = throttle or PinningThrottle()
        self.failure: ResourceError | None = None
        self._num_used = num_used
        self._segment = segment
        self._address = segment.pages.ctypes.data
        self._registrar = registrar
        self._populate = populate or Populate(segment.fd)
        self._is_done = np.zeros(self.num_pieces + 1, dtype=np.bool_)
        self._registered: list[int] = []
        self._next = 0
        self._num_ready_pieces = 0
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._pinning = threading.Lock()  # one at a time, so that launches run in between
        count = min(num_threads, self.num_pieces)
        self._threads = [threading.Thread(target=self._run, name=f"prefault-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def num_ready_pages(self) -> int:
        """Pages below this are resident and pinned; never decreases before ``close``."""
        return min(self._num_ready_pieces * self.pages_per_piece, self._segment.layout.num_pages)

    def wait(self, num_pages: int, timeout_s: float) -> bool:
        """Waits until so many pages are ready; returns False after the timeout or a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self.num_ready_pages >= num_pages, timeout_s)
            return self.num_ready_pages >= num_pages

    def close(self) -> None:
        """Stops the threads and unpins the memory; no copy may be running. The segment stays."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._registrar is not None:
            for address in self._registered:
                self._registrar.unregister(address)
        self._registered.clear()

    def _run(self) -> None:
        while (piece := self._take()) is not None:
            try:
                self._prepare(piece)
            except OSError as error:
                ready = self.num_ready_pages * self._segment.layout.page_bytes / GIB
                self._fail(no_memory(self._segment.layout.num_bytes, f"after {ready:.3g} GiB: {error.strerror}"))
                return
            with self._changed:
                self._is_done[piece] = True
                self._num_ready_pieces = int(self._is_done.argmin())  # the last entry is never done
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._stop.is_set() or self._next == self.num_pieces:
                return None
            self._next += 1
            return self._next - 1

    def _prepare(self, piece: int) -> None:
        layout = self._segment.layout
        first = piece * self.pages_per_piece * layout.page_bytes
        num_bytes = min(self.pages_per_piece * layout.page_bytes, layout.num_pages * layout.page_bytes - first)
        address = self._address + first
        self._populate(layout.pages_offset + first, address, num_bytes)
        if self._registrar is not None:
            with self._pinning:
                num_free = self.num_ready_pages - self._num_used()
                self._stop.wait(self.throttle.pause_s(num_free * layout.page_bytes))
                begin_s = self.throttle.clock()
                self._registrar.register(address, num_bytes)
                self._registered.append(address)
                self.throttle.pinned(self.throttle.clock() - begin_s)

    def _fail(self, error: ResourceError) -> None:
        with self._changed:
            if self.failure is None:
                logger.warning("the host cache stays at %d pages: %s", self.num_ready_pages, error.message)
            self.failure = self.failure or error
            self._stop.set()
            self._changed.notify_all()


class Populate:
    """Makes memory resident by a system call, which reports missing memory as an error instead of a signal.

    Kernels that cannot do it by address use ``fd``, the segment's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, offset: int, address: int, num_bytes: int) -> None:
        """Makes bytes resident and writable, and keeps their content; releases the GIL.

        Raises:
            OSError: There is not enough memory.
        """
        if self._madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        os.posix_fallocate(self._fd, offset, num_bytes)
