"""Checksums of host pages, computed in the background at a bounded rate.

Pages are taken and sealed several at a time: what Python does for each page alone, another thread that launches a forward
cannot do meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.storage.records import NO_CHECKSUM, Records, page_checksum
from hiserve.core.plan import Int32Array

BATCH_S = 0.005  # of reading at the permitted rate, that pages taken at once are worth
MAX_BATCH = 64


class Checksums:
    """A thread that gives VALID pages their checksums, in the order in which they became VALID.

    Args:
        records: Of the pages.
        pages: uint8 ``[num_pages, page_bytes]``.
        max_bytes_per_s: What the thread may read; the forward wants memory bandwidth too.
    """

    def __init__(self, records: Records, pages: NDArray[np.uint8], *, max_bytes_per_s: float) -> None:
        self._records = records
        self._pages = pages
        self._page_s = pages.shape[1] / max_bytes_per_s
        self._max_batch = min(MAX_BATCH, max(1, int(BATCH_S / self._page_s)))
        self._queue: deque[int] = deque()
        self._is_queued = np.zeros(len(pages), dtype=np.bool_)  # a page waits at most once: the queue is bounded
        self._is_busy = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def add(self, pages: Int32Array) -> None:
        """Queues pages that became VALID. Never waits."""
        with self._changed:
            fresh = pages[~self._is_queued[pages]]
            self._is_queued[fresh] = True
            self._queue.extend(fresh.tolist())
            self._changed.notify_all()

    @property
    def num_queued(self) -> int:
        """Pages that wait; at most as many as there are."""
        return len(self._queue)

    def wait(self, timeout_s: float) -> bool:
        """Waits until every queued page has had its turn; returns False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def wait_for(self, pages: Int32Array, timeout_s: float) -> bool:
        """Waits until these pages, which are VALID, have checksums; returns False when the time is over or it is closed."""
        records = self._records

        def is_sealed() -> bool:
            return all(records.checksum(page) != NO_CHECKSUM for page in pages.tolist())

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_sealed(), timeout_s)
            return is_sealed()

    def close(self) -> None:
        """Stops the thread; pages that still wait stay without a checksum."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        free_at = time.monotonic()
        while (taken := self._take(free_at)) is not None:
            pages, lives, digests = self._records.unsealed(taken)
            free_at = max(free_at, time.monotonic()) + len(pages) * self._page_s
            checksums = [
                page_checksum(self._pages[page].data, digest)
                for page, digest in zip(pages.tolist(), digests, strict=True)
            ]
            self._records.seal(pages, lives, checksums)

    def _take(self, free_at: float) -> Int32Array | None:
        """Waits for the next pages and for their turn at the permitted rate; None when closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            while not self._is_closed and (delay := free_at - time.monotonic()) > 0:
                self._changed.wait(delay)
            if self._is_closed:
                return None
            self._is_busy = True
            pages = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
            self._is_queued[pages] = False
            return np.array(pages, dtype=np.int32)
