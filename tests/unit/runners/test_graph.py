"""Graphs of whole steps and of pieces, recorded and played on the CPU: replays give the tokens of eager steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.core.plan import BatchPlan
from hiserve.core.request import SamplingParams
from hiserve.runners import step_output
from hiserve.runners.capture import without_collections
from hiserve.runners.gate import Action, Decision, Reason
from hiserve.sampling.sampler import SamplingBatch, sample
from tests.helpers.breaking import Breaking
from tests.helpers.cuda import (
    FREE,
    SAMPLED,
    decisions,
    news,
    poison,
    prompts_of,
    with_graphs,
    with_mixed,
    with_pieces,
)
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.recorded import RecordedCapture, make_recordable, warnings_of
from tests.helpers.scripted import verify
from tests.helpers.widening import in_turn

PAGE, NUM_PAGES, VOCAB = 16, 64, 320
SAMPLING = pytest.mark.parametrize("sampling", [GREEDY, FREE, SAMPLED], ids=["greedy", "free", "filtered"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


def engine(folder: Path) -> Engine:
    return Engine(folder, dtype="float64", attention="reference", num_pages=NUM_PAGES, max_len=96)


@pytest.fixture
def eager(folder: Path) -> Engine:
    return engine(folder)


@pytest.fixture
def subject(folder: Path) -> Iterator[Engine]:
    made = engine(folder)
    make_recordable(made)
    yield made
    made.executor.close()


def prompts_for(num_rows: int) -> dict[int, list[int]]:
    return prompts_of([7 + 9 * row % 20 for row in range(num_rows)], seed=num_rows, vocab=VOCAB)


def run(subject: Engine, plan: BatchPlan, out: dict[int, list[int]]) -> None:
    result = subject.executor.submit(plan).result()
    assert result.faults.size == 0
    for row, token in zip(plan.rows[plan.samples].tolist(), result.tokens[:, 0].tolist(), strict=True):
        out.setdefault(row, []).append(token)


def generate(
    subject: Engine, prompts: dict[int, list[int]], num_new: int, sampling: SamplingParams = GREEDY, chunk: int = 96
) -> dict[int, list[int]]:
    """All prompts in chunks side by side, each row decoding once it can."""
    planner = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=1)
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    out: dict[int, list[int]] = {row: [] for row in prompts}
    while work := {
        row: min(chunk, planner.known[row] - planner.computed[row]) for row in prompts if len(out[row]) < num_new
    }:
        run(subject, planner.step(work), out)
    return out


def stagger(subject: Engine, prompts: dict[int, list[int]], sampling: SamplingParams) -> dict[int, list[int]]:
    """One prompt after the other, in chunks, beside rows that decode; three at once in the end."""
    planner, out = HandPlanner(PAGE, NUM_PAGES, shuffle_seed=2), dict[int, list[int]]()
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
        while planner.computed[row] < len(prompt):
            work = dict.fromkeys(out, 1) | {row: min(11, len(prompt) - planner.computed[row])}
            run(subject, planner.step(work), out)
        out.setdefault(row, [])
    late = prompts_of([3, 4, 5], seed=9, vocab=VOCAB)
    for row, prompt in late.items():
        planner.admit(row + len(prompts), prompt, sampling)
    run(subject, planner.step({row + len(prompts): len(prompt) for row, prompt in late.items()}), out)
    for _ in range(4):
        run(subject, planner.step(dict.fromkeys(out, 1)), out)
    return out


@pytest.mark.parametrize(("num_rows", "sampling"), in_turn([1, 2, 3, 4], [GREEDY, FREE, SAMPLED]))
def test_replays_over_garbage_give_the_tokens_of_eager_steps(
    subject: Engine, eager: Engine, num_rows: int, sampling: SamplingParams
) -> None:
    with_graphs(subject, (1, 2, 4), capture=RecordedCapture())
    (poisoned,) = poison(subject)
    prompts = prompts_for(num_rows)
    for turn in range(2):  # over rows that others had
        assert generate(subject, prompts, 6, sampling) == generate(eager, prompts, 6, sampling)
        assert poisoned.num_replays == 5 * (1 + turn)


def test_results_stay_what_they_were_when_the_graph_is_replayed_again(subject: Engine) -> None:
    """Steps that are planned ahead are launched before the result of the one before is read."""
    with_graphs(subject, (2,), capture=RecordedCapture())
    planner, prompts = HandPlanner(PAGE, NUM_PAGES), prompts_for(2)
    for row, prompt in prompts.items():
        planner.admit(row, prompt)
    run(subject, planner.step({row: len(prompt) for row, prompt in prompts.items()}), {})
    results, read = [], []
    for _ in range(4):
        results.append(subject.executor.submit(planner.step(dict.fromkeys(prompts, 1))).result())
        read.append(results[-1].tokens.tolist())
    assert [result.tokens.tolist() for result in results] == read
    assert decisions(subject)["replay/decode"] == 4 and len({str(tokens) for tokens in read}) > 1


def test_draws_behind_a_graph_read_no_more_tokens_than_the_rows_have(
    subject: Engine, eager: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_graphs(subject, (4,), capture=RecordedCapture())
    penalised, prompts = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3), prompts_for(3)
    read = []
    for each in (subject, eager):
        gather, widths = each.rows.sampling.gather, list[int]()

        def watch(*, tokens: torch.Tensor, gather: Any = gather, widths: list[int] = widths, **others: Any) -> Any:
            widths.append(tokens.shape[1])
            return gather(tokens=tokens, **others)

        monkeypatch.setattr(each.rows.sampling, "gather", watch)
        read.append(widths)
    assert generate(subject, prompts, 6, penalised) == generate(eager, prompts, 6, penalised)
    assert read[0] == read[1]
    assert decisions(subject)["replay/decode"] == 5


def test_tokens_are_drawn_so_many_at_a_time(subject: Engine, eager: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, drawn = generate(eager, prompts_for(4), 5, SAMPLED), set()

    def watch(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        drawn.add(logits.shape[0])
        return sample(logits, batch)

    monkeypatch.setattr(step_output, "sample", watch)
    monkeypatch.setattr(step_output, "DRAWN_SLICE", 3)
    assert generate(subject, prompts_for(4), 5, SAMPLED) == expected
    assert drawn == {1, 3}


@pytest.mark.parametrize("num_rows", [1, 3])
def test_replays_verify_drafts(subject: Engine, eager: Engine, num_rows: int) -> None:
    with_graphs(subject, (2, 4), width=4, capture=RecordedCapture())
    poison(subject)
    prompts = prompts_for(num_rows)
    expected = generate(eager, prompts, 16)
    assert verify(subject, prompts, expected, 4) == expected
    assert decisions(subject)["replay/verify"] > 3


@SAMPLING
def test_pieces_over_garbage_give_the_tokens_of_eager_steps(
    subject: Engine, eager: Engine, sampling: SamplingParams
) -> None:
    with_pieces(subject, (8, 16, 32), capture=RecordedCapture())
    poison(subject)
    for num_rows, chunk in ((1, 8), (3, 5), (4, 8), (2, 96)):
        prompts = prompts_for(num_rows)
        assert generate(subject, prompts, 4, sampling, chunk) == generate(eager, prompts, 4, sampling, chunk)
    assert decisions(subject).keys() == {"replay/piecewise"}


@SAMPLING
def test_mixed_steps_over_garbage_give_the_tokens_of_eager_steps(
    subject: Engine, eager: Engine, sampling: SamplingParams
) -> None:
    with_mixed(subject, (8, 16, 32), capture=RecordedCapture())
    poison(subject)
    prompts = prompts_of([30, 5, 9, 20], vocab=VOCAB)
    for turn in range(2):  # over places that others had
        expected = stagger(eager, prompts, sampling)
        assert stagger(subject, prompts, sampling) == expected, f"turn {turn}"
    counts = decisions(subject)
    assert counts.pop("replay/mixed") > 20
    assert counts == {"eager/width": 2}  # three prompts at once, in each turn


def test_a_mixed_step_waits_for_a_load_that_ended_on_another_rank_alone(subject: Engine) -> None:
    with_mixed(subject, (8, 16, 32), capture=RecordedCapture())
    planner, waited = HandPlanner(PAGE, NUM_PAGES), list[int | None]()
    planner.admit(1, list(range(7, 20)))
    plan = planner.step({1: 13})
    with torch.inference_mode():
        subject.rows.apply(plan)
        subject.runners.forward(plan, Decision(Action.REPLAY, Reason.MIXED, (3,), 16, "greedy"), waited.append)(False)
    assert waited == [None]


def test_a_graph_of_mixed_steps_verifies_drafts_of_different_numbers(subject: Engine, eager: Engine) -> None:
    with_mixed(subject, (8, 16, 32), max_width=4, capture=RecordedCapture())
    poison(subject)
    prompts = prompts_of([9, 20], vocab=VOCAB)
    expected = generate(eager, prompts, 16)
    assert verify(subject, prompts, expected, 4) == expected
    assert decisions(subject).keys() == {"replay/mixed"}


def test_padding_rows_write_only_the_sink(subject: Engine) -> None:
    with_graphs(subject, (8,), capture=RecordedCapture())
    subject.pool.storage("kv").zero_()  # NaN is not equal to itself
    planner, prompts = HandPlanner(PAGE, NUM_PAGES), prompts_for(3)
    for row, prompt in prompts.items():
        planner.admit(row, prompt)
    run(subject, planner.step({row: len(prompt) for row, prompt in prompts.items()}), {})
    slots = subject.pool.layers("kv")[0].k
    before, rows = slots.clone(), subject.rows.known_len.clone()
    run(subject, planner.step(dict.fromkeys(prompts, 1)), {})
    changed = set((slots != before).flatten(1).any(1).nonzero()[:, 0].tolist())
    own = {planner.pages[row][len(prompt) // PAGE] * PAGE + len(prompt) % PAGE for row, prompt in prompts.items()}
    assert own <= changed <= own | {0}
    assert (subject.rows.known_len - rows).tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_rows_that_outgrow_the_table_of_a_graph_go_on_eagerly(subject: Engine, eager: Engine) -> None:
    with_graphs(subject, (4,), max_len=2 * PAGE, capture=RecordedCapture())
    prompts = prompts_of([2 * PAGE - 3, 5], vocab=VOCAB)
    assert generate(subject, prompts, 8) == generate(eager, prompts, 8)
    assert decisions(subject) == {"replay/decode": 3, "eager/context": 4, "eager/width": 1}


def test_a_capture_that_fails_is_told_once_and_its_steps_run_eagerly(
    subject: Engine, eager: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with_graphs(subject, (1, 2, 4), model=Breaking(subject.model, 2), capture=RecordedCapture())
    (told,) = warnings_of(caplog.records)
    assert told.startswith("steps of 2 rows with 1 tokens each run without a graph: operation not permitted")
    for num_rows, decision in ((1, "replay/decode"), (2, "eager/capture_failed"), (3, "replay/decode")):
        before, prompts = decisions(subject), prompts_for(num_rows)
        assert generate(subject, prompts, 4) == generate(eager, prompts, 4)
        assert news(before, decisions(subject))[decision] == 3


def test_pieces_that_cannot_be_captured_run_eagerly(
    subject: Engine, eager: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with_pieces(subject, (8, 16, 32), model=Breaking(subject.model, 16), capture=RecordedCapture())
    (told,) = warnings_of(caplog.records)
    assert told.startswith("steps of up to 16 tokens run without graphs: operation not permitted")
    for length, decision in ((8, "replay/piecewise"), (12, "eager/capture_failed"), (17, "replay/piecewise")):
        before, prompts = decisions(subject), prompts_of([length], vocab=VOCAB)
        assert generate(subject, prompts, 1) == generate(eager, prompts, 1)
        assert news(before, decisions(subject)) == {decision: 1}


def test_captures_draw_no_numbers_of_torch_s_own(subject: Engine) -> None:
    """Its generator stays as a capture that failed left it: it gives nothing any more outside graphs."""
    before = torch.get_rng_state()
    with_pieces(subject, (8, 16), capture=RecordedCapture())
    with_graphs(subject, (1, 2), capture=RecordedCapture())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_executor_that_is_closed_holds_no_graphs(subject: Engine) -> None:
    """Their memory is as large as a batch's logits, and nobody knows when the collector comes."""
    for make, buckets in ((with_graphs, (1, 2)), (with_pieces, (8, 16))):
        capture = RecordedCapture()
        runner = make(subject, buckets, capture=capture)
        assert runner.graphs and capture.graphs
        subject.executor.close()
        assert not runner.graphs and not capture.graphs


