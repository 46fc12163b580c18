"""A page store in memory that is slow, fails, lies, fills up or hangs as a script says: for tests of what follows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from hiserve.cache.storage.store import HEADER_BYTES, is_intact, seal
from hiserve.ipc.cache_stats import StoreStats


class Fault(Enum):
    """What goes wrong with one call."""

    NONE = "none"
    FAIL = "fail"  # the medium reports an error
    LIE = "lie"  # exists says yes to all; get finds garbled bytes; put says yes and keeps garbled bytes
    FULL = "full"  # put has no room; other calls are well
    HANG = "hang"  # the call returns only when released or closed, with nothing done


@dataclass(frozen=True, slots=True)
class Step:
    """How one call goes.

    Attributes:
        fault: What goes wrong.
        after: Pages that go well before it does.
        delay_s: How long the call takes.
    """

    fault: Fault = Fault.NONE
    after: int = 0
    delay_s: float = 0.0


class SimStore:
    """See ``PageStore``. Pages live as long as this object.

    Args:
        script: One step for each call of ``exists``, ``get`` and ``put``, in order; all goes well after its end.
        sleep: Called with the seconds of a delay.
    """

    def __init__(self, script: Iterable[Step] = (), *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._script = iter(script)
        self._sleep = sleep
        self._pages: dict[bytes, bytearray] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._is_closed = False

    def exists(self, keys: Sequence[bytes]) -> int:
        """See ``PageStore``."""
        step = self._begin()
        limit = _limit(step, keys, Fault.FAIL, Fault.HANG)
        with self._lock:
            if step.fault is Fault.LIE and not self._is_closed:
                return len(keys)
            return next((index for index, key in enumerate(keys[:limit]) if key not in self._pages), limit)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """See ``PageStore``."""
        step = self._begin()
        count = 0
        with self._lock:
            for key, buffer in zip(keys[: _limit(step, keys, Fault.FAIL, Fault.HANG)], buffers, strict=False):
                if (stored := self._pages.get(key)) is None:
                    break
                if step.fault is Fault.LIE and count == step.after:
                    stored[-1] ^= 1
                buffer[:] = memoryview(stored)[HEADER_BYTES:][: buffer.nbytes].tobytes().ljust(buffer.nbytes, b"\0")
                if not is_intact(key, stored[:HEADER_BYTES], buffer):
                    del self._pages[key]
                    self._counts["num_corrupt"] += 1
                    break
                count += 1
            self._counts.update(num_hits=count, num_misses=len(keys) - count)
        return count

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """See ``PageStore``."""
        step = self._begin()
        limit = _limit(step, keys, Fault.FAIL, Fault.HANG, Fault.FULL)
        with self._lock:
            for index, (key, buffer) in enumerate(zip(keys[:limit], buffers, strict=False)):
                if key not in self._pages:
                    self._pages[key] = bytearray(seal(key, buffer)) + buffer
                    self._counts["num_stored"] += 1
                if step.fault is Fault.LIE and index >= step.after:
                    self._pages[key][-1] ^= 1
            self._counts["num_refused"] += len(keys) - limit
        return limit

    def clear(self) -> int:
        """See ``PageStore``."""
        with self._lock:
            count = len(self._pages)
            self._pages.clear()
        return count

    def stats(self) -> StoreStats:
        """See ``PageStore``."""
        with self._lock:
            num_bytes = sum(map(len, self._pages.values()))
            return StoreStats(num_pages=len(self._pages), num_bytes=num_bytes, last_error="", **self._counts)

    def release(self) -> None:
        """Lets calls that hang return, and none hang any more."""
        self._released.set()

    def close(self) -> None:
        """See ``PageStore``."""
        self._is_closed = True
        self._released.set()

    def _begin(self) -> Step:
        """Takes the next step of the script and spends its time."""
        with self._lock:
            step = next(self._script, Step())
            if step.fault is Fault.FAIL:
                self._counts["num_errors"] += 1
        if step.delay_s:
            self._sleep(step.delay_s)
        if step.fault is Fault.HANG:
            self._released.wait()
        return Step(Fault.FAIL) if self._is_closed else step


def _limit(step: Step, keys: Sequence[bytes], *faults: Fault) -> int:
    """Returns how many of the keys a call gets to see."""
    return min(step.after, len(keys)) if step.fault in faults else len(keys)
