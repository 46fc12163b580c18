"""The step loop: plan, submit, commit. Overlap is the number of steps planned ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from hiserve.core.plan import BatchPlan, Int32Array, MaskPlan, StepResult
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.transfers import CopyAck, StoreEnds
from hiserve.engine.grammars import Masks
from hiserve.engine.kv_event_sender import KvEventSender
from hiserve.engine.planner import Planner
from hiserve.engine.queue import Request
from hiserve.engine.watching import StepLog
from hiserve.ipc.cache_stats import LOCAL_TIERS, NodeFacts, StoreStats, TierName
from hiserve.ipc.lifecycle import CrashSnapshot
from hiserve.ipc.messages import Admit, GateCounts, WorkerStats
from hiserve.ipc.updates import RequestUpdates
from hiserve.ipc.watching import RowFacts, StepRecord, Subject

MAX_ACK_WAIT_S = 0.002  # while nothing runs; messages wait as long
LEAD_S = 0.003  # from the start of planning a step to its launch, at most
RATE = 0.3  # weight of a new time against earlier ones
_FINE_TOKENS = 64  # steps of fewer tokens differ by their rows only


class PlanExecutor(Protocol):
    """The executing half, as the loop sees it: runs plans in the order of their submission.

    It keeps torch out of this module: the loop and the service around it run with any executor, and without torch.
    """

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        """Starts a step after those before it, or, if it awaits masks, its forward; its exception is raised by ``result()``."""

    def drafts(self) -> Int32Array:
        """Returns the drafts of every row, int32 ``[R, max_draft]``, once the steps before the undrawn one are done."""

    def lend_masks(self, num_entries: int, num_masks: int) -> tuple[Int32Array, Int32Array]:
        """Lends the arrays of a ``MaskPlan``, likewise."""

    def draw(self, masks: MaskPlan | None) -> None:
        """Starts the second half of the step that awaits masks; None leaves all its rows free."""

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        """Returns the copies between tiers that have ended; waits up to ``wait_s`` seconds for one."""

    def take_found(self) -> list[StoreEnds]:
        """Returns the answers to lookups in the store since the last call."""

    def store_stats(self) -> StoreStats | None:
        """Returns the counts of the store beyond the host, without waiting for it; None without one."""

    def gate_counts(self) -> GateCounts:
        """Returns the gate's decisions until now: decision -> reason -> steps."""

    def decision_of(self, step_id: int) -> tuple[str, str]:
        """Returns the gate's decision on a step in flight, or on the last that ended, and the reason; empty for others."""

    def last_decision(self) -> tuple[int, str]:
        """Returns the latest step that passed the gate, and the decision in words; touches no device."""

    def clear_store(self) -> None:
        """Begins to empty the store beyond the host; there must be one."""

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this may be copied to and from."""

    def close(self) -> None:
        """Finishes the submitted steps and frees all resources."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of an engine before its first step."""

    max_running: int
    max_len: int  # longest prompt plus output, in tokens
    num_pages: int  # KV pages, the padding page not counted
    page_size: int  # tokens per page
    namespace: bytes  # base digest of everything that keeps caches apart but the tenant
    startup_s: dict[str, float]  # seconds per start-up phase, in order
    measurements: StartupMeasurements = NO_MEASUREMENTS  # for the worker after this one


