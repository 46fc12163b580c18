"""Where graphs end and what they cross: windows, table widths, batches that shrink and grow, captures that fail."""

from __future__ import annotations

import dataclasses
import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from hiserve.core.plan import BatchPlan
from tests.helpers import cuda
from tests.helpers.breaking import Breaking
from tests.helpers.cuda import (
    BUCKETS,
    MAX_LEN,
    MAX_ROWS,
    NUM_PAGES,
    PAGE,
    TOKEN_BUCKETS,
    decisions,
    generate,
    prompts_of,
    run_all,
)
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.scripted import verify

pytestmark = pytest.mark.gpu

WINDOW, NUM_LAYERS = 40, 8
WINDOWS = (WINDOW, None) * (NUM_LAYERS // 2)


# --- windows ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windowed(nano: Path) -> Iterator[dict[str, Engine]]:
    """The reference, our kernels, and our kernels in graphs, with a window in every other layer."""
    subjects = {
        "reference": cuda.graph_engine(nano, "off", attention="reference", windows=WINDOWS),
        "off": cuda.graph_engine(nano, "off", windows=WINDOWS),
        "all": cuda.graph_engine(nano, "all", windows=WINDOWS, widths=(1, 4)),
    }
    yield subjects
    for subject in subjects.values():
        subject.executor.close()


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
def test_replays_equal_eager_steps_around_the_edge_of_a_window(
    windowed: dict[str, Engine], eager: Engine, length: int
) -> None:
    prompts = prompts_of([length, length, 5], seed=length)
    before = decisions(windowed["all"])
    tokens = {name: generate(subject, prompts, 2 * WINDOW) for name, subject in windowed.items()}
    assert tokens["all"] == tokens["off"] == tokens["reference"]
    assert cuda.news(before, decisions(windowed["all"]))["replay/decode"] == 2 * WINDOW - 1
    assert tokens["all"] != generate(eager, prompts, 2 * WINDOW), "the window hides nothing"


def test_a_context_crosses_the_edge_of_a_window_between_two_replays(windowed: dict[str, Engine], eager: Engine) -> None:
    prompts = prompts_of([WINDOW - 10, 3, WINDOW - 1], seed=2)
    expected = generate(windowed["off"], prompts, 2 * WINDOW)
    assert generate(windowed["all"], prompts, 2 * WINDOW) == expected
    assert verify(windowed["all"], prompts, expected, 4) == expected
    assert expected != generate(eager, prompts, 2 * WINDOW), "the window hides nothing"


# --- what graphs do not cover -----------------------------------------------------------------------------


def test_rows_longer_than_those_captured_go_on_eagerly(nano: Path, eager: Engine) -> None:
    """Tables of three pages, and rows that outgrow them."""
    subject = cuda.graph_engine(nano, "off")
    cuda.with_graphs(subject, (1, 2, 4), max_len=3 * PAGE)
    prompts = prompts_of([3 * PAGE - 6, 20, 3], seed=3)
    tokens = generate(subject, prompts, 30)
    ran = decisions(subject)
    assert tokens == generate(eager, prompts, 30)
    assert ran.pop("replay/decode") == 6
    assert ran.pop("eager/context") == 23
    assert ran.keys() == {"eager/width"}  # prefill
    subject.executor.close()


def test_a_batch_larger_than_the_largest_bucket_runs_eagerly(nano: Path, eager: Engine) -> None:
    subject = cuda.graph_engine(nano, "off")
    cuda.with_graphs(subject, (1, 2, 4))
    for num_rows, decision in ((4, "replay/decode"), (5, "eager/rows"), (3, "replay/decode")):
        before = decisions(subject)
        prompts = prompts_of([20] * num_rows, seed=num_rows)
        assert generate(subject, prompts, 5) == generate(eager, prompts, 5)
        assert cuda.news(before, decisions(subject))[decision] == 4
    subject.executor.close()


# --- batches that change ----------------------------------------------------------------------------------


def sawtooth() -> list[BatchPlan]:
    """All rows decode, fewer and fewer, and more and more; each that comes back has a new prompt, and decodes with all.

    Steps in which one comes back have one token less than a bucket, as many, and one more, or more than the largest.
    """
    planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=2)
    rows = list(range(1, MAX_ROWS + 1))
    prompts = prompts_of([5 + row % 23 for row in rows], seed=1)
    plans = []
    for row in rows:
        planner.admit(row, prompts[row])
        plans.append(planner.step({row: len(prompts[row])}))
    for num_rows in range(MAX_ROWS, 0, -1):
        plans.append(planner.step(dict.fromkeys(rows[:num_rows], 1)))
        planner.release(num_rows)
    totals = [bucket + offset for bucket in TOKEN_BUCKETS for offset in (-1, 0, 1)]
    new = torch.randint(7, 4096, (MAX_ROWS, MAX_LEN), generator=torch.Generator().manual_seed(4)).tolist()
    for row in rows:
        others = rows[: row - 1]
        total = next(total for total in totals[row % len(totals) :] + totals[::-1] if total > len(others) + 1)
        length = total - len(others)
        planner.admit(row, new[row - 1][:length])
        plans.append(planner.step(dict.fromkeys(others, 1) | {row: length}))
        plans.append(planner.step(dict.fromkeys(rows[:row], 1)))
    return plans


