"""Steps of every kind run at start, so that nothing is left to be compiled; they leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.core.plan import BatchPlan
from hiserve.engine.warmup import LONG, WIDTHS, warm_up_steps
from hiserve.runners.gate import Action, Decision
from hiserve.runners.step_output import LaunchedStep
from hiserve.sampling.params import Drawing
from tests.helpers.cache_paths import pool
from tests.helpers.drafted import Drafted
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner

PAGE, NUM_PAGES = 4, 64


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

    def run(self, plan: BatchPlan, decision: Decision) -> LaunchedStep:
        assert decision.action is Action.EAGER
        self.plans.append(plan)
        self.drawings.add(decision.sampling)
        launched_step: LaunchedStep = self._runners.run(plan, decision)
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
    assert verified == [[drafts, 0] for drafts in (1, 2, 3) for _ in range(2)]
    assert set(watched.proposed) == {0, 1, 2, 3}
