"""Plans each step, its rows, tokens and pages, and commits its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache, Tier
from hiserve.config.caching import StorePrefetch
from hiserve.core.plan import (
    MAX_SCORED_TOKENS,
    NO_SNAPSHOTS,
    NO_WRITES,
    BatchPlan,
    BoolArray,
    Int64Array,
    RowAdmit,
    StepResult,
)
from hiserve.core.request import FinishReason
from hiserve.core.transfers import CopyAck, StoreEnds
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.admission import Admission
from hiserve.engine.budget import Allocation, allocate_tokens, decode_first
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.drafting import Drafting
from hiserve.engine.grammars import GrammarRows, no_vocabulary
from hiserve.engine.host_loads import HostLoads, LoadCostModel
from hiserve.engine.oom_recovery import OomRecovery
from hiserve.engine.output import pick_scores, report
from hiserve.engine.queue import Request, WaitingQueue
from hiserve.engine.row_ends import Retainer, RowEnds
from hiserve.engine.rows import RowState
from hiserve.engine.store_prefetch import StorePrefetcher
from hiserve.engine.watching import row_facts
from hiserve.errors import HiserveError
from hiserve.ipc.cache_stats import LOCAL_TIERS, NodeFacts, StoreStats, TierName
from hiserve.ipc.lifecycle import StepSnapshot
from hiserve.ipc.messages import GateCounts, WorkerStats
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.ipc.watching import RowFacts
from hiserve.spec.adaptive import DraftController
from hiserve.spec.history import ReplyHistory


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan whose result is not in."""

    plan: BatchPlan
    rows: Int64Array  # ``[B]``: its rows
    # int64 ``[B]``; of these rows when it was made; a row may have another request when the result comes.
    generations: Int64Array

    def is_current(self, state: RowState) -> BoolArray:
        """Returns which rows still have the request of the plan, bool ``[B]``."""
        current: BoolArray = state.generation[self.rows] == self.generations
        return current

    def snapshot(self, state: RowState) -> StepSnapshot:
        """Returns the plan for a crash report, without the requests that have ended."""
        plan = self.plan
        return StepSnapshot(
            step=plan.step_id,
            uids=state.uid[self.rows[self.is_current(state)]].tolist(),
            num_tokens=int(plan.num_new.sum()),
            num_drafts=int(plan.num_draft.sum()),
            waits=list(plan.waits),
            copies=[copy.op for copy in plan.copies],
        )


