"""The ends of rows: each way in which a row loses its request, and where the request goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.core.plan import Int64Array, StepFault
from hiserve.core.request import Retain
from hiserve.engine.grammars import GrammarRows
from hiserve.engine.host_loads import HostLoads
from hiserve.engine.oom_recovery import OomRecovery
from hiserve.engine.queue import Request, WaitingQueue
from hiserve.engine.rows import RowState
from hiserve.errors import EngineError, ResourceError
from hiserve.spec.history import ReplyHistory

Failure = tuple[int, str, str]  # uid, code and message of a request

MAX_FAULTS = 1  # a row with a stale page table is recomputed this often before its request fails


class Retainer:
    """Retains prefixes of requests that ask for it, from the end of their row on: before that, their locks do.

    Args:
        cache: Evicts them last.
        clock: Monotonic seconds, alike in all processes since the machine's start: those that the next process finds in the
            records of the host are its own times.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock

    def retain(self, lock: PrefixLock, retain: Retain) -> None:
        """Retains prefixes of a locked one."""
        for num_tokens, ttl_s in retain:
            self._cache.retain(lock, num_tokens, math.ceil(self._clock() + ttl_s))

    def expire(self) -> None:
        """Ends what is retained until now."""
        if self._cache.is_retaining:
            self._cache.expire(int(self._clock()))


class RowEnds:
    """Releases rows; their requests end, fail, or return to the front of the queue.

    Args:
        history: Keeps replies; None keeps none.

    Attributes:
        num_preempted: Rows released for their pages.
        num_stale: Rows whose page table the device refused.
    """

    def __init__(
        self,
        cache: PrefixCache,
        rows: RowState,
        waiting: WaitingQueue,
        host_loads: HostLoads,
        grammars: GrammarRows,
        retainer: Retainer,
        oom_recovery: OomRecovery,
        history: ReplyHistory | None = None,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._waiting = waiting
        self._host_loads = host_loads
        self._grammars = grammars
        self._retainer = retainer
        self._oom_recovery = oom_recovery
        self._history = history
        self.num_preempted = 0
        self.num_stale = 0

    def release(self, row: int) -> Request:
        """Takes the row from its request."""
        self._host_loads.untrack(row)
        self._grammars.release(row)
        self._retainer.retain(self._rows.lock(row), self._rows.request(row).retain)
        return self._rows.release(row)

    def end(self, row: int) -> Request:
        """Takes the row from its request, which has ended or was aborted, and keeps its reply for the drafts of others."""
        request = self.release(row)
        if self._history is not None:
            self._history.add(request.tenant, request.tokens, request.num_prompt)
        return request

    def requeue(self, rows: list[int]) -> None:
        """Lets requests start over."""
        for row in rows:
            self._waiting.requeue(self.release(row))

    def preempt(self, row: int) -> None:
        """Releases a row for its pages; its request resumes after its published pages, which the host keeps too."""
        self.num_preempted += 1
        self._cache.ensure_backed(self._rows.lock(row))
        self.requeue([row])

    def undo(self, rows: Int64Array, num_tokens: int, fault: StepFault) -> list[Failure]:
        """Releases the rows of a failed step; steps that were planned after it find them gone. Returns the requests that fail."""
        released = [self.release(row) for row in rows.tolist()]
        again, failed = self._oom_recovery.requeue_or_fail(fault, num_tokens, released)
        for request in reversed(again):
            self._waiting.requeue(request)
        return [(request.uid, ResourceError.code, message) for request, message in failed]

    def refuse(self, row: int) -> list[Failure]:
        """Recomputes a request whose page table the device refused; a second time it fails."""
        self.num_stale += 1
        request = self.release(row)
        request.num_faults += 1
        if request.num_faults <= MAX_FAULTS:
            self._waiting.requeue(request)
            return []
        message = f"the device refused the page table of request {request.uid} {request.num_faults} times"
        return [(request.uid, EngineError.code, message)]
