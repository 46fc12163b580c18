"""The readiness check finds what it is there for; on the CPU, where nothing is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve.config.options import make_options
from hiserve.config.settings import Settings
from hiserve.core.drafts import DraftChain, DraftStep
from hiserve.core.machine import probe
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.resolve import resolve
from hiserve.engine import graph_check
from hiserve.engine.executor import Executor
from hiserve.engine.graph_check import LATE_ROW, NUM_WARM, STEPS, WIDTH, CheckedEngine, LoadedModel, load
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.models.model_config import NANO
from hiserve.runners.capture import row_buckets, token_buckets
from tests.helpers.drafted import save_heads


class Spoiling:
    """An executor whose step after the warm ones comes out otherwise."""

    def __init__(self, inner: Executor, error: RuntimeError | None = None) -> None:
        self._inner = inner
        self._error = error
        self._num_left = NUM_WARM

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        done = self._inner.submit(plan)
        self._num_left -= plan.rows.size > 0
        if self._num_left != -1 or not plan.rows.size:
            return done
        spoiled: Future[StepResult] = Future()
        if self._error is not None:
            spoiled.set_exception(self._error)
        else:
            result = done.result()
            spoiled.set_result(StepResult(plan.step_id, 0 * result.counts, result.tokens, faults=np.array([2])))
        return spoiled

    def gate_counts(self) -> dict[str, dict[str, int]]:
        return self._inner.gate_counts()


class Late:
    """An executor that drafts behind a step, as a device may, when its result has long been read: before the next one."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._finish = inner._propose
        self._left: list[tuple[BatchPlan, Any]] = []
        inner._propose = lambda *of_step: self._left.append(of_step)  # type: ignore[method-assign]

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        left, self._left = self._left, []
        with torch.inference_mode():
            for of_step in left:
                self._finish(*of_step)
        return self._inner.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def resolved(spec: str = "off") -> Settings:
    given = make_options(device="cpu", spec=spec)
    return resolve(given, model_facts(given, *read_model(given.model)), probe()).settings


@pytest.fixture(scope="module")
def config() -> Settings:
    return resolved()


@pytest.fixture(scope="module")
def loaded(config: Settings) -> LoadedModel:
    torch.set_num_threads(1)
    return load(config)


@pytest.fixture
def subject(config: Settings, loaded: LoadedModel) -> Iterator[CheckedEngine]:
    subject = CheckedEngine(config, loaded, has_graphs=False)
    yield subject
    subject.executor.close()


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    heads = save_heads(tmp_path_factory.mktemp("heads"), seed=3)
    return {"ngram": "ngram", "draft_model": f"draft:{NANO}"} | {kind: f"{kind}:{heads[kind]}" for kind in heads}


def test_steps_of_every_kind_have_the_size_of_a_graph_and_run_on_the_cpu(subject: CheckedEngine) -> None:
    for kind, rows in STEPS.items():
        if kind in graph_check.WHOLE:
            assert len(rows) in row_buckets(LATE_ROW) and len(set(rows.values())) == 1
        else:
            assert sum(part.num_new for part in rows.values()) in token_buckets(64)
        check = subject.check(kind, subject)
        assert (check.ran, check.problems) == ("eager/graphs_off", [])


def test_values_that_differ_are_told(config: Settings, loaded: LoadedModel, subject: CheckedEngine) -> None:
    other = CheckedEngine(config, loaded, has_graphs=False)
    subject.check("prefill", subject)
    assert other.check("prefill", subject).difference == 0
    for value in (9.0, torch.nan):
        subject._layers[1].v.fill_(value)
        (problem,) = other.check("prefill", subject).problems
        assert problem.startswith("differs from the eager step by ")
    other.executor.close()


