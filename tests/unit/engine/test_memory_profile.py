"""The largest steps run at start; they leave nothing behind, and say when they took more than was planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import SamplingParams
from hiserve.core.drafts import DraftStep
from hiserve.core.plan import BatchPlan
from hiserve.engine.memory_profile import profile_steps
from hiserve.errors import ResourceError
from hiserve.runners.gate import Decision
from hiserve.runners.step_output import LaunchedStep
from tests.helpers.cache_paths import pool
from tests.helpers.drafted import Drafted
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner

PAGE, NUM_PAGES = 4, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


class Scale:
    """Says what the test wants; counts how often it was reset."""

    def __init__(self, *peaks: int) -> None:
        self._peaks = list(peaks)
        self.num_begun = 0

    def begin(self) -> None:
        self.num_begun += 1

    def peak_bytes(self) -> int:
        return self._peaks.pop(0)


class Watched:
    """Runs steps, and keeps their plans."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.plans: list[BatchPlan] = []
        self.proposed: list[int] = []

    def run(self, plan: BatchPlan, decision: Decision) -> LaunchedStep:
        self.plans.append(plan)
        return self._engine.runners.run(plan, decision)

    def propose(self, plan: BatchPlan, launched_step: LaunchedStep) -> None:
        self.proposed.append(plan.num_propose)
        self._engine.runners.propose(plan, launched_step)


class Full:
    """Has no memory for any step."""

    def run(self, plan: BatchPlan, decision: Decision) -> LaunchedStep:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore follows")


def make(folder: Path, **options: Any) -> Engine:
    return Engine(folder, page_size=PAGE, num_pages=NUM_PAGES, max_rows=5, max_len=60, **options)


def say(engine: Engine) -> list[int]:
    planner = HandPlanner(PAGE, NUM_PAGES)
    planner.admit(1, list(range(9)))
    plans = [planner.step({1: 9}), *(planner.step({1: 1}) for _ in range(5))]
    return [int(engine.executor.submit(plan).result().tokens[0, 0]) for plan in plans]


@pytest.mark.parametrize(("num_tokens", "chunks"), [(40, [40]), (59, [59]), (130, [59, 59, 12]), (999, [59] * 5)])
def test_the_largest_steps_run_and_leave_nothing_behind(folder: Path, num_tokens: int, chunks: list[int]) -> None:
    engine = make(folder)
    watched, scale = Watched(engine), Scale(3, 4)
    peaks = profile_steps(watched, engine.rows, scale, max_batched_tokens=num_tokens, budget_bytes=10)  # type: ignore[arg-type]
    assert peaks == {"prefill": 3, "decode": 4}
    assert [plan.num_new.tolist() for plan in watched.plans] == [chunks, [1] * 5]
    assert watched.plans[1].max_len.tolist() == [60] * 5
    assert scale.num_begun == 3
    assert not engine.rows.known_len.any() and not engine.rows.computed_len.any()
    assert say(engine) == say(make(folder))


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(40, 5), (11, 2), (2, 1)])
def test_with_drafts_the_largest_step_that_verifies_them_runs_too(folder: Path, num_tokens: int, num_rows: int) -> None:
    engine = make(folder)
    watched = Watched(engine)
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
    assert say(engine) == say(make(folder))


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
    engine = make(folder)
    with caplog.at_level(logging.INFO):
        profile_steps(engine.runners, engine.rows, Scale(2**30, 2**31), max_batched_tokens=40, budget_bytes=2**30)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "largest decode step took 2.00 GiB of the device; 1.00 GiB were planned" in caplog.text


def test_a_step_without_memory_says_what_to_lower(folder: Path) -> None:
    engine = make(folder)
    with pytest.raises(ResourceError, match=r"allocate 9 GiB\. Lower --kv-pages") as caught:
        profile_steps(Full(), engine.rows, Scale(), max_batched_tokens=40, budget_bytes=1)  # type: ignore[arg-type]
    assert caught.value.param == "kv_pages"
