"""The gate: it decides for every step, before the forward is launched, how the step runs.

Checks run in this order. (1) A load that the step reads has failed: the step is deferred, since an eager forward would read
the same bytes. (2) Loads that it reads are open: the device waits for them before the step, in any case. (3) No captured
graph covers the step: it runs eagerly. (4) Else a graph is replayed. A flush does not touch the pages of running rows. The
decision holds for both halves of a step that awaits masks: ``Executor`` lets no load or move of a page begin between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

import numpy as np

from hiserve.core.plan import BatchPlan
from hiserve.ipc.messages import GateCounts


class Action(Enum):
    """How a step runs."""

    REPLAY = "replay"  # as a graph
    EAGER = "eager"  # op by op
    DEFER = "defer"  # the step does not run; it is planned again


class Reason(Enum):
    """The reason, in one word for a counter. Each occurs in a whole engine (``tests/e2e/test_gate_reasons.py``)."""

    # Replayed: as which graph.
    DECODE = "decode"  # one token in each row
    VERIFY = "verify"  # the same number of tokens in each row, all but the first of them drafts
    MIXED = "mixed"  # rows that decode and a few prompts, up to the last attention
    PIECEWISE = "piecewise"  # anything, with breaks at attention
    # Deferred: bytes that it would read are missing.
    LOAD_FAILED = "load_failed"  # between planning and launch, where a thread launches
    # Eager, for any step.
    GRAPHS_OFF = "graphs_off"  # nothing was captured
    STEP_FAILED = "step_failed"  # a replay of it ran out of memory
    STRICT_LOAD = "strict_load"  # the gate is strict, and any load is open
    STRICT_RELOCATION = "strict_relocation"  # likewise, and a page of a live row moved after the last step was planned
    # Eager: no graph covers the step.
    WIDTH = "width"  # tokens per row, or not the same in each row
    ROWS = "rows"
    CONTEXT = "context"  # a row may be longer than those that were captured
    TOKENS = "tokens"
    CAPTURE_FAILED = "capture_failed"


@dataclass(frozen=True, slots=True)
class Decision:
    """The gate's answer."""

    action: Action
    reason: Reason
    loads: tuple[int, ...] = ()  # ops that the launch waits for on the device first; none of DEFER
    bucket: int = 0  # size of the graph to replay: rows, or tokens of PIECEWISE. 0 unless replayed
    sampling: str = ""  # how its tokens are drawn, by the name of the variant; empty if it is deferred

    @property
    def is_whole(self) -> bool:
        """Whether graphs compute the whole step."""
        return self.action is Action.REPLAY and self.reason in (Reason.DECODE, Reason.VERIFY)


@dataclass(frozen=True, slots=True)
class PendingLoads:
    """The state of loads."""

    open: Collection[int] = ()  # ops that were started and whose end was not processed yet
    failed: Collection[int] = ()  # ops that ended without their bytes
    last_started: int = 0  # the latest that was started: ops of loads start in their order. 0 is none


@dataclass(frozen=True, slots=True)
class FullGraphs:
    """Graphs of whole steps, of one number of tokens per row; every row samples."""

    buckets: tuple[int, ...]  # rows of each graph, ascending; of captures that failed too
    max_len: int  # longest row after the step, in tokens, as its page tables allow
    failed: frozenset[int] = frozenset()  # buckets whose capture failed


@dataclass(frozen=True, slots=True)
class PiecewiseGraphs:
    """Graphs between attentions, which run eagerly: lengths, tables, checks and sampling are free."""

    buckets: tuple[int, ...]  # tokens of each set of graphs, ascending; of captures that failed too
    failed: frozenset[int] = frozenset()  # buckets whose capture failed


@dataclass(frozen=True, slots=True)
class MixedGraphs:
    """Graphs of rows that decode and then a few prompts; sampling is free."""

    buckets: tuple[int, ...]  # tokens of each graph, ascending; of captures that failed too
    max_decode: int  # rows up to the last that decodes
    max_width: int  # tokens of each of those
    max_prompts: int  # rows after them
    max_len: int  # longest row after the step, in tokens
    failed: frozenset[int] = frozenset()  # buckets whose capture failed


