"""Every decision of the scheduler, without sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol

from hiserve.config.options import Scheduler
from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason
from hiserve.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    HiserveError,
    OverloadedError,
    RequestError,
    UnavailableError,
    to_error,
)
from hiserve.ipc.messages import Admit, Generate, Ready
from hiserve.ipc.updates import UNREPORTED, RequestFacts, RequestUpdates, TokenDelta
from hiserve.scheduler.crash_isolation import CrashIsolation
from hiserve.scheduler.ledger import Entry, Ledger, ReplayCounter, RequestState
from hiserve.scheduler.placement import Placement, PrefixIndex
from hiserve.scheduler.queue import DrainRate, Policy, Queue, QueuedRequest

_GIVEN_UP = "the worker died {} times with this request, at last with no other. It was given up; do not send it again."


class DispatcherEvents(Protocol):
    """Receives the decisions: ``process.SchedulerService``, which imports this file. No call may block or fail."""

    def updated(self, updates: RequestUpdates) -> None:
        """Sends the client output of requests."""

    def failed(self, uid: int, error: HiserveError) -> None:
        """Sends the client the error of a request that failed or was refused."""

    def admit(self, replica: int, message: Admit, tokens: Int32Array) -> None:
        """Sends a worker a request."""

    def drop(self, replica: int, uids: list[int]) -> None:
        """Asks a worker to abort requests."""


class Dispatcher:
    """Joins ledger, queue, policy, placement and prefix index.

    A request is in the ledger from ``submit`` to its one terminal message; while it is queued
    it is in the queue or isolated, and from its admission on it holds one credit of its worker. When the worker dies,
    another one continues it after the tokens that the client has.

    Args:
        events: Receives every message.
        policy: Chooses the next request.
        index: Prefixes that workers have cached; empty.
        limits: Of the queue's length and of waiting times.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        events: DispatcherEvents,
        policy: Policy,
        index: PrefixIndex,
        limits: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = events
        self._policy = policy
        self._clock = clock
        self._limits = limits
        self.ledger = Ledger()
        self.queue = Queue(limits.max_queued_requests, limits.max_queued_tokens)
        self.placement = Placement()
        self._drain = DrainRate()
        self.isolation = CrashIsolation()
        self.index = index
        self.replays = ReplayCounter()
        self._max_len = 0
        self._closed: HiserveError | None = None

    def submit(self, message: Generate, prompt: Int32Array) -> None:
        """Accepts a request or reports its refusal. It is admitted by the next ``dispatch``.

        Raises:
            MalformedError: Its uid is in use.
        """
        if not self.queue.has_room(len(prompt)):
            self.dispatch()  # in a burst, only requests without a credit are queued
        refusal = self._refusal(message.caller, prompt)
        if refusal is not None:
            self._events.failed(message.uid, refusal)
            return
        entry = self.ledger.accept(message, prompt, self._clock())
        self.queue.push(self._queued(entry))

    def abort(self, uids: list[int]) -> None:
        """Ends queued requests now, and running ones when their worker answers; others have ended."""
        drops: dict[int, list[int]] = {}
        dropped: list[Entry] = []
        for uid in uids:
            entry = self.ledger.get(uid)
            if entry is None or entry.state is RequestState.ABORTING:
                continue
            if entry.replica is None:
                self._take_out(entry)
                self._end(entry)
                dropped.append(entry)
            else:
                entry.state = RequestState.ABORTING
                drops.setdefault(entry.replica, []).append(uid)
        self._report_aborted(dropped)
        for replica, running in drops.items():
            self._events.drop(replica, running)

    def _report_aborted(self, ended: Sequence[Entry]) -> None:
        """Reports the end of requests that no worker has."""
        if not ended:
            return
        updates = RequestUpdates()
        updates.add(*(TokenDelta(finish=FinishReason.ABORT, uid=entry.uid) for entry in ended))
        self._events.updated(updates)

    def expire(self) -> None:
        """Ends requests past their deadlines: queued ones with an error, others with their output.

        The queue timeout does not apply to a request whose worker died.
        """
        timeout_s = self._limits.queue_timeout_s
        retry_after_s = self._retry_after_s()
        for entry in self._late(timeout_s, _is_new):
            self.queue.remove(entry.uid)
            self._end(entry)
            waited_s = self._clock() - entry.accepted_at_s
            message = f"no worker was free for {waited_s:.2f} s; the limit is {timeout_s:g} s. Try again later."
            self._events.failed(entry.uid, DeadlineError(message, retry_after_s=retry_after_s))
        self.abort([entry.uid for entry in self._late(self._limits.request_timeout_s, _is_open)])

    def seconds_to_deadline(self) -> float | None:
        """Returns the seconds until ``expire`` has something to do, at least 0; None when no deadline is ahead."""
        ahead = []
        if self._limits.queue_timeout_s and len(self.queue) and (first := next(filter(_is_new, self.ledger), None)):
            ahead.append(first.accepted_at_s + self._limits.queue_timeout_s)
        if self._limits.request_timeout_s and (oldest := next(filter(_is_open, self.ledger), None)):
            ahead.append(oldest.accepted_at_s + self._limits.request_timeout_s)
        return max(0.0, min(ahead) - self._clock()) if ahead else None

    def _late(self, timeout_s: float, concerns: Callable[[Entry], bool]) -> list[Entry]:
        """Returns the concerned requests accepted ``timeout_s`` ago or earlier; 0 is no limit."""
        if not timeout_s:
            return []
        latest = self._clock() - timeout_s
        old = takewhile(lambda entry: entry.accepted_at_s <= latest, self.ledger)  # the ledger is in this order
        return list(filter(concerns, old))

    def worker_ready(self, replica: int, ready: Ready) -> None:
        """A worker, new or restarted, can take requests."""
        self._max_len = ready.max_len
        self.placement.join(replica, ready.max_running)
        self.index.attach(replica, ready.namespace)

    def worker_lost(self, replica: int) -> list[int]:
        """Removes a dead worker with its credits and its cache.

        Its requests return to the front of the queue. One that was being aborted ends; one that may have killed the
        worker is isolated, or fails.

        Returns:
            The requests it held.
        """
        self.placement.leave(replica)
        self.index.detach(replica)
        held = self.ledger.running_on(replica)
        aborted = [entry for entry in held if entry.state is RequestState.ABORTING]
        for entry in held:
            entry.leave()
        for entry in aborted:
            self._end(entry)
        self._report_aborted(aborted)
        free, culprits = self.isolation.isolate(replica, held)
        if replica in self.isolation:
            self.placement.reserve(replica)
        self.queue.requeue([self._queued(entry) for entry in free])
        for entry in culprits:
            self._end(entry)
            self._events.failed(entry.uid, EngineError(_GIVEN_UP.format(entry.num_crashes)))
        return [entry.uid for entry in held]

    def worker_abandoned(self, replica: int) -> None:
        """Lets other workers run the requests that were isolated on a worker that has no successor."""
        self.placement.unreserve(replica)
        self.queue.requeue([self._queued(entry) for entry in self.isolation.dissolve(replica)])

    def close(self, error: UnavailableError) -> None:
        """Refuses queued and later requests: no worker is left and none will come."""
        self._closed = error
        for entry in [entry for entry in self.ledger if entry.state is RequestState.QUEUED]:
            self._take_out(entry)
            self._end(entry)
            self._events.failed(entry.uid, error)

    def report(self, replica: int, updates: RequestUpdates) -> None:
        """Records a worker's updates and passes them on; failures one by one, and pages not at all.

        Raises:
            MalformedError: It reports on requests it does not hold; nothing was recorded.
        """
        entries = self.ledger.rows(updates.uids, replica)
        failures = self.ledger.rows([uid for uid, _, _ in updates.failed], replica)
        self.index.update(replica, updates.published, updates.removed)
        failed, updates.failed, updates.published, updates.removed = updates.failed, [], b"", b""
        if entries:
            self._record(entries, updates)
            self._events.updated(updates)
        for entry, (_, code, message) in zip(failures, failed, strict=True):
            self._end(entry)
            self._events.failed(entry.uid, to_error(code, message))

    def _record(self, entries: Sequence[Entry], updates: RequestUpdates) -> None:
        """Records output in the ledger, and corrects the facts for the client; most rows have none."""
        tokens, at = updates.tokens.tolist(), 0
        rows = zip(entries, updates.counts, updates.score_words, updates.finishes, strict=True)
        for index, (entry, count, num_score_words, finish) in enumerate(rows):
            self.queue.charge(entry.caller, count)
            entry.record(tokens[at : at + count], num_score_words)
            at += count
            cached, drafts = updates.cached[index], updates.drafts[index]
            if cached is not None or drafts is not None or entry.queue_s != UNREPORTED:
                if cached is not None and entry.num_admissions > 1:
                    self.replays.found(cached)
                facts = RequestFacts(cached=cached, drafts=drafts)
                entry.correct(facts)
                updates.set_facts(index, facts)
            if finish:
                self._end(entry)

    def dispatch(self) -> None:
        """Admits waiting requests while workers have credit."""
        for suspected in filter(self.placement.is_joined, self.isolation):
            group = self.isolation.next(suspected)
            if group is None:
                self.placement.unreserve(suspected)
            for entry in group or ():
                self._admit(entry, suspected)
        num_requests, num_tokens = len(self.queue), self.queue.num_tokens
        while len(self.queue) and (candidates := self.placement.with_credit()):
            waiting = self._choose(candidates)
            entry = waiting.entry
            replica = self.placement.place(len(entry.prompt), partial(self.index.match, waiting.prefix), entry.session)
            assert replica is not None, f"no worker for request {entry.uid} though {candidates} have credit"
            self.queue.admit(entry.uid, self._num_free(waiting, replica))
            self._admit(entry, replica)
        num_requests, num_tokens = num_requests - len(self.queue), num_tokens - self.queue.num_tokens
        self._drain.observe(self._clock(), num_requests, num_tokens, is_busy=len(self.queue) > 0)

    def _num_free(self, waiting: QueuedRequest, replica: int) -> int:
        """Returns the tokens of a prompt that are free for its caller: cached ones, and all after a worker's death."""
        entry = waiting.entry
        if entry.num_admissions or not entry.caller:  # without keys there is one caller, so fairness needs no counts
            return len(entry.prompt) if entry.num_admissions else 0
        return self.index.match(waiting.prefix, replica)

    def _admit(self, entry: Entry, replica: int) -> None:
        """Sends a worker a request, or the rest of it."""
        self.placement.take_credit(replica)
        if entry.num_admissions:
            self.replays.begin(entry.num_tokens)
        entry.enter(replica, self._clock())
        self._events.admit(replica, *entry.to_admit())

    def _choose(self, candidates: list[int]) -> QueuedRequest:
        """Returns the policy's choice."""
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
            return ContextLengthError.of(f"{len(prompt)} tokens", self._max_len, "prompt")
        return None if self._make_room(caller, len(prompt)) else self._overload()

    def _make_room(self, caller: int, num_tokens: int) -> bool:
        """Returns whether a request may be queued; a full queue sheds requests of callers above their share."""
        while not self.queue.has_room(num_tokens):
            crowding = self.queue.shed_candidate(caller, num_tokens)
            if crowding is None:
                return False
            overload = self._overload()
            self.queue.remove(crowding.entry.uid)
            self._end(crowding.entry)
            self._events.failed(crowding.entry.uid, overload)
        return True

    def _overload(self) -> OverloadedError:
        return OverloadedError(
            f"{len(self.queue)} requests with {self.queue.num_tokens} prompt tokens wait for a worker; the limits are "
            f"{self._limits.max_queued_requests} and {self._limits.max_queued_tokens}. Try again later.",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> int:
        return self._drain.retry_after_s(len(self.queue), self.queue.num_tokens)

    def _queued(self, entry: Entry) -> QueuedRequest:
        """Returns an entry in the form of the queue."""
        prefix = self.index.prefix(entry.tokens, entry.namespace)
        return QueuedRequest(entry, prefix, self._policy.rank(entry.priority))

    def _take_out(self, entry: Entry) -> None:
        """Removes a request from the queue, or from isolation."""
        if entry.uid in self.queue:
            self.queue.remove(entry.uid)
        else:
            self.isolation.remove(entry)

    def _end(self, entry: Entry) -> None:
        if entry.replica is not None:
            self.placement.return_credit(entry.replica)
        self.ledger.end(entry)


def _is_open(entry: Entry) -> bool:
    return entry.state is not RequestState.ABORTING


def _is_new(entry: Entry) -> bool:
    return entry.state is RequestState.QUEUED and not entry.num_admissions
