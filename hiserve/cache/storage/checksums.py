"""Checksums of host pages, and the thread that gives them to pages once their bytes have arrived."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import xxhash
from numpy.typing import NDArray

from hiserve.cache.storage.records import NO_CHECKSUM, Records
from hiserve.core.plan import Int32Array

BATCH_S = 0.005  # seconds of reading, at the permitted rate, of the pages of a batch
MAX_BATCH = 64


def page_checksum(page: memoryview, digest: bytes) -> int:
    """Returns the xxh3-64 of a page's bytes; never 0, which means "none yet".

    The page's digest is the seed: intact bytes of another prefix do not match.
    """
    seed = int.from_bytes(digest[:8], "little")
    return xxhash.xxh3_64_intdigest(page, seed=seed) or 1


class Checksums:
    """A thread that gives VALID pages their checksums, in the order in which they became VALID, at a bounded rate.

    Pages are taken and sealed several at a time: Python code for each page alone would delay a thread that launches a
    forward.

    Args:
        records: Of the pages.
        pages: uint8 ``[num_pages, page_bytes]``.
        max_bytes_per_s: Bound on the thread's reads, which use the memory bandwidth of forwards.
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
        """Waits until no page is queued; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def wait_for(self, pages: Int32Array, timeout_s: float) -> bool:
        """Waits until these VALID pages have checksums; returns False after the timeout or ``close``."""
        records = self._records

        def is_sealed() -> bool:
            return all(records.checksum(page) != NO_CHECKSUM for page in pages.tolist())

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_sealed(), timeout_s)
            return is_sealed()

    def close(self) -> None:
        """Stops the thread; queued pages stay without a checksum."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        free_at = time.monotonic()
        while (taken := self._take(free_at)) is not None:
            pages, generations, digests = self._records.unsealed(taken)
            free_at = max(free_at, time.monotonic()) + len(pages) * self._page_s
            checksums = [
                page_checksum(self._pages[page].data, digest)
                for page, digest in zip(pages.tolist(), digests, strict=True)
            ]
            self._records.seal(pages, generations, checksums)

    def _take(self, free_at: float) -> Int32Array | None:
        """Waits for the next pages, and for the permitted rate; None when closed."""
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
