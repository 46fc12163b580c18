"""The readiness check finds what it is there for; on the CPU, where nothing is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import torch

from hiserve.config import Config, make_config
from hiserve.core.machine import probe
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.resolve import resolve
from hiserve.models.config import ModelConfig
from hiserve.models.decoder import Decoder, load_decoder
from hiserve.models.shapes import read_model
from hiserve.runners.buckets import row_buckets, token_buckets
from hiserve.worker import readiness
from hiserve.worker.executor import Executor
from hiserve.worker.readiness import LATE_ROW, MAX_LEN, NUM_WARM, STEPS, Subject


class Spoiling:
    """An executor whose step after the warm ones comes out otherwise."""

    def __init__(self, inner: Executor, error: RuntimeError | None = None) -> None:
        self._inner = inner
        self._error = error
        self._num_left = NUM_WARM

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        done = self._inner.submit(plan)
        self._num_left -= 1
        if self._num_left != -1:
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


@pytest.fixture(scope="module")
def config() -> Config:
    given = make_config(device="cpu")
    return resolve(given, read_model(given.model)[1].facts(), probe()).config


@pytest.fixture
def parts(config: Config) -> tuple[Decoder, ModelConfig]:
    torch.set_num_threads(1)
    folder, model_config = read_model(config.model)
    return load_decoder(
        folder, model_config, dtype="float32", device="cpu", load_format="auto", max_len=MAX_LEN
    ), model_config


@pytest.fixture
def subject(config: Config, parts: tuple[Decoder, ModelConfig]) -> Iterator[Subject]:
    subject = Subject(config, *parts, has_graphs=False)
    yield subject
    subject.executor.close()


def test_steps_of_every_kind_have_the_size_of_a_graph_and_run_on_the_cpu(subject: Subject) -> None:
    for kind, rows in STEPS.items():
        if kind in readiness.WHOLE:
            assert len(rows) in row_buckets(LATE_ROW) and len(set(rows.values())) == 1
        else:
            assert sum(part.num_new for part in rows.values()) in token_buckets(64)
        check = subject.check(kind, subject)
        assert (check.ran, check.problems) == ("eager/graphs_off", [])


def test_values_that_differ_are_told(config: Config, parts: tuple[Decoder, ModelConfig], subject: Subject) -> None:
    model, model_config = parts
    other = Subject(config, model, model_config, has_graphs=False)
    subject.check("prefill", subject)
    assert other.check("prefill", subject).difference == 0
    for value in (9.0, torch.nan):
        subject._layers[1].v.fill_(value)
        (problem,) = other.check("prefill", subject).problems
        assert problem.startswith("differs from the eager step by ")
    other.executor.close()


def test_a_step_that_waits_for_the_device_or_faults_is_told(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = subject.executor
    error = RuntimeError("called a synchronizing CUDA operation\nmore")
    monkeypatch.setattr(subject, "executor", Spoiling(inner, error))
    (problem,) = subject.check("decode", subject).problems
    assert problem.startswith("does not run: ") and problem.endswith("(called a synchronizing CUDA operation)")
    monkeypatch.setattr(subject, "executor", Spoiling(inner))
    (problem,) = subject.check("decode", subject).problems
    assert "[2] are at fault" in problem


def test_a_step_that_ran_otherwise_than_it_should_is_told(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_has_graphs", True)
    (problem,) = subject.check("prefill", subject).problems
    assert problem == "ran as eager/graphs_off, not as replay/piecewise"


def test_a_report_is_read_as_it_was_written(config: Config) -> None:
    report = readiness.check_graphs(config)
    assert msgspec.json.decode(msgspec.json.encode(report), type=readiness.GraphReport) == report
