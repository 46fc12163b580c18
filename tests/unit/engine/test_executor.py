"""The executor: order, results, faults, threads, exceptions."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import hiserve.kernels.step_reference
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import SamplingParams
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner, int32
from tests.helpers.waiting import PATIENCE_S

PAGE, NUM_PAGES = 4, 64
PROMPTS = {1: list(range(6)), 2: list(range(40, 53)), 3: [9] * 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


def engine(folder: Path, **options: object) -> Engine:
    return Engine(folder, page_size=PAGE, num_pages=NUM_PAGES, dtype="float64", **options)  # type: ignore[arg-type]


def admitted(sampling: SamplingParams = GREEDY) -> HandPlanner:
    planner = HandPlanner(PAGE, NUM_PAGES)
    for row, prompt in PROMPTS.items():
        planner.admit(row, prompt, sampling)
    return planner


def decode_plans(planner: HandPlanner, num_steps: int) -> list[BatchPlan]:
    plans = [planner.step(dict(planner.known))]
    plans += [planner.step(dict.fromkeys(planner.known, 1)) for _ in range(num_steps - 1)]
    return plans


def tokens_of(futures: list[Future[StepResult]]) -> list[list[int]]:
    return [future.result().tokens[:, 0].tolist() for future in futures]


def test_a_result_has_one_token_for_each_sampling_row_in_plan_order(folder: Path) -> None:
    planner = admitted()
    result = engine(folder).executor.submit(planner.step({3: 8, 2: 5, 1: 6})).result()
    assert result.step_id == 1
    assert result.counts.tolist() == [1, 1]
    assert result.tokens.shape == (2, 1)
    assert result.faults.size == 0


def test_a_step_in_which_no_row_samples_has_an_empty_result(folder: Path) -> None:
    planner = admitted()
    result = engine(folder).executor.submit(planner.step({1: 2, 2: 7})).result()
    assert result.counts.size == 0
    assert result.tokens.shape == (0, 1)


def test_every_step_is_counted_with_its_decision_and_a_plan_without_rows_is_no_step(folder: Path) -> None:
    planner = admitted()
    executor = engine(folder).executor
    first, second = decode_plans(planner, 2)
    executor.submit(first).result()
    executor.submit(second).result()
    planner.release(3)
    executor.submit(planner.step({})).result()
    assert executor.gate_counts() == {"eager": {"graphs_off": 2}}
    eager, nothing = ("eager", "graphs_off"), ("", "")
    assert [executor.decision_of(step_id) for step_id in (0, 1, 2, 3)] == [nothing, eager, eager, nothing]


def test_plans_are_applied_in_the_order_in_which_they_were_made(folder: Path) -> None:
    """A page that a later plan's row has left may be another's: nobody may read it who has not begun before."""
    executor = engine(folder).executor
    first, second = decode_plans(admitted(), 2)
    executor.submit(dataclasses.replace(first, relocation_version=5)).result()
    with pytest.raises(AssertionError, match="planned under relocation version 4, after a step of 5"):
        executor.submit(dataclasses.replace(second, relocation_version=4)).result()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=4)])
def test_a_thread_computes_the_same_tokens_as_inline_steps_submitted_ahead_or_not(
    folder: Path, sampling: SamplingParams
) -> None:
    inline, ahead = engine(folder).executor, engine(folder, threaded=True).executor
    expected = tokens_of([inline.submit(plan) for plan in decode_plans(admitted(sampling), 20)])
    got = tokens_of([ahead.submit(plan) for plan in decode_plans(admitted(sampling), 20)])
    ahead.close()
    assert got == expected
    assert len({token for step in expected for token in step}) >= 20


def test_inline_results_are_done_and_threaded_steps_leave_the_caller_free(folder: Path) -> None:
    assert engine(folder).executor.submit(decode_plans(admitted(), 1)[0]).done()
    threaded = engine(folder, threaded=True)
    started, proceed = threading.Event(), threading.Event()
    run = threaded.runner.run

    def slow(inputs: object) -> object:
        started.set()
        assert proceed.wait(PATIENCE_S)
        return run(inputs)  # type: ignore[arg-type]

    threaded.runner.run = slow  # type: ignore[method-assign,assignment]
    futures = [threaded.executor.submit(plan) for plan in decode_plans(admitted(), 3)]
    assert started.wait(PATIENCE_S)
    assert not any(future.done() for future in futures)
    proceed.set()
    threaded.executor.close()
    assert [future.result().step_id for future in futures] == [1, 2, 3]


@pytest.mark.parametrize("threaded", [False, True])
def test_an_exception_inside_a_step_is_raised_by_its_result(folder: Path, threaded: bool) -> None:
    broken = engine(folder, threaded=threaded)

    def fail(inputs: object) -> object:
        raise RuntimeError("out of luck")

    broken.runner.run = fail  # type: ignore[method-assign,assignment]
    future = broken.executor.submit(decode_plans(admitted(), 1)[0])
    with pytest.raises(RuntimeError, match="out of luck"):
        future.result()
    broken.executor.close()


def run_until_a_page_is_handed_out_twice(running: Engine, planner: HandPlanner) -> tuple[BatchPlan, torch.Tensor]:
    """Runs four steps; in the fifth row 2 gets the page that row 1 is still writing to.

    Returns:
        The fifth plan, and the slots of that page.
    """
    for kv in running.pool.layers("kv"):  # a pool may come from memory that an equal run has used before
        kv.k.zero_()
        kv.v.zero_()
    for plan in decode_plans(planner, 4):
        assert running.executor.submit(plan).result().faults.size == 0
    page = planner.pages[1][-1]
    planner.free.append(page)
    plan = planner.step({1: 1, 2: 1, 3: 1})
    assert planner.pages[2][-1] == page
    return plan, page * PAGE + torch.arange(PAGE)


def pool_planes(running: Engine) -> list[torch.Tensor]:
    return [plane.clone() for kv in running.pool.layers("kv") for plane in (kv.k, kv.v)]


def test_a_stale_entry_faults_its_row_and_leaves_the_neighbours_pages_untouched(folder: Path) -> None:
    running, clean = engine(folder), engine(folder)
    expected = [clean.executor.submit(plan).result() for plan in decode_plans(admitted(), 5)][-1]
    plan, slots = run_until_a_page_is_handed_out_twice(running, planner := admitted())
    before = pool_planes(running)
    result = running.executor.submit(plan).result()
    assert result.faults.tolist() == [1]
    assert result.counts.tolist() == [0, 1, 1]
    assert result.tokens[1:].tolist() == expected.tokens[1:].tolist()
    own_of_row_3 = planner.pages[3][-1] * PAGE + (planner.computed[3] - 1) % PAGE
    written = [*range(PAGE), int(slots[0]), own_of_row_3]  # the sink, and one slot of rows 2 and 3
    others = [slot for slot in range(NUM_PAGES * PAGE) if slot not in written]
    for old, new in zip(before, pool_planes(running), strict=True):
        assert torch.equal(old[others], new[others])
        assert not torch.equal(old[slots[0]], new[slots[0]])


def test_without_the_ownership_check_a_stale_entry_writes_into_a_neighbours_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: what it guards against is real."""
    monkeypatch.setattr(
        hiserve.kernels.step_reference, "is_table_owned", lambda table, *_: torch.ones(len(table), dtype=torch.bool)
    )
    running = engine(folder)
    plan, slots = run_until_a_page_is_handed_out_twice(running, admitted())
    before = pool_planes(running)
    assert running.executor.submit(plan).result().faults.size == 0
    for old, new in zip(before, pool_planes(running), strict=True):
        assert not torch.equal(old[slots[1]], new[slots[1]])


def test_a_faulted_row_faults_until_it_is_admitted_again(folder: Path) -> None:
    running, planner = engine(folder), admitted()
    plan, _ = run_until_a_page_is_handed_out_twice(running, planner)
    assert running.executor.submit(plan).result().faults.tolist() == [1]
    assert running.executor.submit(planner.step({1: 1, 2: 1})).result().faults.tolist() == [1]
    planner.pages[1].pop()
    planner.release(1)
    planner.admit(1, PROMPTS[1])
    again = running.executor.submit(planner.step({1: 6, 2: 1})).result()
    assert again.faults.size == 0
    clean = engine(folder).executor.submit(decode_plans(admitted(), 1)[0]).result()
    assert again.tokens[0, 0] == clean.tokens[0, 0]


def test_scoring_a_prompt_that_nobody_asked_for_is_our_own_fault(folder: Path) -> None:
    plan = admitted().step({1: 6, 2: 5})
    asked = dataclasses.replace(plan, num_scored=int32([2, 0]))
    with pytest.raises(AssertionError, match="step 1 scores prompts of rows that want no scores"):
        engine(folder).executor.submit(asked).result()
