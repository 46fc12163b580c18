"""Decides each step: who runs, how many tokens, on which pages; and takes the results in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.manager import CacheManager
from hiserve.cache.index.tier import Tier
from hiserve.config import StorePrefetch
from hiserve.core.copies import CopyAck
from hiserve.core.plan import MAX_SCORED_TOKENS, BatchPlan, RowAdmit, StepFault, StepResult
from hiserve.core.request import FinishReason
from hiserve.errors import EngineError, ResourceError
from hiserve.messages.cache import LOCAL_TIERS, NodeFacts, StoreStats, TierName
from hiserve.messages.lives import StepScene
from hiserve.messages.types import GateCounts, WorkerStats
from hiserve.spec.adaptive import DraftController
from hiserve.worker.admitter import Admitter
from hiserve.worker.budget import Share, decode_first, share_budget
from hiserve.worker.cache_stats import CacheCounts
from hiserve.worker.cache_tree import outline
from hiserve.worker.columns import Columns
from hiserve.worker.containment import Containment
from hiserve.worker.costs import Costs
from hiserve.worker.draft_choice import DraftChoice
from hiserve.worker.draft_counts import DraftCounts
from hiserve.worker.emission import Emission
from hiserve.worker.loading import Loading
from hiserve.worker.prefetch import Prefetches
from hiserve.worker.report import Report
from hiserve.worker.scene import step_scene
from hiserve.worker.scores import pick_scores
from hiserve.worker.stops import Stops
from hiserve.worker.tables import PageTables
from hiserve.worker.waiting import Request, WaitingQueue

Int64Array = NDArray[np.int64]

MAX_FAULTS = 1  # a row with a stale page table is recomputed this often before its request fails


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """What must be remembered of a plan until its result is in."""

    plan: BatchPlan
    rows: Int64Array
    admissions: Int64Array


class Planner:
    """Plans steps over the rows and the cache. Integers only; knows no device.

    A plan may be made while earlier ones run: lengths are upper bounds (``pending``) that
    results correct. A result for a row that has changed hands meanwhile is ignored.

    Args:
        cache: Pages and prefixes.
        max_rows: Requests that run at once.
        max_len: Longest prompt plus output, in tokens.
        max_batched_tokens: Budget of a step, in tokens.
        eos_token_ids: Tokens that end a reply.
        num_draft: Drafts proposed for a row whenever it samples, to be verified when it does so next; 0 is plain decoding.
        controller: Chooses how many, up to that; None always takes as many.
        overlaps_loads: A row whose load is unfinished may start when nobody else runs: its forward waits for the
            load on the device.
        costs: Says whether a load is worth it; measures it unless given.
        store_prefetch: How long a request waits for its prefix from the store; None without one.
        store_timeout_s: Longest, where that is ``timeout``.
    """

    def __init__(
        self,
        *,
        cache: CacheManager,
        max_rows: int,
        max_len: int,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        num_draft: int = 0,
        controller: DraftController | None = None,
        overlaps_loads: bool = False,
        costs: Costs | None = None,
        store_prefetch: StorePrefetch | None = None,
        store_timeout_s: float = 0.0,
    ) -> None:
        self._cache = cache
        self._rows = Columns(max_rows, max_len, cache.page_size, num_ahead=num_draft)
        self._tables = PageTables(cache, self._rows)
        self._costs = costs or Costs(max_batched_tokens)
        self._counts = CacheCounts(cache)
        self._loading = Loading(cache, self._rows, self._costs, self._counts)
        self._prefetches = Prefetches(cache, self._counts, self._costs, store_prefetch, store_timeout_s)
        self._overlaps_loads = overlaps_loads
        self._waiting = WaitingQueue()
        self._max_len = max_len
        self._stops = Stops(max_rows, eos_token_ids)
        self._containment = Containment(max_batched_tokens)
        self._limits = self._containment.limits
        self._admitter = Admitter(
            waiting=self._waiting,
            cache=cache,
            rows=self._rows,
            tables=self._tables,
            loading=self._loading,
            prefetches=self._prefetches,
            stops=self._stops,
            costs=self._costs,
            counts=self._counts,
            max_len=max_len,
        )
        self._num_draft = num_draft
        self._draft_counts = DraftCounts(self._rows)
        self._emission = Emission(self._rows, self._stops, self._draft_counts)
        self._choice = DraftChoice(self._rows, self._draft_counts, num_draft, controller)
        self._step_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._released: list[int] = []
        self._report = Report()
        self._counters = dict.fromkeys(("preemptions", "stale_rows", "deferred_steps"), 0)

    # --- requests -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request; its prompt must be shorter than ``max_len``."""
        assert request.sampling.seed is not None, f"request {request.uid} came without a seed"
        assert request.tokens.size < self._max_len, f"request {request.uid} has {request.tokens.size} tokens"
        self._waiting.append(request)
        self._prefetches.add(request)

    def abort(self, uids: list[int]) -> None:
        """Ends requests; each that is still here is reported once as aborted."""
        wanted = set(uids)
        for request in self._waiting:
            if request.uid in wanted:
                self._waiting.remove(request)
                self._prefetches.forget(request.uid)
                self._report.add_end(request.uid, FinishReason.ABORT)
        for row in self._rows.active[np.isin(self._rows.uid[self._rows.active], uids)].tolist():
            self._report.add_end(self._release(row).uid, FinishReason.ABORT)

    def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        """Evicts every prefix that no running request uses from tiers of the worker's own; returns how many pages."""
        local = [tier for tier in Tier if tier in tiers]
        return self._cache.flush(None if len(local) == len(Tier) else local[0]) if local else 0

    def inspect(self, depth: int) -> list[NodeFacts]:
        """Returns the radix tree from its roots to ``depth`` levels below them."""
        return outline(self._cache.tree, depth)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting, running or ended without having been reported."""
        has_requests = len(self._waiting) or self._rows.active.size or self._in_flight
        has_copies = self._loading.has_copies or self._prefetches.has_work
        return bool(has_requests or has_copies or not self._report.is_empty)

    @property
    def is_copying(self) -> bool:
        """Whether pages are on their way to slower tiers, or wait for it."""
        return self._loading.has_copies or self._prefetches.is_uploading

    def settle(self, acks: Sequence[CopyAck], found: Sequence[tuple[int, int]] = ()) -> None:
        """Takes in how copies ended, and (uid, pages) that a store has; a row whose load failed starts over."""
        self._prefetches.found(found)
        acks = self._prefetches.settle(acks)
        lost = self._loading.settle(acks) if acks else []
        if lost:
            self._containment.lost_loads(len(lost))
        for row in lost:
            self._waiting.put_back(self._release(row))

    def grow_host(self, num_pages: int) -> None:
        """Lets host pages below ``num_pages`` be used, besides those that were."""
        if num_pages > self._cache.host.pages.num_ready:
            self._cache.grow_host(num_pages)

    def stats(self, store: StoreStats | None = None, dropped: int = 0, gate: GateCounts | None = None) -> WorkerStats:
        """Returns gauges and counters as of now; what the arguments say is for others to count."""
        return WorkerStats(
            running=self._rows.active.size,
            waiting=len(self._waiting),
            free_pages=self._cache.pages.num_free,
            evictable_pages=self._cache.num_evictable,
            steps=self._step_id,
            evicted_pages=self._cache.num_evicted,
            dropped_event_batches=dropped,
            graph_gate=gate or {},
            step_faults=dict(self._containment.counts),
            generated_tokens=self._emission.num_generated,
            cache=self._counts.stats(store),
            drafts=self._draft_counts.stats(),
            **self._admitter.counters,
            **self._counters,
        )

    def in_flight(self) -> tuple[list[StepScene], list[int]]:
        """Returns the steps whose results are not in, and the copies that have not ended, by number."""
        steps = [step_scene(step.plan, step.rows, step.admissions, self._rows) for step in self._in_flight]
        return steps, [op.number for op in self._cache.ops]

    def take_report(self) -> Report | None:
        """Returns what changed since the last call; None when nothing did."""
        report, self._report = self._report, Report()
        for tier in Tier:
            published, removed = self._cache.take_events(tier)
            report.published += published
            report.removed += removed
        return None if report.is_empty else report

    # --- plan -----------------------------------------------------------------------------

    def plan(self) -> BatchPlan | None:
        """Returns the next step, or None when no row can do anything now."""
        rows, share = self._plan_running()
        admit: list[RowAdmit] = []
        if len(self._waiting):
            num_to_score = MAX_SCORED_TOKENS - int(share.num_scored.sum())
            admit, starting, chunks = self._admitter.plan(
                self._limits.num_tokens - int(share.num_new.sum()), num_to_score
            )
            rows, share = np.concatenate((rows, starting)), share.join(chunks)
        rows, share = decode_first(rows, share)
        waits: tuple[int, ...] = ()
        if not rows.size and self._overlaps_loads:
            rows, share, waits = self._plan_loading()
        num_tokens = int(share.num_new.sum())
        copies = self._loading.take(num_tokens)
        lookups, exchanged = self._prefetches.take()
        if not (rows.size or copies or lookups or exchanged):
            return None
        self._step_id += 1
        columns = self._rows
        computed = columns.computed[rows] + share.num_new
        columns.computed[rows] = computed
        columns.pending[rows] += share.samples + share.num_draft
        num_propose = self._choice.propose(rows[share.samples], is_allowed=not self._limits.is_reduced)
        plan = BatchPlan(
            step_id=self._step_id,
            rows=rows.astype(np.int32),
            num_new=share.num_new,
            num_draft=share.num_draft,
            samples=share.samples,
            num_scored=share.num_scored,
            max_len=computed,
            num_propose=num_propose,
            is_cold=self._choice.is_cold,
            release=np.array(self._released, dtype=np.int32),
            admit=tuple(admit),
            copies=copies + exchanged,
            waits=waits,
            lookups=lookups,
            host_release=self._cache.take_freed_host_pages(),
            table=self._tables.take(),
            relocation_version=self._cache.versions.relocation_version,
            may_replay=self._limits.may_replay,
        )
        self._released = []
        self._cache.begin_after(self._step_id)
        self._costs.begin_step(rows.size, num_tokens - int(share.num_draft.sum()))
        self._in_flight.append(_InFlight(plan, rows, columns.admission[rows]))
        return plan

    def _plan_running(self) -> tuple[Int64Array, Share]:
        """Shares the budget among running rows and gives them pages, preempting the latest if need be."""
        while True:
            rows = self._loading.runnable(self._rows.active)
            share = self._share(rows)
            if self._tables.grow(rows, share.num_new):
                return rows, share
            self._preempt(int(rows[-1]))

    def _share(self, rows: Int64Array) -> Share:
        """Returns what each of these rows, int64 ``[B]``, does in a step that they have for themselves."""
        columns = self._rows
        return share_budget(
            known=columns.known[rows],
            pending=columns.pending[rows],
            computed=columns.computed[rows],
            limit=columns.limit[rows],
            to_score=columns.to_score(rows),
            drafted=self._choice.to_verify(rows) if self._num_draft and not self._limits.is_reduced else None,
            max_len=self._max_len,
            budget=self._limits.num_tokens,
        )

    def _plan_loading(self) -> tuple[Int64Array, Share, tuple[int, ...]]:
        """Nobody else having anything to do, lets the rows start whose loads arrive first: their forward waits for them."""
        rows = self._loading.next_rows()  # later ones would keep them waiting; the link is as busy meanwhile
        share = self._share(rows)
        if not self._tables.grow(rows, share.num_new):  # stores, or drafts in flight, still hold what was promised
            rows, share = rows[:0], share.pick(rows[:0])
        rows, share = decode_first(rows, share)
        return rows, share, self._loading.start(rows)

    # --- commit ---------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a row waits for its prefix."""
        return self._loading.is_waited_for

    @property
    def awaits_acks(self) -> bool:
        """Whether the oldest step in flight read what a load wrote that has not been settled: it may have failed."""
        return self._loading.is_open(self._in_flight[0].plan.waits)

    def commit(self, result: StepResult) -> None:
        """Takes in the result of the oldest step in flight; what it waited for must be settled (``awaits_acks``)."""
        assert not self.awaits_acks, f"step {result.step_id} read loads that are not settled"
        step = self._in_flight.popleft()
        plan = step.plan
        assert plan.step_id == result.step_id, f"step {plan.step_id} was due, {result.step_id} came"
        seconds = self._costs.end_step(has_run=not result.deferred and result.fault is None)
        columns = self._rows
        ok = columns.admission[step.rows] == step.admissions
        if result.deferred:
            self._counters["deferred_steps"] += 1
            for row in step.rows[ok].tolist():
                self._waiting.put_back(self._release(row))
            return
        if result.fault is not None:
            self._undo(step.rows[ok], plan.num_tokens, result.fault)
            return
        if result.faults.size:
            faulty = np.isin(step.rows, result.faults)
            for row in step.rows[faulty & ok].tolist():
                self._handle_fault(row)
            ok &= ~faulty
        settled = step.rows[ok]
        self._containment.passed(columns, settled)
        columns.settled[settled] += plan.num_new[ok]
        sampled = ok[plan.samples]
        rows, num_draft = step.rows[plan.samples][sampled], plan.num_draft[plan.samples][sampled]
        self._choice.record(plan, rows, num_draft, result.counts[sampled], seconds)
        counts, finishes, tokens = self._emission.append(
            rows, num_draft, result.counts[sampled], result.tokens[sampled]
        )
        scores = pick_scores(plan, result, ok, counts, columns)
        self._emission.tell(self._report, rows, counts, finishes, tokens, scores)
        self._tables.publish(settled, plan.step_id)
        for row in rows[finishes != 0].tolist():
            self._release(row)

    def _undo(self, rows: Int64Array, num_tokens: int, fault: StepFault) -> None:
        """Takes back what a step was to do that failed: its rows. Steps planned on top of it find them gone."""
        again, failed = self._containment.judge(fault, num_tokens, [self._release(row) for row in rows.tolist()])
        for request in reversed(again):
            self._waiting.put_back(request)
        self._report.failed += [(request.uid, ResourceError.code, message) for request, message in failed]

    def _handle_fault(self, row: int) -> None:
        """Recomputes a request whose page table the device refused; a second time it fails."""
        self._counters["stale_rows"] += 1
        request = self._release(row)
        request.num_faults += 1
        if request.num_faults <= MAX_FAULTS:
            self._waiting.put_back(request)
            return
        message = f"the device refused the page table of request {request.uid} {request.num_faults} times"
        self._report.failed.append((request.uid, EngineError.code, message))

    def _preempt(self, row: int) -> None:
        """Takes the row away; the request will go on where its published pages end, which the host is to have too."""
        self._counters["preemptions"] += 1
        self._cache.keep(self._rows.receipt(row))
        self._waiting.put_back(self._release(row))

    def _release(self, row: int) -> Request:
        """Ends a tenancy and returns what it held; steps in flight may still write there, in stream order."""
        columns = self._rows
        request, receipt, private = columns.close(row)
        self._loading.forget(row)
        self._stops.clear(row)
        request.lose_row(columns.tokens[row, : columns.known[row]].copy())
        request.cached = columns.cached.pop(row, None)
        if private.size:
            self._cache.give(private)
        self._cache.release(receipt)
        self._released.append(row)
        return request
