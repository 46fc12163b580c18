"""Start-up waits for memory that comes back, warms up every kind of step, and measures the largest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import SamplingParams
from hiserve.core.drafts import DraftStep
from hiserve.core.plan import BatchPlan
from hiserve.engine.startup import (
    LONG,
    MAX_WAIT_S,
    PERIOD_S,
    SETTLED_S,
    WIDTHS,
    await_memory,
    profile_steps,
    warm_up_steps,
)
from hiserve.errors import ResourceError
from hiserve.runners.gate import Action, Decision
from hiserve.runners.step_output import LaunchedStep
from hiserve.sampling.params import Drawing
from tests.helpers.cache_paths import pool
from tests.helpers.drafted import Drafted
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner

GIB = 1 << 30
PAGE, NUM_PAGES = 4, 64


def waited(wanted: int, free: Iterable[int]) -> float:
    """Seconds waited; the last amount stays."""
    amounts = iter(free)
    last = 0

    def ask() -> int:
        nonlocal last
        last = next(amounts, last)
        return last

    return await_memory(wanted * GIB // 10, lambda: ask() * GIB // 10, sleep=lambda seconds: None)


def test_memory_that_is_there_is_not_waited_for() -> None:
    assert waited(100, [100]) == 0
    assert waited(0, [5]) == 0, "a first worker"
    assert waited(100, [0]) == 0, "a device that cannot be asked"


def test_a_worker_waits_until_memory_has_come_back() -> None:
    assert waited(100, [20, 20, 60, 60, 100]) == pytest.approx(4 * PERIOD_S)


def test_what_others_have_taken_is_not_waited_for_long() -> None:
    assert waited(100, [20, 50]) == pytest.approx(SETTLED_S + PERIOD_S, abs=2 * PERIOD_S)


def test_no_worker_waits_for_ever() -> None:
    assert waited(10**9, range(1, 10**6)) == pytest.approx(MAX_WAIT_S, abs=2 * PERIOD_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


class Watched:
    """Runs steps, and keeps their plans."""

    def __init__(self, runners: Any) -> None:
        self._runners = runners
        self.plans: list[BatchPlan] = []
        self.drawings: set[str] = set()
        self.proposed: list[int] = []
        self.masked: list[str] = []

    def run(self, plan: BatchPlan, decision: Decision, *, is_masked: bool = False) -> LaunchedStep:
        assert decision.action is Action.EAGER
        self.masked += [decision.sampling] * is_masked
        self.plans.append(plan)
        self.drawings.add(decision.sampling)
        launched_step: LaunchedStep = self._runners.run(plan, decision, is_masked=is_masked)
        if decision.sampling:
            assert launched_step.is_greedy == (decision.sampling == Drawing.GREEDY.value)
        return launched_step

    def propose(self, plan: BatchPlan, launched_step: LaunchedStep) -> None:
        self.proposed.append(plan.num_propose)
        self._runners.propose(plan, launched_step)


def say(engine: Engine) -> list[int]:
    planner = HandPlanner(PAGE, NUM_PAGES)
    planner.admit(1, list(range(9)))
    plans = [planner.step({1: 9}), *(planner.step({1: 1}) for _ in range(5))]
    return [int(engine.executor.submit(plan).result().tokens[0, 0]) for plan in plans]


def make(folder: Path, max_len: int = 150, max_rows: int = 5) -> Engine:
    return Engine(folder, page_size=PAGE, num_pages=NUM_PAGES, max_rows=max_rows, max_len=max_len)


def test_steps_of_every_kind_run_and_leave_nothing_behind(folder: Path) -> None:
    engine = make(folder)
    watched = Watched(engine.runners)
    assert warm_up_steps(watched, engine.rows, max_batched_tokens=2 * LONG) == len(watched.plans)  # type: ignore[arg-type]
    ran = {(tuple(plan.num_new.tolist()), tuple(plan.max_len.tolist())) for plan in watched.plans}
    assert {((width,), (width,)) for width in WIDTHS} | {((width, 1), (width, 1)) for width in WIDTHS} < ran
    for bound in (LONG + 1, 150):
        assert {((LONG,), (bound,)), ((LONG, LONG), (LONG, bound))} < ran
    assert watched.masked == [Drawing.GREEDY.value, Drawing.FREE.value]
    assert watched.drawings == {Drawing.GREEDY.value, Drawing.FREE.value} and not any(watched.proposed)
    assert not engine.rows.known_len.any() and not engine.rows.computed_len.any()
    assert say(engine) == say(make(folder))


@pytest.mark.parametrize(("num_tokens", "max_len", "max_rows"), [(9, 150, 5), (999, 9, 5), (999, 150, 1)])
def test_steps_that_are_larger_than_any_are_left_out(
    folder: Path, num_tokens: int, max_len: int, max_rows: int
) -> None:
    engine = make(folder, max_len, max_rows)
    watched = Watched(engine.runners)
    warm_up_steps(watched, engine.rows, max_batched_tokens=num_tokens)  # type: ignore[arg-type]
    sizes = [(plan.num_tokens, plan.rows.size, plan.max_len.max()) for plan in watched.plans]
    assert max(tokens for tokens, _, _ in sizes) == (LONG if max_rows == 1 else min(num_tokens, max_len))
    assert all(rows <= max_rows and length <= max_len for _, rows, length in sizes)


@pytest.mark.parametrize("spec", ["eagle3", "ngram"])
def test_rows_with_drafts_and_without_stand_side_by_side(spec: str) -> None:
    subject = Drafted(spec=spec, spec_steps=3, host_cache_gib=0, **pool(16))
    watched = Watched(subject.executor._runners)
    with subject.llm:
        warm_up_steps(watched, subject.executor._rows, max_batched_tokens=64, num_draft=3)  # type: ignore[arg-type]
    verified = [plan.num_draft.tolist() for plan in watched.plans if plan.num_draft.any()]
    num_rows = subject.executor._rows.page_table.shape[0] - 1
    steps = [step for drafts in (1, 2, 3) for step in ([drafts, 0], [drafts] * num_rows)]
    assert verified == [step for step in steps if sum(step) + len(step) <= 64 for _ in range(2)]
    assert [1] * num_rows in verified and num_rows > 2
    assert set(watched.proposed) == {0, 1, 2, 3}


class Scale:
    """Says what the test wants; counts how often it was reset."""

    def __init__(self, *peaks: int) -> None:
        self._peaks = list(peaks)
        self.num_begun = 0

    def begin(self) -> None:
        self.num_begun += 1

    def peak_bytes(self) -> int:
        return self._peaks.pop(0)


class Full:
    """Has no memory for any step."""

    def run(self, plan: BatchPlan, decision: Decision) -> LaunchedStep:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore follows")


@pytest.mark.parametrize(("num_tokens", "chunks"), [(40, [40]), (59, [59]), (130, [59, 59, 12]), (999, [59] * 5)])
def test_the_largest_steps_run_and_leave_nothing_behind(folder: Path, num_tokens: int, chunks: list[int]) -> None:
    engine = make(folder, 60)
    watched, scale = Watched(engine.runners), Scale(3, 4)
    peaks = profile_steps(watched, engine.rows, scale, max_batched_tokens=num_tokens, budget_bytes=10)  # type: ignore[arg-type]
    assert peaks == {"prefill": 3, "decode": 4}
    assert [plan.num_new.tolist() for plan in watched.plans] == [chunks, [1] * 5]
    assert watched.plans[1].max_len.tolist() == [60] * 5
    assert scale.num_begun == 3
    assert not engine.rows.known_len.any() and not engine.rows.computed_len.any()
    assert say(engine) == say(make(folder, 60))


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(40, 5), (11, 2), (2, 1)])
def test_with_drafts_the_largest_step_that_verifies_them_runs_too(folder: Path, num_tokens: int, num_rows: int) -> None:
    engine = make(folder, 60)
    watched = Watched(engine.runners)
    peaks = profile_steps(
        watched,  # type: ignore[arg-type]
        engine.rows,
        Scale(3, 4, 5),
        max_batched_tokens=num_tokens,
        num_draft=3,
        budget_bytes=10,
    )
    assert peaks == {"prefill": 3, "decode": 4, "verify": 5}
    width = min(4, num_tokens)
    assert watched.plans[2].num_new.tolist() == [width] * num_rows
    assert watched.plans[2].num_draft.tolist() == [width - 1] * num_rows
    assert watched.proposed == [0, 0, width - 1]
    assert say(engine) == say(make(folder, 60))


@pytest.mark.parametrize("spec", ["eagle3", "ngram"])
def test_what_drafts_behind_the_largest_steps_runs_too(spec: str) -> None:
    """Behind rows as long as they may be: drafts have no place there."""
    subject = Drafted(spec=spec, spec_steps=3, host_cache_gib=0, **pool(16))
    executor, proposed = subject.executor, []
    proposer = executor._runners._proposer

    def watched(work: Callable[[DraftStep], Any]) -> Callable[[DraftStep], Any]:
        def watch(step: DraftStep) -> Any:
            proposed.append((step.num_draft, int(step.kv_bounds.max())))
            return work(step)

        return watch

    proposer.prepare, proposer.update_only = watched(proposer.prepare), watched(proposer.update_only)
    with subject.llm as llm:
        profile_steps(
            executor._runners, executor._rows, Scale(1, 2, 3), max_batched_tokens=64, num_draft=3, budget_bytes=9
        )
        assert proposed == [(0, 64), (0, 160), (3, 160)]
        assert llm.generate(["Two cappuccinos, please."], SamplingParams(max_tokens=3))[0].outputs[0].token_ids


def test_a_step_that_takes_more_than_was_planned_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(folder, 60)
    with caplog.at_level(logging.INFO):
        profile_steps(engine.runners, engine.rows, Scale(2**30, 2**31), max_batched_tokens=40, budget_bytes=2**30)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "largest decode step took 2.00 GiB of the device; 1.00 GiB were planned" in caplog.text


def test_a_step_without_memory_says_what_to_lower(folder: Path) -> None:
    engine = make(folder, 60)
    with pytest.raises(ResourceError, match=r"allocate 9 GiB\. Lower --kv-pages") as caught:
        profile_steps(Full(), engine.rows, Scale(), max_batched_tokens=40, budget_bytes=1)  # type: ignore[arg-type]
    assert caught.value.param == "kv_pages"