def test_garbage_is_left_alone_while_graphs_are_captured() -> None:
    assert gc.isenabled()
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_replay_that_differs_from_the_eager_step_is_not_used(
    subject: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that computes something else each time."""

    class Restless(Breaking):
        num_calls = 0

        def forward(self, inputs: Any, layers: Any, attention: Any) -> Any:
            self.num_calls += 1
            out = self._model.forward(inputs, layers, attention)
            out.logits.add_(self.num_calls)
            return out

    with_graphs(subject, (1, 2), model=Restless(subject.model, 0), capture=RecordedCapture())
    assert_none_is_used(subject, caplog)


def test_a_replay_that_draws_otherwise_than_the_eager_step_is_not_used(
    subject: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """In either way of drawing."""
    for name in ("greedy", "draw_free"):
        numbers, draw = count(), getattr(subject.rows.ops, name)

        def restless(*args: Any, numbers: Iterator[int] = numbers, draw: Any = draw) -> torch.Tensor:
            tokens: torch.Tensor = draw(*args)
            return tokens + next(numbers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subject.rows.ops, name, restless)
            with_graphs(subject, (1, 2), capture=RecordedCapture())
        assert_none_is_used(subject, caplog)
        caplog.clear()


def assert_none_is_used(subject: Engine, caplog: pytest.LogCaptureFixture) -> None:
    (runner,) = subject.runners._full.values()
    assert runner.failed == {1, 2}
    assert len(warnings_of(caplog.records)) == 2
    assert all("its replay differs from the eager step" in told for told in warnings_of(caplog.records))
