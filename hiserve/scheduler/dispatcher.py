"""Every decision of the scheduler, without sockets: messages go in, messages come out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Protocol

import numpy as np

from hiserve.config import Scheduler
from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason
from hiserve.core.reuse import NOTHING
from hiserve.errors import (
    ContextLengthError,
    DeadlineError,
    HiserveError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from hiserve.messages.coalesce import UNREPORTED
from hiserve.messages.failures import to_error
from hiserve.messages.types import Admit, Generate, Ready, StepReport, Tokens
from hiserve.scheduler.admission import Admission
from hiserve.scheduler.drain import DrainRate
from hiserve.scheduler.ledger import Entry, Ledger, State
from hiserve.scheduler.policy import Policy
from hiserve.scheduler.prefix_index import PrefixIndex
from hiserve.scheduler.queue import Queue, Waiting


class Outlet(Protocol):
    """Where the decisions go. Nothing in it may block or fail."""

    def tokens(self, news: Tokens, tokens: Int32Array, scores: bytes) -> None:
        """Tells the client news of requests."""

    def failed(self, uid: int, error: HiserveError) -> None:
        """Tells the client that a request ended with an error, or was refused."""

    def admit(self, replica: int, message: Admit, tokens: Int32Array) -> None:
        """Sends a worker a request."""

    def drop(self, replica: int, uids: list[int]) -> None:
        """Asks a worker to abort requests."""


class Dispatcher:
    """Ledger, queue, policy, admission and prefix index at work together.

    A request is in the ledger from ``submit`` to its one terminal message; while it is queued
    it is in the queue, and from its admission on it holds one credit of its worker.

    Args:
        outlet: Receives every message.
        policy: Who is next.
        index: Learns what the workers have cached; empty.
        limits: How much may wait, and how long.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        outlet: Outlet,
        policy: Policy,
        index: PrefixIndex,
        limits: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outlet = outlet
        self._policy = policy
        self._clock = clock
        self._limits = limits
        self.ledger = Ledger()
        self.queue = Queue(limits.max_queued_requests, limits.max_queued_tokens)
        self.admission = Admission()
        self._drain = DrainRate()
        self.index = index
        self._max_len = 0
        self._closed: HiserveError | None = None

    def submit(self, message: Generate, prompt: Int32Array) -> None:
        """Accepts a request or answers why not. It is admitted by the next ``dispatch``.

        Raises:
            MalformedError: Its uid is in use.
        """
        if not self.queue.has_room(len(prompt)):
            self.dispatch()  # of a burst, only what no worker can take has to wait
        refusal = self._refusal(message.caller, prompt)
        if refusal is not None:
            self._outlet.failed(message.uid, refusal)
            return
        entry = self.ledger.accept(message, prompt, self._clock())
        prefix = self.index.prefix(prompt, message.namespace)
        self.queue.push(Waiting(entry, prefix, self._policy.rank(message.priority)))

    def abort(self, uids: list[int]) -> None:
        """Ends queued requests now, and running ones when their worker answers; others have ended."""
        drops: dict[int, list[int]] = {}
        dropped: list[int] = []
        for uid in uids:
            entry = self.ledger.get(uid)
            if entry is None or entry.state is State.ABORTING:
                continue
            if entry.replica is None:
                self.queue.remove(uid)
                self._end(entry)
                dropped.append(uid)
            else:
                entry.state = State.ABORTING
                drops.setdefault(entry.replica, []).append(uid)
        if dropped:
            zeros = [0] * len(dropped)
            news = Tokens(
                uids=dropped,
                counts=zeros,
                finishes=[int(FinishReason.ABORT)] * len(dropped),
                cached=[NOTHING] * len(dropped),
                drafts=[None] * len(dropped),
                score_words=zeros,
                queue_s=[UNREPORTED] * len(dropped),
            )
            self._outlet.tokens(news, np.empty(0, dtype=np.int32), b"")
        for replica, running in drops.items():
            self._outlet.drop(replica, running)

    def expire(self) -> None:
        """Ends what is past its deadline: queued requests with an error, others with what they have."""
        timeout_s = self._limits.queue_timeout_s
        retry_after_s = self._retry_after_s()
        for entry in self._late(timeout_s, lambda entry: entry.state is State.QUEUED):
            self.queue.remove(entry.uid)
            self._end(entry)
            waited_s = self._clock() - entry.accepted_at_s
            message = f"no worker was free for {waited_s:.2f} s; the limit is {timeout_s:g} s. Try again later."
            self._outlet.failed(entry.uid, DeadlineError(message, retry_after_s=retry_after_s))
        self.abort([entry.uid for entry in self._late(self._limits.request_timeout_s, _is_open)])

    def seconds_to_deadline(self) -> float | None:
        """Returns the seconds until ``expire`` has something to do, at least 0; None when no deadline is ahead."""
        ahead = []
        if self._limits.queue_timeout_s and len(self.queue):
            first = next(entry for entry in self.ledger if entry.state is State.QUEUED)
            ahead.append(first.accepted_at_s + self._limits.queue_timeout_s)
        if self._limits.request_timeout_s and (oldest := next(filter(_is_open, self.ledger), None)):
            ahead.append(oldest.accepted_at_s + self._limits.request_timeout_s)
        return max(0.0, min(ahead) - self._clock()) if ahead else None

    def _late(self, timeout_s: float, concerns: Callable[[Entry], bool]) -> list[Entry]:
        """Returns the requests accepted ``timeout_s`` ago or earlier that it concerns; 0 is no limit."""
        if not timeout_s:
            return []
        latest = self._clock() - timeout_s
        old = takewhile(lambda entry: entry.accepted_at_s <= latest, self.ledger)  # the ledger is in this order
        return list(filter(concerns, old))

    def worker_ready(self, replica: int, ready: Ready) -> None:
        """A worker, new or restarted, can take requests."""
        self._max_len = ready.max_len
        self.admission.join(replica, ready.max_running)
        self.index.attach(replica, ready.namespace)

    def worker_lost(self, replica: int, error: HiserveError) -> None:
        """A worker is gone: what it held ends with ``error``, its credits and its cache are forgotten."""
        self.admission.leave(replica)
        self.index.detach(replica)
        for entry in self.ledger.running_on(replica):
            entry.replica = None
            self._end(entry)
            self._outlet.failed(entry.uid, error)

    def close(self, error: UnavailableError) -> None:
        """No worker is left and none will come: queued and later requests are refused."""
        self._closed = error
        for waiting in self.queue:
            self.queue.remove(waiting.entry.uid)
            self._end(waiting.entry)
            self._outlet.failed(waiting.entry.uid, error)

    def report(
        self,
        replica: int,
        report: StepReport,
        tokens: Int32Array,
        scores: bytes = b"",
        published: bytes = b"",
        removed: bytes = b"",
    ) -> None:
        """Records what a worker did and passes it on.

        Args:
            replica: The worker.
            report: Its report, and the arrays that came beside it:
            tokens: int32 ``[sum(counts)]``.
            scores: ``4 * sum(score_words)`` bytes.
            published: Joined digests of pages its cache gained.
            removed: Joined digests of pages its cache lost.

        Raises:
            MalformedError: It reports on requests it does not hold; nothing was recorded.
        """
        entries = self.ledger.rows(report.uids, replica)
        failures = self.ledger.rows([uid for uid, _, _ in report.failed], replica)
        self.index.update(replica, published, removed)
        if entries:
            ids = tokens.tolist()
            start = 0
            for entry, count, finish in zip(entries, report.counts, report.finishes, strict=True):
                entry.generated.extend(ids[start : start + count])
                start += count
                self.queue.charge(entry.caller, count)
                if finish:
                    self._end(entry)
            news = Tokens(
                uids=report.uids,
                counts=report.counts,
                finishes=report.finishes,
                cached=report.cached,
                drafts=report.drafts,
                score_words=report.score_words,
                queue_s=[entry.take_queue_s() for entry in entries],
            )
            self._outlet.tokens(news, tokens, scores)
        for entry, (_, code, message) in zip(failures, report.failed, strict=True):
            self._end(entry)
            self._outlet.failed(entry.uid, to_error(code, message))

    def dispatch(self) -> None:
        """Admits waiting requests while workers have credit."""
        num_requests, num_tokens = len(self.queue), self.queue.num_tokens
        while len(self.queue) and (candidates := self.admission.with_credit()):
            waiting = self._choose(candidates)
            entry = waiting.entry
            replica = self.admission.place(len(entry.prompt), partial(self.index.match, waiting.prefix))
            assert replica is not None, f"no worker for request {entry.uid} though {candidates} have credit"
            # Without keys there is one caller, and nothing to share.
            self.queue.admit(entry.uid, self.index.match(waiting.prefix, replica) if entry.caller else 0)
            self.admission.take(replica)
            entry.state, entry.replica = State.RUNNING, replica
            entry.queue_s = self._clock() - entry.accepted_at_s
            self._outlet.admit(replica, *entry.to_admit())
        num_requests, num_tokens = num_requests - len(self.queue), num_tokens - self.queue.num_tokens
        self._drain.observe(self._clock(), num_requests, num_tokens, is_busy=len(self.queue) > 0)

    def _choose(self, candidates: list[int]) -> Waiting:
        """Asks the policy."""
        window = self.queue.window(self._policy.window)
        chosen = self._policy.choose(
            window, lambda waiting: max(self.index.match(waiting.prefix, replica) for replica in candidates)
        )
        return window[chosen]

    def _refusal(self, caller: int, prompt: Int32Array) -> HiserveError | None:
        if self._closed is not None:
            return self._closed
        if not len(prompt) or prompt.min() < 0:
            return RequestError("the prompt must have at least one token, and no negative token ids.", param="prompt")
        if len(prompt) >= self._max_len:
            return ContextLengthError(
                f"the prompt is too long: it has {len(prompt)} tokens; this model's maximum context length is "
                f"{self._max_len} tokens, reply included. Shorten the prompt.",
                param="prompt",
            )
        return None if self._make_room(caller, len(prompt)) else self._overload()

    def _make_room(self, caller: int, num_tokens: int) -> bool:
        """Says whether a request may be queued; where there is no room, callers who take most of it make some."""
        while not self.queue.has_room(num_tokens):
            crowding = self.queue.crowding(caller, num_tokens)
            if crowding is None:
                return False
            overload = self._overload()
            self.queue.remove(crowding.entry.uid)
            self._end(crowding.entry)
            self._outlet.failed(crowding.entry.uid, overload)
        return True

    def _overload(self) -> OverloadedError:
        return OverloadedError(
            f"{len(self.queue)} requests with {self.queue.num_tokens} prompt tokens wait for a worker; the limits are "
            f"{self._limits.max_queued_requests} and {self._limits.max_queued_tokens}. Try again later.",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> int:
        return self._drain.retry_after_s(len(self.queue), self.queue.num_tokens)

    def _end(self, entry: Entry) -> None:
        if entry.replica is not None:
            self.admission.give_back(entry.replica)
        self.ledger.end(entry)


def _is_open(entry: Entry) -> bool:
    return entry.state is not State.ABORTING