class StepTimer:
    """Estimates when the step in flight ends, from the times of earlier steps of its size."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds: dict[int, float] = {}  # by size
        self._in_flight: deque[tuple[int | None, float]] = deque()  # size, begin
        self._last_end_s = 0.0

    def begin(self, plan: BatchPlan) -> None:
        """Records the launch of a step. The time of one that waits for loads is unknown."""
        self._in_flight.append((None if plan.waits else _size(plan.num_tokens), self.clock()))

    def end(self) -> tuple[float, float]:
        """Records the end of the oldest step in flight; returns its begin, not before the end of the step before, and its end."""
        size, begin_s = self._in_flight.popleft()
        begin_s, self._last_end_s = max(begin_s, self._last_end_s), self.clock()
        if size is not None:
            took_s = self._last_end_s - begin_s
            before_s = self._seconds.get(size, took_s)
            self._seconds[size] = before_s + RATE * (took_s - before_s)
        return begin_s, self._last_end_s

    def time_left_s(self) -> float:
        """Returns the seconds until the only step in flight ends, less the time of planning the next one.

        0 where its time is unknown, and with none in flight or several.
        """
        if len(self._in_flight) != 1:
            return 0.0
        size, begin_s = self._in_flight[0]
        expected_s = 0.0 if size is None else self._seconds.get(size, 0.0)
        return max(0.0, max(begin_s, self._last_end_s) + expected_s - LEAD_S - self.clock())


def _size(num_tokens: int) -> int:
    """Returns a class of steps with about as many tokens."""
    return -num_tokens.bit_length() if num_tokens <= _FINE_TOKENS else -(-num_tokens // _FINE_TOKENS)


class Engine:
    """Plans, submits and commits steps.

    Args:
        depth: Steps in flight while the next is planned: 0 waits for each, 1 hides the planning, and the masks of grammars.
        shares_prefixes: Requests of one namespace reuse each other's prefixes.
        kv_events: Publishes the cache's events after each step; closed with the engine.
        timer: Estimates when the step in flight ends; by the monotonic clock if None.
        has_persistent_tiers: Pages on slower tiers outlive this process.
    """

    def __init__(
        self,
        planner: Planner,
        executor: PlanExecutor,
        depth: int,
        facts: EngineFacts,
        *,
        shares_prefixes: bool = True,
        kv_events: KvEventSender | None = None,
        timer: StepTimer | None = None,
        has_persistent_tiers: bool = False,
    ) -> None:
        self.facts = facts
        self._has_persistent_tiers = has_persistent_tiers
        self._shares_prefixes = shares_prefixes
        self._planner = planner
        self._executor = executor
        self._depth = depth
        self._kv_events = kv_events
        self._in_flight: deque[tuple[BatchPlan, Future[StepResult]]] = deque()
        self._timer = timer or StepTimer()
        self._log: StepLog | None = None  # while somebody watches
        self._masks: Callable[[], Masks] | None = None  # of the step submitted last, whose draw has not begun
        self._is_consistent = True
        self._publish()  # pages of a former process

    def add(self, admit: Admit, tokens: Int32Array) -> None:
        """Queues a request; tokens int32 ``[n]`` are its prompt, then the tokens generated before."""
        tenant = admit.namespace if self._shares_prefixes else admit.namespace + b"%d" % admit.uid
        self._planner.add(
            Request(
                uid=admit.uid,
                tokens=tokens,
                num_prompt=admit.num_prompt,
                sampling=admit.sampling,
                tenant=tenant,
                choice=admit.choice,
                priority=admit.priority,
                account=b"%d" % admit.caller if admit.caller and admit.namespace else None,
                num_reported=admit.num_scored,
                retain=admit.retain if self._shares_prefixes else (),
            )
        )

    def abort(self, uids: list[int]) -> None:
        """Ends requests; each that has not ended yet is reported once."""
        self._planner.abort(uids)

    def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        """Empties tiers of the prefix cache but for prefixes in use; returns the pages emptied.

        A store is emptied later, and its pages, which others may share, are not counted.
        """
        num_pages = self._planner.flush(tiers)
        if "store" in tiers:
            self._executor.clear_store()
        self._publish()
        return num_pages

    def inspect(self, depth: int) -> list[NodeFacts]:
        """Returns the radix tree from its roots to ``depth`` levels below them."""
        return self._planner.inspect(depth)

    def watch(self, subject: Subject, since_s: float) -> tuple[float, list[RowFacts], list[StepRecord]]:
        """Returns the time, and the rows, or the steps that ended after ``since_s``; records steps for ``LEASE_S``."""
        now_s = self._timer.clock()
        if self._log is None or self._log.is_over(now_s):
            self._log = StepLog(self._planner.grammars.mask_s)
        self._log.renew(now_s)
        return (now_s, self._planner.watch(), []) if subject == "rows" else (now_s, [], self._log.since(since_s))

    @property
    def has_work(self) -> bool:
        """Whether ``step`` should be called again without waiting for a message."""
        return self._is_consistent and self._planner.has_work

    def step(self) -> RequestUpdates | None:
        """Plans and submits a step, then commits the oldest one when enough are in flight.

        After an exception the engine has no more work.
        """
        assert self._is_consistent, "a step of this engine has failed"
        self._is_consistent = False  # until this one has ended
        self._planner.complete_transfers(self._executor.take_acks(), self._executor.take_found())
        self._planner.grow_host(self._executor.num_ready_host_pages)
        if not self._wait_for_load():
            plan = self._planner.plan()
            self._draw()
            if plan is not None:
                self._timer.begin(plan)  # on CPU the step may run inside ``submit``
                self._in_flight.append((plan, self._executor.submit(plan)))
                if plan.awaits_masks:
                    self._start_masks(plan)
            elif not self._in_flight and self._planner.has_work:
                self._wait_for_ack(MAX_ACK_WAIT_S)  # only a copy can change anything
            if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
                self._commit()
            self._publish()
        self._is_consistent = True
        return self._planner.take_report()

    def _wait_for_load(self) -> bool:
        """Waits for a load while the device is busy: one that arrives before it is idle joins the next step, not the one after."""
        if not self._planner.is_loading:
            return False
        self._draw()
        left_s = self._timer.time_left_s()
        if left_s > 0:
            self._wait_for_ack(min(left_s, MAX_ACK_WAIT_S))
        return left_s > 0

    def _wait_for_ack(self, wait_s: float) -> None:
        self._planner.complete_transfers(self._executor.take_acks(wait_s))

    def _start_masks(self, plan: BatchPlan) -> None:
        """Starts the masks of the step submitted last, whose forward runs meanwhile: each depends on every token before it.

        With a depth the next step is planned before their draw: they are ready by then.
        """
        while len(self._in_flight) > 1:
            self._commit()
        begin_s = time.monotonic()
        self._masks = self._planner.grammars.masks(plan, self._executor.drafts, self._executor.lend_masks)
        self._planner.grammars.mask_s += time.monotonic() - begin_s
        if not self._depth:
            self._draw()

    def _draw(self) -> None:
        """Starts the second half of a step that awaits masks, if there is one.

        Rows that ended in a step before, or since, are drawn too; their results are ignored.
        """
        if self._masks is None:
            return
        begin_s = time.monotonic()
        masks, failed = self._masks()
        self._planner.grammars.mask_s += time.monotonic() - begin_s
        self._masks = None
        for row, error in failed.items():
            self._planner.fail(row, error)
        self._executor.draw(masks)

    def _commit(self) -> None:
        """Waits for the oldest step in flight, and for the loads that it read."""
        plan, future = self._in_flight.popleft()
        result = future.result()
        times_s = self._timer.end()
        if self._log is not None:
            self._record(self._log, plan, result, times_s)
        while self._planner.awaits_acks:
            self._wait_for_ack(MAX_ACK_WAIT_S)
        self._planner.commit(result)

    def _record(self, log: StepLog, plan: BatchPlan, result: StepResult, times_s: tuple[float, float]) -> None:
        if log.is_over(times_s[1]):
            self._log = None
        else:
            log.add(plan, result, times_s, self._executor.decision_of(plan.step_id), self._planner.grammars.mask_s)

    def stats(self) -> WorkerStats:
        """Returns gauges and counters after the last step."""
        dropped = 0 if self._kv_events is None else self._kv_events.num_dropped
        return self._planner.stats(self._executor.store_stats(), dropped, self._executor.gate_counts())

    def crash_snapshot(self) -> CrashSnapshot:
        """Returns the steps and copies in flight, also after a failed step; touches no device."""
        steps, pending_ops = self._planner.in_flight()
        decision_step, decision = self._executor.last_decision()
        return CrashSnapshot(steps, decision, decision_step, pending_ops)

    @property
    def is_copying(self) -> bool:
        """Whether pages that outlive this process are on their way to slower tiers, or wait for it."""
        return self._has_persistent_tiers and self._is_consistent and self._planner.is_copying

    @property
    def has_unsaved_pages(self) -> bool:
        """Whether ``is_copying``, or pages wait for the store that cannot get there."""
        return self.is_copying or self._planner.num_to_upload > 0

    def finish_copies(self, timeout_s: float) -> None:
        """Steps until every page is on its slower tiers, or the time is over."""
        end_s = time.monotonic() + timeout_s
        while self.is_copying and time.monotonic() < end_s:
            self.step()
            if not self.has_work:
                time.sleep(MAX_ACK_WAIT_S)

    def close(self) -> None:
        """Waits for the steps in flight and frees all resources."""
        self._executor.close()
        self._planner.grammars.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def _publish(self) -> None:
        if self._kv_events is not None:
            self._kv_events.send()