Graphs = TypeVar("Graphs", FullGraphs, PiecewiseGraphs, MixedGraphs)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The captured graphs, as numbers."""

    # By tokens per row: 1 is decode, N is N - 1 drafts after the last token.
    full: Mapping[int, FullGraphs] = field(default_factory=dict)
    mixed: MixedGraphs | None = None  # None without
    piecewise: PiecewiseGraphs | None = None  # likewise
    is_strict: bool = False  # no graph is replayed while any load is open, or after a live row's page moved


def common_coverage(one: Coverage, other: Coverage) -> Coverage:
    """Returns the graphs that two ranks have, which were asked for the same: a capture that failed on one is dropped on both."""
    return replace(
        one,
        full={width: _common(graphs, other.full[width]) for width, graphs in one.full.items() if width in other.full},
        mixed=None if one.mixed is None or other.mixed is None else _common(one.mixed, other.mixed),
        piecewise=None if one.piecewise is None or other.piecewise is None else _common(one.piecewise, other.piecewise),
    )


def _common(one: Graphs, other: Graphs) -> Graphs:
    return replace(one, failed=one.failed | other.failed | (set(one.buckets) - set(other.buckets)))


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of a step that are compared with the limits of graphs."""

    num_rows: int
    # Tokens of each row, all but the first drafts, where every row has that many and samples; else None.
    width: int | None
    num_tokens: int
    num_decode: int  # rows up to the last that has one token before its drafts
    decode_width: int  # most tokens of one of those
    max_len: int  # upper bound of the longest row after the step, in tokens
    sampling: str = ""  # name of the variant that draws for all of its rows

    @classmethod
    def of(cls, plan: BatchPlan, *, sampling: str = "") -> StepFacts:
        """Returns the facts of a plan."""
        num_new, is_empty = plan.num_new, not plan.rows.size
        width = 0 if is_empty else int(num_new[0])
        decoding = np.flatnonzero(num_new - plan.num_draft == 1)
        num_decode = 0 if not decoding.size else int(decoding[-1]) + 1
        is_uniform = plan.samples.all() and (num_new == width).all() and (plan.num_draft == width - 1).all()
        # After the last known token of a row there is none to score.
        assert not (is_uniform and plan.num_scored.any()), f"step {plan.step_id} scores {plan.num_scored} of its drafts"
        return cls(
            num_rows=plan.rows.size,
            width=width if is_uniform and not is_empty else None,
            num_tokens=plan.num_tokens,
            num_decode=num_decode,
            decode_width=int(num_new[:num_decode].max(initial=0)),
            max_len=0 if is_empty else int(plan.max_len.max()),
            sampling=sampling,
        )


def admit(
    plan: BatchPlan, loads: PendingLoads, coverage: Coverage, step: StepFacts, *, has_moved: bool = False
) -> Decision:
    """Decides how a step runs. Total: every plan gets exactly one decision.

    Args:
        plan: Applied to the rows already, its copies started.
        loads: The state of loads; those that the plan waits for were started.
        coverage: The captured graphs.
        step: Facts of the plan and of the rows' sampling.
        has_moved: A page of a live row moved after the previous step was planned, and that step may still run.
    """
    assert all(op <= loads.last_started for op in plan.waits), f"step {plan.step_id} waits for loads that never started"
    if any(op in loads.failed for op in plan.waits):
        return Decision(Action.DEFER, Reason.LOAD_FAILED)
    waits = tuple(op for op in plan.waits if op in loads.open)
    refusal = _refusal(plan, loads, coverage, has_moved)
    if refusal is not None:
        return Decision(Action.EAGER, refusal, waits, sampling=step.sampling)
    full = _full(coverage, step)
    if isinstance(full, int):
        reason = Reason.DECODE if step.width == 1 else Reason.VERIFY
        return Decision(Action.REPLAY, reason, waits, full, step.sampling)
    mixed = 0 if waits else _mixed(coverage.mixed, step)  # pieces wait for loads layer by layer
    if mixed:
        return Decision(Action.REPLAY, Reason.MIXED, waits, mixed, step.sampling)
    piecewise = _piecewise(coverage.piecewise, step)
    if isinstance(piecewise, int):
        return Decision(Action.REPLAY, Reason.PIECEWISE, waits, piecewise, step.sampling)
    return Decision(Action.EAGER, piecewise if full is Reason.WIDTH else full, waits, sampling=step.sampling)


