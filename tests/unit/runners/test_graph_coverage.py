"""What is covered by graphs where attention has nothing for them, or nothing for some of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from hiserve.attention.base import Attention
from hiserve.models.model_config import NANO, find_model
from hiserve.runners.capture import Capture
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, PendingLoads, Reason, admit
from hiserve.runners.graph import GraphRunner
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner

BUCKETS = (1, 2, 4)


class Refusing:
    """Captures nothing: whoever asks is told that it cannot be."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        yield

    def record(self, work: Any) -> Any:
        raise RuntimeError("there is no device\nto capture for")

    def check_failure(self, error: RuntimeError) -> None:
        """It may fail."""


class Some:
    """Has something for graphs of these numbers of rows."""

    needs_host_lengths = False

    def __init__(self, attention: Attention, sizes: tuple[int, ...]) -> None:
        self.plan, self.forward = attention.plan, attention.forward
        self._sizes = sizes

    def captured(self, num_rows: int, width: int) -> Attention | None:
        return self if num_rows in self._sizes else None

    def ragged(self) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine(find_model(NANO), attention="reference")


def graphs(engine: Engine, attention: Attention) -> GraphRunner:
    return GraphRunner(
        engine.model,
        engine.pool.layers("kv"),
        attention,
        engine.rows,
        cast(Capture, Refusing()),
        width=1,
        max_len=engine.rows.max_len,
        buckets=BUCKETS,
    )


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_steps_of_a_backend_that_cannot_be_captured_run_without_full_graphs(
    engine: Engine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    attention = engine.attention if name == "reference" else Engine(find_model(NANO), attention="cpu").attention
    assert attention.captured(4, 1) is None
    runners = Dispatch(engine.rows, engine.runner, full={1: graphs(engine, attention)})
    with caplog.at_level(logging.WARNING):
        runners.capture()
    assert runners.coverage.full == {}
    assert caplog.messages == ["steps of 1 tokens a row run without a graph: their attention cannot be captured"]
    planner = HandPlanner(16, 64)
    planner.admit(1, [5, 6, 7])
    plan = planner.step({1: 3})
    decision = admit(plan, PendingLoads(), runners.coverage, runners.facts(plan))
    assert (decision.action, decision.reason) == (Action.EAGER, Reason.GRAPHS_OFF)


def test_sizes_that_attention_has_nothing_for_are_left_out(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The others are tried; what fails is covered, as a failure."""
    runner = graphs(engine, Some(engine.attention, (2, 4)))
    runner.capture()
    assert runner.coverage.buckets == (2, 4)
    assert runner.coverage.failed == {2, 4}
    assert len(caplog.messages) == 2