@pytest.mark.parametrize("kind", ["mixed", "piecewise"])
def test_batches_shrink_and_grow_across_all_buckets_amid_mixed_steps(nano: Path, eager: Engine, kind: str) -> None:
    subject = cuda.graph_engine(nano, "all")
    if kind == "piecewise":
        subject.runners.coverage = dataclasses.replace(subject.runners.coverage, mixed=None)
    plans = sawtooth()
    assert {plan.num_tokens for plan in plans if not plan.samples.all() or (plan.num_new > 1).any()} >= {
        bucket + offset for bucket in TOKEN_BUCKETS[3:] for offset in (-1, 0, 1)
    }
    tokens = run_all(subject, plans)
    assert tokens == run_all(eager, plans)
    ran = decisions(subject)
    assert ran.pop("replay/decode") >= 2 * MAX_ROWS
    assert ran.pop(f"replay/{kind}") > MAX_ROWS
    assert ran.keys() == {"eager/tokens"}
    subject.executor.close()


# --- captures that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["syncs", "raises"])
def test_a_capture_that_fails_is_told_once_and_its_steps_run_eagerly(
    nano: Path, eager: Engine, caplog: pytest.LogCaptureFixture, how: Literal["syncs", "raises"]
) -> None:
    subject = cuda.graph_engine(nano, "off")
    with caplog.at_level(logging.WARNING):
        runner = cuda.with_graphs(subject, BUCKETS, model=Breaking(subject.model, 8, how))
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    print(told)
    assert told.startswith("steps of 8 rows with 1 tokens each run without a graph: ")
    assert runner.failed == {8}
    gc.collect()
    torch.cuda.empty_cache()  # a capture that torch believes to be under way would be in the way
    cuda.fill_freed_memory(subject)
    for num_rows in (1, 2, 4, 5, 8, 9, 40, 3):
        before = decisions(subject)
        prompts = prompts_of([20] * num_rows, seed=num_rows)
        assert generate(subject, prompts, 5) == generate(eager, prompts, 5)
        decision = "eager/capture_failed" if num_rows in (5, 8) else "replay/decode"
        assert cuda.news(before, decisions(subject))[decision] == 4
    subject.executor.close()


def test_pieces_whose_capture_fails_leave_the_others_alone(
    nano: Path, eager: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    subject = cuda.graph_engine(nano, "off")
    with caplog.at_level(logging.WARNING):
        runner = cuda.with_pieces(subject, (8, 16, 32), model=Breaking(subject.model, 16, "syncs"))
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith("steps of up to 16 tokens run without graphs: ")
    assert runner.failed == {16}
    for length, decision in ((8, "replay/piecewise"), (12, "eager/capture_failed"), (17, "replay/piecewise")):
        before = decisions(subject)
        prompts = prompts_of([length], seed=length)
        assert generate(subject, prompts, 1) == generate(eager, prompts, 1)
        assert cuda.news(before, decisions(subject)) == {decision: 1}
    subject.executor.close()


WILD = """
import torch
from hiserve.runners.capture import Capture, capture_sizes
from tests.gpu.wild_worker import FAR, copy_kernel

data = torch.arange(256, dtype=torch.int32, device="cuda:0")
copy_kernel[(1,)](data, 128, 128)

def wild(size):
    print("size", size)
    copy_kernel[(1,)](data, FAR, 128)
    raise RuntimeError("its replay differs from the eager step")

try:
    capture_sizes(Capture(data.device), (1, 2), wild, "size %d runs without a graph: %s")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_an_illegal_access_in_a_capture_is_no_step_without_a_graph() -> None:
    """In a process of its own, whose device is lost."""
    run = subprocess.run([sys.executable, "-c", WILD], capture_output=True, text=True, timeout=100, check=False)
    print(run.stdout, run.stderr)
    tried, error = run.stdout.splitlines()
    assert tried == "size 2" and "illegal memory access" in error and "without a graph" not in run.stderr


class Littering(Breaking):
    """A model that drops a graph, with what refers to it and is referred to by it, each time it is called."""

    graphs: list[Any]

    def _break(self, inputs: Any) -> None:
        litter = [self.graphs.pop()]
        litter.append(litter)
        del litter
        for _ in range(10 * gc.get_threshold()[0]):
            self.graphs.append([])  # so many new objects let the garbage be collected, if that is allowed
        del self.graphs[-10 * gc.get_threshold()[0] :]


def test_garbage_with_graphs_in_it_ends_no_capture(nano: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a former engine leaves it that nobody closed."""
    left = cuda.graph_engine(nano, "off")
    former: Any = cuda.with_graphs(left, (1, 2, 4))
    graphs = [graph for each in former._captured.values() for graph in (each.forward, *_draws(each))]
    left.executor.close()
    subject = cuda.graph_engine(nano, "off")
    model = Littering(subject.model, 0, "raises")
    model.graphs = graphs
    with caplog.at_level(logging.WARNING):
        runner = cuda.with_graphs(subject, (1, 2), model=model)
    assert len(model.graphs) == 5, "each bucket drops two"
    assert not runner.failed
    assert not caplog.records
    subject.executor.close()


def _draws(captured: Any) -> list[Any]:
    return [graph for graph, _ in captured.draws.values()]