def _refusal(plan: BatchPlan, loads: PendingLoads, coverage: Coverage, has_moved: bool) -> Reason | None:
    """Returns why no graph of any kind may be replayed; None if one may."""
    reasons = (
        (Reason.GRAPHS_OFF, not (coverage.full or coverage.mixed or coverage.piecewise)),
        (Reason.STEP_FAILED, not plan.may_replay),
        (Reason.STRICT_LOAD, coverage.is_strict and bool(loads.open)),
        (Reason.STRICT_RELOCATION, coverage.is_strict and has_moved),
    )
    return next((reason for reason, holds in reasons if holds), None)


def _full(coverage: Coverage, step: StepFacts) -> int | Reason:
    """Returns the rows of the graph that computes the whole step, or why none does."""
    graphs = None if step.width is None else coverage.full.get(step.width)
    if graphs is None:
        return Reason.WIDTH
    bucket = _bucket(graphs.buckets, step.num_rows)
    reasons = (
        (Reason.ROWS, not bucket),
        (Reason.CONTEXT, step.max_len > graphs.max_len),
        (Reason.CAPTURE_FAILED, bucket in graphs.failed),
    )
    return next((reason for reason, holds in reasons if holds), bucket)


def _mixed(graphs: MixedGraphs | None, step: StepFacts) -> int:
    """Returns the tokens of the graph that computes the step up to its last attention; 0 when none does."""
    if graphs is None or step.num_decode > graphs.max_decode or step.decode_width > graphs.max_width:
        return 0
    if step.num_rows - step.num_decode > graphs.max_prompts or step.max_len > graphs.max_len:
        return 0
    bucket = _bucket(graphs.buckets, step.num_tokens)
    return 0 if bucket in graphs.failed else bucket


def _piecewise(graphs: PiecewiseGraphs | None, step: StepFacts) -> int | Reason:
    """Returns the tokens of the graphs that compute the step between its attentions, or why none do."""
    if graphs is None:
        return Reason.WIDTH
    bucket = _bucket(graphs.buckets, step.num_tokens)
    if not bucket:
        return Reason.TOKENS
    return Reason.CAPTURE_FAILED if bucket in graphs.failed else bucket


def _bucket(buckets: tuple[int, ...], size: int) -> int:
    """Returns the smallest bucket that holds ``size``, which is at least 1; 0 when none does."""
    index = bisect_left(buckets, size)
    return buckets[index] if size and index < len(buckets) else 0


class DecisionLog:
    """Decisions, which may be added in another thread than read. It touches no device.

    Args:
        max_steps: Steps that are remembered.
    """

    def __init__(self, max_steps: int) -> None:
        self._counts: Counter[tuple[Action, Reason]] = Counter()
        self._latest: deque[tuple[int, Decision]] = deque(maxlen=max_steps)

    def add(self, step_id: int, decision: Decision) -> None:
        """Records the decision on a step."""
        self._counts[decision.action, decision.reason] += 1
        self._latest.append((step_id, decision))

    def counts(self) -> GateCounts:
        """Returns decision -> reason -> steps, until now."""
        counts: GateCounts = {}
        for (action, reason), count in dict(self._counts).items():  # a copy: steps may run in another thread
            counts.setdefault(action.value, {})[reason.value] = count
        return counts

    def last(self) -> tuple[int, str]:
        """Returns the latest step, and the decision in words."""
        if not self._latest:
            return 0, ""
        step_id, decision = self._latest[-1]
        graph = f" of {decision.bucket}" if decision.bucket else ""
        loads = f" after loads {decision.loads}" if decision.loads else ""
        return step_id, f"{decision.action.value}{graph}: {decision.reason.value} {decision.sampling}{loads}".strip()

    def of(self, step_id: int) -> tuple[str, str]:
        """Returns the decision on one of the latest steps, and the reason; empty strings for any other."""
        latest = dict(tuple(self._latest))  # a copy, likewise
        decision = latest.get(step_id)
        return ("", "") if decision is None else (decision.action.value, decision.reason.value)