def test_a_step_that_waits_for_the_device_or_faults_is_told(
    subject: CheckedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = subject.executor
    error = RuntimeError("called a synchronizing CUDA operation\nmore")
    monkeypatch.setattr(subject, "executor", Spoiling(inner, error))
    (problem,) = subject.check("decode", subject).problems
    assert problem.startswith("does not run: ") and problem.endswith("(called a synchronizing CUDA operation)")
    monkeypatch.setattr(subject, "executor", Spoiling(inner))
    (problem,) = subject.check("decode", subject).problems
    assert "[2] are at fault" in problem


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3", "mtp"])
def test_steps_are_checked_with_what_drafts_behind_them(specs: dict[str, str], kind: str) -> None:
    config = resolved(specs[kind])
    loaded = load(config)
    subject, other = (CheckedEngine(config, loaded, has_graphs=False) for _ in range(2))
    proposed = []
    proposer = subject.runners._proposer
    assert proposer is not None
    prepare = proposer.prepare

    def watch(step: DraftStep) -> DraftChain | None:
        proposed.append(step.num_draft)
        return prepare(step)

    proposer.prepare = watch  # type: ignore[method-assign]
    for each in STEPS:
        for one in (subject, other):
            check = one.check(each, subject)
            assert (check.problems, check.difference) == ([], 0)
    assert proposed == [WIDTH - 1] * (NUM_WARM + 1) * len(STEPS)
    if kind != "ngram":
        subject._draft_layers[0].v.fill_(torch.nan)
        (problem,) = other.check("prefill", subject).problems
        assert problem == "differs from the eager step by nan of its largest value"

    def wait(step: DraftStep) -> DraftChain | None:
        chain = watch(step)
        if len(proposed) == NUM_WARM + 1:
            raise RuntimeError("called a synchronizing CUDA operation")
        return chain

    proposed.clear()
    proposer.prepare = wait  # type: ignore[method-assign]
    (problem,) = subject.check("decode", subject).problems
    assert problem.startswith("does not run: ") and problem.endswith("(called a synchronizing CUDA operation)")
    for one in (subject, other):
        one.executor.close()


@pytest.mark.parametrize("num_warm", [0, NUM_WARM])
def test_drafts_that_come_late_make_no_difference(
    specs: dict[str, str], num_warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result waits for them, and where they stand the next step reads tokens of its own."""
    monkeypatch.setattr(graph_check, "NUM_WARM", num_warm)
    config = resolved(specs["eagle3"])
    loaded = load(config)
    subject, other = (CheckedEngine(config, loaded, has_graphs=False) for _ in range(2))
    monkeypatch.setattr(other, "executor", Late(other.executor))
    for each in STEPS:
        subject.check(each, subject)
        check = other.check(each, subject)
        assert (check.problems, check.difference) == ([], 0)
    for one in (subject, other):
        one.executor.close()


def test_memory_that_the_comparison_takes_is_not_the_step_s(
    config: Settings, loaded: LoadedModel, subject: CheckedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_driver_allocations = 0
    difference = CheckedEngine._difference

    def compare(self: CheckedEngine, *arguments: Any) -> float:
        nonlocal num_driver_allocations
        num_driver_allocations += 4
        return difference(self, *arguments)

    monkeypatch.setattr(CheckedEngine, "_difference", compare)
    monkeypatch.setattr(graph_check, "_num_driver_allocations", lambda device: num_driver_allocations)
    other = CheckedEngine(config, loaded, has_graphs=False)
    subject.check("prefill", subject)
    check = other.check("prefill", subject)
    assert num_driver_allocations and (check.allocations, check.problems) == (0, [])
    other.executor.close()


def test_memory_that_a_step_takes_once_all_is_warm_is_told(
    subject: CheckedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs = 0
    run = subject._run

    def grab(*arguments: Any, **options: Any) -> StepResult:
        nonlocal num_runs
        num_runs += 1
        return run(*arguments, **options)

    monkeypatch.setattr(subject, "_run", grab)
    monkeypatch.setattr(graph_check, "_num_driver_allocations", lambda device: num_runs)
    assert subject.check("prefill", subject).problems == ["allocates memory 1 times in each step"]


def test_a_step_that_ran_otherwise_than_it_should_is_told(
    subject: CheckedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_has_graphs", True)
    (problem,) = subject.check("prefill", subject).problems
    assert problem == "ran as eager/graphs_off, not as replay/piecewise"


def test_a_report_is_read_as_it_was_written(config: Settings) -> None:
    report = graph_check.check_graphs(config)
    assert msgspec.json.decode(msgspec.json.encode(report), type=graph_check.GraphReport) == report
