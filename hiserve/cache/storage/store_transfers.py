"""Copies pages between the host and a store, in dedicated threads: a store may be slow, fail, or never answer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import numpy as np

from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.store import PageStore, store_key, tail_key
from hiserve.core.plan import Int32Array
from hiserve.core.step_faults import fault_of
from hiserve.core.transfers import STORE_LANES, CopyAck, CopyKind, PageCopy, PageRun, StoreEnds, StoreLookup, TailImage
from hiserve.errors import InvariantError
from hiserve.ipc.cache_stats import StoreStats

MAX_ENDS = 8  # resume points of an answer
MAX_PAGES_BEFORE = 512  # of a resume point before the deepest: each boundary without one costs a look at the medium
NOT_DELIVERED = "not_delivered"
REFUSED = "store_refused"
NO_CHECKSUM = "no_checksum"
GARBLED = "checksum"

Job = Callable[[], None]


class StoreTransfers:
    """Answers lookups, and executes prefetches and uploads; each kind of work in its order.

    A call that hangs blocks its thread, its order and the orders queued after it, and nothing else.

    Args:
        store: Closed at the end.
        host: The host pool; its records are updated before and after a prefetch writes pages.
        wake: Called by the threads when ``poll`` or ``take_found`` has a result.
        num_prefetch_threads: Lookups and prefetches that run at once.
        max_upload_bytes_per_s: Bound on the bandwidth of uploads.
        checksum_timeout_s: Longest an upload waits for the checksums of its pages.
        close_timeout_s: Longest ``close`` waits for uploads that have begun, and then for the threads.
    """

    def __init__(
        self,
        store: PageStore,
        host: HostPool,
        *,
        wake: Callable[[], None] = lambda: None,
        num_prefetch_threads: int = STORE_LANES,
        max_upload_bytes_per_s: float = 1e9,
        checksum_timeout_s: float = 5.0,
        close_timeout_s: float = 0.2,
    ) -> None:
        self._store = store
        self._host = host
        self._wake = wake
        self._upload_s_per_page = host.layout.page_bytes / max_upload_bytes_per_s
        self._checksum_timeout_s = checksum_timeout_s
        self._close_timeout_s = close_timeout_s
        self._acks: deque[CopyAck] = deque()
        self._found: deque[StoreEnds] = deque()
        self._failure: Exception | None = None
        self._is_closing = threading.Event()
        self._fetches: SimpleQueue[Job | None] = SimpleQueue()
        self._uploads: SimpleQueue[Job | None] = SimpleQueue()
        self._fetchers = [self._thread(self._fetches) for _ in range(num_prefetch_threads)]
        self._uploader = self._thread(self._uploads)

    def look_up(self, lookup: StoreLookup) -> None:
        """Queues a lookup; returns at once."""
        self._fetches.put(partial(self._look_up, lookup))

    def start(self, copy: PageCopy) -> None:
        """Queues a prefetch, which needs FREE pages, or an upload, which needs VALID ones; returns at once.

        An upload is of pages, or of a tail.
        """
        if copy.kind is CopyKind.PREFETCH:
            self._fetches.put(partial(self._prefetch, copy))
        else:
            assert copy.kind is CopyKind.UPLOAD, f"copy {copy.op} is no transfer of a store"
            self._uploads.put(partial(self._upload, copy))

    def clear(self) -> None:
        """Empties the store after the uploads that have begun; returns at once."""
        self._uploads.put(self._clear)

    def poll(self) -> list[CopyAck]:
        """Returns the orders that have ended since the last call.

        Raises:
            InvariantError: A thread has failed; no more orders are executed.
        """
        if self._failure is not None:
            raise InvariantError(f"the store's thread failed: {self._failure}") from self._failure
        return [self._acks.popleft() for _ in range(len(self._acks))]

    def take_found(self) -> list[StoreEnds]:
        """Returns the answers to lookups since the last call."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def stats(self) -> StoreStats:
        """Returns the store's counts; does not block."""
        return self._store.stats()

    def close(self) -> None:
        """Ends the threads. Uploads that have begun get ``close_timeout_s``; a thread that hangs is abandoned."""
        self._is_closing.set()
        for _ in self._fetchers:
            self._fetches.put(None)
        self._uploads.put(None)
        self._uploader.join(self._close_timeout_s)
        self._store.close()
        deadline = time.monotonic() + self._close_timeout_s
        for thread in (self._uploader, *self._fetchers):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _thread(self, jobs: SimpleQueue[Job | None]) -> threading.Thread:
        thread = threading.Thread(target=self._serve, args=(jobs,), name="hiserve-store", daemon=True)
        thread.start()
        return thread

    def _serve(self, jobs: SimpleQueue[Job | None]) -> None:
        try:
            while (job := jobs.get()) is not None:
                job()
        except Exception as error:  # noqa: BLE001 - raised by ``poll``
            self._failure = error

    def _look_up(self, lookup: StoreLookup) -> None:
        if self._is_closing.is_set():
            return
        digests, num_here = lookup.digests, lookup.num_here
        count = num_here + self._store.exists([store_key(digest) for digest in digests[num_here:]])
        ends = [count] if count else []
        if lookup.needs_tail:
            ends = self._tails_before(digests[:count])
        self._found.append((lookup.uid, tuple(ends)))
        self._wake()

    def _tails_before(self, digests: list[bytes]) -> list[int]:
        """Returns the ends of the deepest tails of a prefix, ascending; a tail that is far before the deepest is not looked for."""
        ends: list[int] = []
        for end in range(len(digests), 0, -1):
            if len(ends) == MAX_ENDS or (ends and ends[0] - end > MAX_PAGES_BEFORE):
                break
            if self._store.exists([tail_key(digests[end - 1])]):
                ends.append(end)
        return ends[::-1]

    def _prefetch(self, copy: PageCopy) -> None:
        """Reads the leading pages that are there, and the tail behind them if all are, and it is whole."""
        if self._is_closing.is_set():
            return
        begin = time.perf_counter()
        if copy.run is not None:
            self._host.begin(copy.run)
        if copy.image is not None:
            self._host.begin_tail(copy.image)
        count = _count(partial(self._get, copy))
        if self._is_closing.is_set():
            return  # the ack would not be read; a restart does not recover pages that are not VALID
        pages = copy.all_host_pages
        if count:
            self._host.finish(pages[:count])
        self._host.free(pages[count:])
        self._end(copy.op, count, begin, "" if count == pages.size else NOT_DELIVERED)

    def _get(self, copy: PageCopy) -> int:
        """Returns how many of the host pages of a prefetch were filled; the frames of its tail are the last."""
        keys, buffers, num_pages = _keys(copy.run), self._buffers(copy.host_pages), copy.host_pages.size
        if copy.image is None:
            return self._store.get(keys, buffers, _before(copy.run))
        image = np.empty(copy.image.frames.size * self._host.layout.page_bytes, dtype=np.uint8).data
        before = [store_key(digest) for digest in copy.image.history[: len(copy.image.history) - num_pages]]
        count = self._store.get([*keys, tail_key(copy.image.digest)], [*buffers, image], before)
        if count > num_pages:
            self._host.write_frames(copy.image.frames, image)
        return copy.num_host_pages if count > num_pages else count

    def _upload(self, copy: PageCopy) -> None:
        """Uploads the leading pages that match their checksums, or a whole tail: what is damaged must not get a valid header."""
        begin, pages = time.perf_counter(), copy.all_host_pages
        if not self._host.wait_sealed(pages, self._checksum_timeout_s):
            self._end(copy.op, 0, begin, NO_CHECKSUM)
            return
        is_intact = [self._host.verify(page) for page in pages.tolist()]
        num_intact = (*is_intact, False).index(False)
        begin = time.perf_counter()
        if copy.image is None:
            keys, buffers = _keys(copy.run)[:num_intact], self._buffers(pages[:num_intact])
            count = _count(partial(self._store.put, keys, buffers, _before(copy.run)))
        else:
            num_intact = num_intact if num_intact == pages.size else 0
            count = num_intact and pages.size * _count(partial(self._put_tail, copy.image))
        reason = REFUSED if count < num_intact else "" if num_intact == pages.size else GARBLED
        self._end(copy.op, count, begin, reason)
        self._is_closing.wait(count * self._upload_s_per_page)

    def _put_tail(self, image: TailImage) -> int:
        before = [store_key(digest) for digest in image.history]
        if self._store.exists(before) < len(before):
            return 0  # a tail is of no use without its history
        return self._store.put([tail_key(image.digest)], [self._host.read_frames(image.frames)], before)

    def _clear(self) -> None:
        self._store.clear()

    def _end(self, op: int, count: int, begin: float, reason: str) -> None:
        num_bytes = count * self._host.layout.page_bytes
        self._acks.append(CopyAck(op, reason, num_bytes, time.perf_counter() - begin, count))
        self._wake()

    def _buffers(self, pages: Int32Array) -> list[memoryview]:
        return [self._host.buffer(page) for page in pages.tolist()]


def _count(call: Callable[[], int]) -> int:
    """Returns the pages that a call of the store handled; 0 if it ran out of memory."""
    try:
        return call()
    except Exception as error:
        if not fault_of(error):
            raise
        return 0


def _keys(run: PageRun | None) -> list[bytes]:
    return [] if run is None else [store_key(digest, run.draft_revision) for digest in run.digests]


def _before(run: PageRun | None) -> list[bytes]:
    """Returns the key of the page before a run, if there is one."""
    return [] if run is None or run.parent == run.namespace else [store_key(run.parent, run.draft_revision)]