class Planner:
    """Plans steps over the rows and the cache. Integers only; no tensors.

    A plan may be made while earlier ones run: lengths are upper bounds (``pending``) that results correct. The result of
    a row that has another request by then is ignored.

    Args:
        max_rows: Requests that run at once.
        max_len: Longest prompt plus output, in tokens.
        max_batched_tokens: Budget of a step, in tokens.
        num_draft: Drafts proposed for a row when it samples, and verified in its next step; 0 is plain decoding.
        controller: Chooses a number up to that for each step; None takes all.
        history: Keeps replies, for a proposer that follows them.
        overlaps_loads: A row whose load is unfinished may start when no other row runs: its forward waits for the load
            on the device.
        costs: Whether a load is worth it; measured unless given.
        store_prefetch: How long a request waits for its prefix from the store; None without one.
        store_timeout_s: Longest, where that is ``timeout``.
        grammars: Compiles and follows grammars; without them, a request with one fails.
        retainer: Has the clock of retained prefixes; None has the monotonic one.
        windows: Limits of tails; None where each boundary is a resume point.
        max_depth: The longest path of drafts, where they may be trees; 0 where all are chains.
    """

    def __init__(
        self,
        *,
        cache: PrefixCache,
        max_rows: int,
        max_len: int,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        num_draft: int = 0,
        controller: DraftController | None = None,
        history: ReplyHistory | None = None,
        overlaps_loads: bool = False,
        costs: LoadCostModel | None = None,
        store_prefetch: StorePrefetch | None = None,
        store_timeout_s: float = 0.0,
        grammars: GrammarRows | None = None,
        retainer: Retainer | None = None,
        windows: WindowLimits | None = None,
        max_depth: int = 0,
    ) -> None:
        self._cache = cache
        self._retainer = retainer or Retainer(cache)
        self._rows = RowState(cache, max_rows, max_len, num_draft, eos_token_ids, windows, max_depth=max_depth)
        self._costs = costs or LoadCostModel(max_batched_tokens)
        self._cache_counters = CacheCounters(cache)
        self._host_loads = HostLoads(cache, self._rows, self._costs, self._cache_counters)
        self._prefetcher = StorePrefetcher(cache, self._cache_counters, self._costs, store_prefetch, store_timeout_s)
        self._overlaps_loads = overlaps_loads
        self._waiting = WaitingQueue()
        self.grammars = GrammarRows(no_vocabulary) if grammars is None else grammars
        self._max_len = max_len
        self._oom_recovery = OomRecovery(max_batched_tokens)
        self._backoff = self._oom_recovery.backoff
        self._admission = Admission(
            waiting=self._waiting,
            cache=cache,
            rows=self._rows,
            host_loads=self._host_loads,
            prefetcher=self._prefetcher,
            costs=self._costs,
            cache_counters=self._cache_counters,
            grammars=self.grammars,
        )
        of_rows = (self._rows, self._waiting, self._host_loads, self.grammars)
        self._ends = RowEnds(cache, *of_rows, self._retainer, self._oom_recovery, history)
        self._num_draft = num_draft
        self._drafting = Drafting(self._rows, num_draft, controller, history)
        self._step_id, self._in_flight = 0, deque[InFlight]()
        self._updates = RequestUpdates()
        self._counters = dict.fromkeys(("generated_tokens", "deferred_steps"), 0)

    # --- requests -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; its prompt must be shorter than ``max_len``."""
        assert request.sampling.seed is not None, f"request {request.uid} came without a seed"
        assert request.tokens.size < self._max_len, f"request {request.uid} has {request.tokens.size} tokens"
        self._waiting.append(request)
        self._prefetcher.add(request)

    def abort(self, uids: list[int]) -> None:
        """Ends requests; each that is still here is reported once as aborted."""
        wanted = set(uids)
        for request in self._waiting:
            if request.uid in wanted:
                self._waiting.remove(request)
                self._prefetcher.drop(request.uid)
                self._updates.add(TokenDelta(finish=FinishReason.ABORT, uid=request.uid))
        for row in self._rows.active[np.isin(self._rows.uid[self._rows.active], uids)].tolist():
            self._updates.add(TokenDelta(finish=FinishReason.ABORT, uid=self._ends.end(row).uid))

    def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        """Evicts prefixes without a running request from own tiers, and with the device's the replies kept; returns the pages."""
        if Tier.DEVICE in tiers:
            self._drafting.forget()
        local = [tier for tier in Tier if tier in tiers]
        return self._cache.flush(None if len(local) == len(Tier) else local[0]) if local else 0

    def inspect(self, depth: int) -> list[NodeFacts]:
        """Returns the radix tree from its roots to ``depth`` levels below them."""
        return self._cache.outline(depth)

    def watch(self) -> list[RowFacts]:
        """Returns the rows in use."""
        return row_facts(self._rows, self._host_loads.runnable(self._rows.active))

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a copy is in flight, or an update or a time of the host was not taken."""
        has_requests = (
            len(self._waiting) or self._rows.active.size or self._in_flight or not self._cache.host_times.is_empty
        )
        has_copies = self._host_loads.has_copies or self._prefetcher.has_work
        return bool(has_requests or has_copies or not self._updates.is_empty)

    @property
    def is_copying(self) -> bool:
        """Whether pages are being copied to slower tiers, or wait for that."""
        return self._host_loads.has_copies or self._prefetcher.is_uploading

    @property
    def num_to_upload(self) -> int:
        """Pages that wait for the store, those included that cannot get there."""
        return self._cache.store.num_to_upload

    def complete_transfers(self, acks: Sequence[CopyAck], found: Sequence[StoreEnds] = ()) -> None:
        """Completes copies, and lookups of what a store has; a row whose load failed starts over."""
        for request, error in self.grammars.take_errors():
            self._waiting.remove(request)
            self._prefetcher.drop(request.uid)
            self._updates.failed.append((request.uid, error.code, error.message))
        self._prefetcher.found(found)
        acks = self._prefetcher.complete(acks)
        lost = self._host_loads.complete(acks) if acks else []
        if lost:
            self._oom_recovery.lost_loads(len(lost))
            self._ends.requeue(lost)

    def grow_host(self, num_pages: int) -> None:
        """Makes host pages below ``num_pages`` usable."""
        self._prefetcher.grow_host(num_pages)

    def stats(self, store: StoreStats | None = None, dropped: int = 0, gate: GateCounts | None = None) -> WorkerStats:
        """Returns gauges and counters as of now; the arguments are the counts of the executing half."""
        counts = self._cache_counters.stats(store)
        return WorkerStats(
            running=self._rows.active.size,
            waiting=len(self._waiting),
            free_pages=counts.device.num_free,
            evictable_pages=counts.device.num_evictable,
            steps=self._step_id,
            evicted_pages=counts.device.num_evicted,
            dropped_event_batches=dropped,
            graph_gate=gate or {},
            step_faults=dict(self._oom_recovery.counts),
            cache=counts,
            drafts=self._drafting.stats(),
            grammars=self.grammars.stats(),
            **self._admission.counters,
            preemptions=self._ends.num_preempted,
            stale_rows=self._ends.num_stale,
            **self._counters,
        )

    def in_flight(self) -> tuple[list[StepSnapshot], list[int]]:
        """Returns the steps whose results are not in, and the copies that have not ended, by number."""
        return [step.snapshot(self._rows) for step in self._in_flight], self._cache.copies_in_flight()

    def take_report(self) -> RequestUpdates | None:
        """Returns the changes since the last call; None without any."""
        updates, self._updates = self._updates, RequestUpdates()
        for tier in Tier:
            published, removed = self._cache.take_events(tier)
            updates.published += published
            updates.removed += removed
        return None if updates.is_empty else updates

    # --- plan -----------------------------------------------------------------------------

    def plan(self) -> BatchPlan | None:
        """Returns the next step, or None when no row can do anything now."""
        self._retainer.expire()
        rows, allocation = self._plan_running()
        admit: list[RowAdmit] = []
        if len(self._waiting):
            num_to_score = MAX_SCORED_TOKENS - int(allocation.num_scored.sum())
            admit, starting, chunks = self._admission.plan(
                self._backoff.num_tokens - int(allocation.num_new.sum()), num_to_score
            )
            rows, allocation = np.concatenate((rows, starting)), allocation.join(chunks)
        rows, allocation = decode_first(rows, self._rows.cut(rows, allocation))
        waits: tuple[int, ...] = ()
        if not rows.size and self._overlaps_loads:
            rows, allocation, waits = self._plan_loading()
        num_tokens = int(allocation.num_new.sum())
        copies = self._host_loads.take(num_tokens)
        lookups, exchanged = self._prefetcher.take()
        retained, retained_until_s = self._cache.host_times.take()
        if not (rows.size or copies or lookups or exchanged or retained.size):
            return None
        self._step_id += 1
        state = self._rows
        max_len = state.plan(rows, allocation.num_new, allocation.num_draft, allocation.samples)
        num_propose = self._drafting.propose(rows[allocation.samples], is_allowed=not self._backoff.is_reduced)
        plan = BatchPlan(
            step_id=self._step_id,
            rows=rows.astype(np.int32),
            num_new=allocation.num_new,
            num_draft=allocation.num_draft,
            samples=allocation.samples,
            num_scored=allocation.num_scored,
            max_len=max_len,
            num_propose=num_propose,
            continuations=self._drafting.continuations(rows[allocation.samples], num_propose),
            is_cold=self._drafting.is_cold,
            release=state.take_released(),
            admit=tuple(admit),
            copies=copies + exchanged,
            waits=waits,
            lookups=lookups,
            host_release=self._cache.take_freed_host_pages(),
            host_retained=retained,
            host_retained_until_s=retained_until_s,
            table=state.tables.take_writes(),
            window_table=NO_WRITES if state.windows is None else state.windows.tables.take_writes(),
            snapshots=NO_SNAPSHOTS if state.snapshots is None else state.snapshots.take_writes(),
            relocation_version=self._cache.relocation_version,
            may_replay=self._backoff.may_replay,
            awaits_masks=self.grammars.is_used and self.grammars.constrain_any(rows[allocation.samples]),
        )
        self._cache.begin_after(self._step_id)
        self._costs.begin_step(rows.size, num_tokens - int(allocation.num_draft.sum()))
        self._in_flight.append(InFlight(plan, rows, state.generation[rows]))
        return plan

    def _plan_running(self) -> tuple[Int64Array, Allocation]:
        """Splits the budget over running rows and gives them pages; preempts the latest row where pages are too few."""
        while True:
            rows = self._host_loads.runnable(self._rows.active)
            allocation = self._allocate(rows)
            if self._rows.grow(rows, allocation.num_new):
                return rows, allocation
            self._ends.preempt(int(rows[-1]))

    def _allocate(self, rows: Int64Array) -> Allocation:
        """Returns the allocation of these rows, int64 ``[B]``, in a step of their own."""
        state = self._rows
        return allocate_tokens(
            known=state.known[rows],
            pending=state.pending[rows],
            computed=state.computed[rows],
            limit=state.limit[rows],
            to_score=state.num_to_score(rows),
            drafted=self._drafting.to_verify(rows) if self._num_draft and not self._backoff.is_reduced else None,
            max_len=self._max_len,
            budget=self._backoff.num_tokens,
        )

    def _plan_loading(self) -> tuple[Int64Array, Allocation, tuple[int, ...]]:
        """Starts the rows whose loads arrive first, because no other row can run; their forward waits for the loads."""
        rows = self._host_loads.next_rows()  # later ones would delay them; the link is as busy meanwhile
        allocation = self._allocate(rows)
        if not self._rows.grow(rows, allocation.num_new):  # offloads or drafts in flight still hold the promised pages
            rows, allocation = rows[:0], allocation.pick(rows[:0])
        rows, allocation = decode_first(rows, self._rows.cut(rows, allocation))
        return rows, allocation, self._host_loads.start(rows)

    def fail(self, row: int, error: HiserveError) -> None:
        """Ends the request of a row with an error; results of steps in flight do not count for it."""
        self._updates.failed.append((self._ends.release(row).uid, error.code, error.message))

    # --- commit ---------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a row waits for its prefix."""
        return self._host_loads.is_waited_for

    @property
    def awaits_acks(self) -> bool:
        """Whether the oldest step in flight reads a load that has not been acknowledged: it may have failed."""
        return self._host_loads.is_open(self._in_flight[0].plan.waits)

    def commit(self, result: StepResult) -> None:
        """Applies the result of the oldest step in flight; its loads must be acknowledged (``awaits_acks``)."""
        assert not self.awaits_acks, f"step {result.step_id} read loads that are not acknowledged"
        step = self._in_flight.popleft()
        plan = step.plan
        assert plan.step_id == result.step_id, f"step {plan.step_id} was due, {result.step_id} came"
        seconds = self._costs.end_step(has_run=not result.deferred and result.fault is None)
        state = self._rows
        ok = step.is_current(state)
        if result.deferred:
            self._counters["deferred_steps"] += 1
            self._ends.requeue(step.rows[ok].tolist())
            return
        if result.fault is not None:
            self._updates.failed += self._ends.undo(step.rows[ok], plan.num_tokens, result.fault)
            return
        if result.faults.size:
            faulty = np.isin(step.rows, result.faults)
            for row in step.rows[faulty & ok].tolist():
                self._updates.failed += self._ends.refuse(row)
            ok &= ~faulty
        settled = step.rows[ok]
        self._oom_recovery.passed(state, settled)
        state.settle(settled, plan.num_new[ok], plan.num_draft[ok])
        sampled = ok[plan.samples]
        rows, num_draft = step.rows[plan.samples][sampled], plan.num_draft[plan.samples][sampled]
        self._drafting.record(plan, rows, num_draft, result.counts[sampled], seconds)
        counts, tokens = result.counts[sampled], result.tokens[sampled]
        ends = self.grammars.advance(rows, counts, tokens)
        counts, finishes, tokens = state.append(rows, num_draft, counts, tokens, ends)
        self._counters["generated_tokens"] += tokens.size
        self._drafting.verified(rows, num_draft, counts)
        scores = pick_scores(plan, result, ok, counts, state)
        report(self._updates, state, self._drafting, rows, counts, finishes, tokens, scores)
        state.publish(settled, plan.step_id)
        for row in rows[finishes != 0].tolist():
            self._ends.end(row)
        self.grammars.spread(state.reply)
