"""Reported bugs of speculation over two tiers that the planner alone could have, by number. See ``test_spec_hits.py``."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck, CopyKind
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from hiserve.runners.gate import Action, Coverage, Decision, FullGraphs, PendingLoads, Reason, StepFacts, admit
from tests.helpers.engines import echo_engine
from tests.invariants.page_checks import check_pages

PAGE, MAX_LEN = 4, 64
PROMPTS = [np.random.default_rng(seed).integers(3, 200, 21).astype(np.int32) for seed in (1, 2, 3)]


def add(engine: Engine, uid: int, tokens: np.ndarray, max_tokens: int) -> None:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Admit(uid, tokens.size, sampling, b"", 0), tokens)


def run(engine: Engine) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    while engine.has_work:
        updates = engine.step()
        at = 0
        for uid, count in () if updates is None else zip(updates.uids, updates.counts, strict=True):
            said.setdefault(uid, []).extend(updates.tokens[at : at + count].tolist())
            at += count
    return said


class Step(NamedTuple):
    """A step that was submitted.

    Attributes:
        plan: Of it.
        decision: The gate's.
        open: Loads that were on their way.
    """

    plan: BatchPlan
    decision: Decision
    open: frozenset[int]


class Gated:
    """An executor whose loads end only when somebody waits for them, behind a gate that has graphs for every width."""

    def __init__(self, engine: Engine, num_draft: int) -> None:
        self._executor = engine._executor
        self._host = self._executor.host  # type: ignore[attr-defined]
        self._host.poll = self.poll
        full = {width: FullGraphs((1, 2, 4), MAX_LEN) for width in (1, 1 + num_draft)}
        self._coverage = Coverage(full=full)
        self._last = 0
        self.steps: list[Step] = []
        engine._executor = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def poll(self, must_end: bool) -> list[CopyAck]:
        if must_end and not self._host._acks:
            self._host._end(self._host._open[0])
        acks, self._host._acks = self._host._acks, []
        return list(acks)

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        new = [copy.op for copy in plan.copies if copy.kind is CopyKind.LOAD]
        is_open = {copy.op for copy in self._host._open if copy.kind is CopyKind.LOAD}.union(new)
        self._last = max([self._last, *new])
        decision = admit(plan, PendingLoads(is_open, (), self._last), self._coverage, StepFacts.of(plan))
        if plan.rows.size:
            self.steps.append(Step(plan, decision, frozenset(is_open)))
        return self._executor.submit(plan)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_draft", "reason"), [(0, Reason.DECODE), (2, Reason.VERIFY)])
def test_tc_05_steps_wait_for_the_loads_that_they_read_and_for_no_others(
    num_draft: int, reason: Reason, depth: int
) -> None:
    """Neither do decode and verify steps keep the loads of the prefill before, nor take those of others; nor the reverse."""
    engine, *_ = echo_engine(
        num_pages=22,
        page_size=PAGE,
        max_len=MAX_LEN,
        eos=(),
        num_host_pages=60,
        overlaps_loads=True,
        num_draft=num_draft,
        depth=depth,
        costs=LoadCostModel(
            16, clock=itertools.count().__next__
        ),  # steps take long, so that loads are worth their time
    )
    for _ in range(2):  # all that is on the host, and of the device what was last
        for uid, tokens in enumerate((*PROMPTS, *(tokens + 1 for tokens in PROMPTS))):
            add(engine, uid, tokens, 1)
            run(engine)
    gated = Gated(engine, num_draft)
    add(engine, 8, PROMPTS[0], 24)
    engine.step()
    add(engine, 9, PROMPTS[1], 2)
    assert run(engine).keys() == {8, 9}
    first, *others = gated.steps
    (one,) = first.plan.waits
    starts = [step for step in others if step.plan.waits]
    (two,) = {op for step in starts for op in step.plan.waits}
    assert two > one
    assert len(starts) == 1
    assert starts[0].decision.loads == (two,)
    # The first row decodes while the other's load is on its way, and right behind its own, which is not settled.
    beside = [step for step in others if step.open and not step.plan.waits]
    assert len(beside) >= 3
    assert {step.decision.loads for step in beside} == {()}
    assert (Action.REPLAY, reason) in {(step.decision.action, step.decision.reason) for step in beside}
    assert all(step.decision.action is Action.REPLAY for step in beside if step.plan.samples.all())


@pytest.mark.parametrize("num_requests", [60, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("page_size", [2, 16])
def test_tc_10_the_last_page_of_rejected_tokens_is_returned(page_size: int, num_requests: int) -> None:
    """One draft a step, as MTP makes it: rows hold what they and their drafts take, and no page when they have ended."""
    rng = np.random.default_rng(10)
    engine, planner, executor, cache = echo_engine(
        num_pages=2 + 2 * MAX_LEN // page_size,
        page_size=page_size,
        max_len=MAX_LEN,
        num_draft=1,
        depth=1,
        eos=(),
        seed=10,
    )
    rows, num_ended = planner._rows, 0
    for uid in range(num_requests):
        prompt = rng.integers(3, 200, rng.integers(1, 40)).astype(np.int32)
        add(engine, uid, prompt, int(rng.integers(1, 24)))
        while engine.has_work and (rows.active.size >= 3 or uid == num_requests - 1):
            updates = engine.step()
            num_ended += 0 if updates is None else sum(map(bool, updates.finishes))
            check_pages(planner, cache)
            most = np.minimum(rows.known[rows.active] + 2 * (1 + 1) + 1, MAX_LEN)  # two steps, and a draft behind them
            assert (rows.tables.num_pages[rows.active] <= -(-most // page_size)).all()
    assert num_ended == num_requests
    assert executor.num_drafted - executor.num_accepted > num_requests
    assert cache.device.pages.num_free + cache.device.num_evictable == cache.device.pages.num_pages - 1
