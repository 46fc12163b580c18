"""Steps for which memory really runs out: the executor gives them up and goes on."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.transfers import CopyAck
from hiserve.engine import executor as executor_module
from hiserve.engine.executor import Executor
from hiserve.engine.tier_transfers import TierTransfers
from hiserve.errors import EngineError
from hiserve.runners.gate import PendingLoads
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner

PAGE, NUM_PAGES = 4, 64
PROMPTS = {1: list(range(6)), 2: list(range(40, 53)), 3: [9] * 8}
TOO_MUCH = 1 << 55  # bytes; no machine has so many


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama"))


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, page_size=PAGE, num_pages=NUM_PAGES, dtype="float64", **options)


def admit(planner: HandPlanner) -> HandPlanner:
    for row, prompt in PROMPTS.items():
        planner.admit(row, prompt, GREEDY)
    return planner


class Hog:
    """Runs a function, but asks the allocator for too much first, or after it, in the calls that are named.

    Args:
        work: The function.
        calls: Which, counted from 0.
        after: The work is done by then.
    """

    def __init__(self, work: Any, calls: set[int], *, after: bool = False) -> None:
        self._work = work
        self._calls = calls
        self._after = after
        self._num_calls = 0
        self.held: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        fails = self._num_calls in self._calls
        self._num_calls += 1
        made = self._work(*args, **options) if self._after or not fails else None
        if fails:
            taken = torch.zeros(1000)
            self.held.append(weakref.ref(taken))
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return made


def tokens_again(running: Engine, planner: HandPlanner) -> list[list[int]]:
    """Admits all requests anew, as a planner does with those of a step that was given up, and decodes a little."""
    for row in PROMPTS:
        planner.release(row)
    admit(planner)
    plans = [planner.step(dict(planner.known)), *(planner.step(dict.fromkeys(PROMPTS, 1)) for _ in range(8))]
    return [running.executor.submit(plan).result().tokens[:, 0].tolist() for plan in plans]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_for_which_memory_runs_out_says_so_and_rows_admitted_anew_are_as_if_nothing_had_been(
    folder: Path, threaded: bool, after: bool
) -> None:
    running = engine(folder, threaded=threaded)
    expected = tokens_again(engine(folder), admit(HandPlanner(PAGE, NUM_PAGES)))
    running.runner.run = hog = Hog(running.runner.run, {1}, after=after)  # type: ignore[method-assign]
    planner = admit(HandPlanner(PAGE, NUM_PAGES))
    plans = [planner.step(dict(planner.known)), planner.step(dict.fromkeys(PROMPTS, 1))]
    done, given_up = (each.result() for each in [running.executor.submit(plan) for plan in plans])
    assert done.fault is None and done.counts.tolist() == [1, 1, 1]
    assert given_up.fault is not None and given_up.fault.kind == "out_of_memory"
    assert "can't allocate memory" in given_up.fault.message and not given_up.fault.was_replay
    assert given_up.counts.size == 0 and given_up.step_id == 2
    assert [each() for each in hog.held] == [None]  # nothing that the step took is held
    assert tokens_again(running, planner) == expected
    running.executor.close()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("half", ["forward", "draw"])
def test_a_half_for_which_memory_runs_out_gives_up_the_step_and_holds_nothing(
    folder: Path, threaded: bool, half: str
) -> None:
    running = engine(folder, threaded=threaded)
    expected = tokens_again(engine(folder), admit(HandPlanner(PAGE, NUM_PAGES)))
    forward, logits = running.runner.run, list[weakref.ref[torch.Tensor]]()

    def watched(inputs: Any) -> Any:
        outputs = forward(inputs)
        logits.append(weakref.ref(outputs.logits))
        return outputs

    hog = Hog(watched if half == "forward" else running.runners.propose, {0}, after=True)
    running.runner.run = hog if half == "forward" else watched  # type: ignore[method-assign, assignment]
    if half == "draw":
        running.runners.propose = hog  # type: ignore[method-assign]
    planner = admit(HandPlanner(PAGE, NUM_PAGES))
    done = running.executor.submit(dataclasses.replace(planner.step(dict(planner.known)), awaits_masks=True))
    assert not done.done()
    running.executor.draw(None)
    fault = done.result().fault
    assert fault is not None and fault.kind == "out_of_memory"
    assert [each() for each in (*logits, *hog.held)] == [None, None]
    assert tokens_again(running, planner) == expected
    running.executor.close()


def test_exchanges_that_a_failed_half_owes_are_launched_like_a_step(folder: Path) -> None:
    """A launch elsewhere is on another stream, and meets offloads that pause for launches."""
    running = engine(folder)
    launching, is_launching, owed = running.executor._launching, [False], []

    @contextmanager
    def noted() -> Iterator[None]:
        with launching():
            is_launching[0] = True
            try:
                yield
            finally:
                is_launching[0] = False

    def abandon(*, is_half: bool = False) -> None:
        owed.append((is_half, is_launching[0], torch.is_inference_mode_enabled()))

    running.executor._launching = noted  # type: ignore[method-assign]
    running.executor._exchanges = SimpleNamespace(begin=lambda *_: None, abandon=abandon)  # type: ignore[assignment]
    running.runner.run = Hog(running.runner.run, {0})  # type: ignore[method-assign]
    plan = dataclasses.replace(admit(HandPlanner(PAGE, NUM_PAGES)).step({1: 6}), awaits_masks=True)
    done = running.executor.submit(plan)
    running.executor.draw(None)
    assert done.result().fault is not None
    assert owed == [(True, True, True), (False, True, True)]
    running.executor.close()


def test_a_first_half_that_was_deferred_exchanges_nothing(folder: Path) -> None:
    """Its parts were never listed: the draw of a whole half begins the second of them."""
    running, ends = engine(folder), Ends()
    ends.loads = PendingLoads(failed=(7,), last_started=7)
    executor = Executor(running.runners, running.rows, tier_transfers=ends)  # type: ignore[arg-type]
    executor._exchanges = SimpleNamespace()  # type: ignore[assignment]
    plan = admit(HandPlanner(PAGE, NUM_PAGES)).step({1: 6})
    done = executor.submit(dataclasses.replace(plan, awaits_masks=True, waits=(7,)))
    executor.draw(None)
    assert done.result().deferred == "load_failed"


def test_a_step_whose_first_half_fails_otherwise_says_so_after_its_second(folder: Path) -> None:
    running = engine(folder)
    failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(inputs: Any) -> Any:
        raise failure

    running.runner.run = broken  # type: ignore[method-assign]
    planner = admit(HandPlanner(PAGE, NUM_PAGES))
    done = running.executor.submit(dataclasses.replace(planner.step(dict(planner.known)), awaits_masks=True))
    running.executor.draw(None)
    assert done.exception() is failure
    running.executor.close()


class Ends:
    """As a copier that copies nothing: remembers what began, and behind which steps copies may begin."""

    loads = PendingLoads()

    def __init__(self) -> None:
        self.started: list[int] = []
        self.done: list[int] = []

    def start(self, plan: BatchPlan) -> None:
        self.started.append(plan.step_id)

    def forward_done(self, step_id: int) -> None:
        self.done.append(step_id)


def test_copies_behind_a_step_that_was_given_up_begin(folder: Path) -> None:
    running, ends = engine(folder), Ends()
    executor = Executor(running.runners, running.rows, tier_transfers=ends)  # type: ignore[arg-type]
    running.runner.run = Hog(running.runner.run, {0})  # type: ignore[method-assign]
    assert executor.submit(first_plan()).result().fault is not None
    assert ends.started == ends.done == [1]


def test_orders_of_copies_are_not_lost_to_a_lack_of_memory(folder: Path) -> None:
    """Whoever waits for a copy that nobody carries out would wait for ever: better the engine ends."""
    running, ends = engine(folder), Ends()
    ends.start = Hog(ends.start, {0})  # type: ignore[method-assign]
    executor = Executor(running.runners, running.rows, tier_transfers=ends)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no memory for orders of copies"):
        executor.submit(first_plan()).result()


def test_what_is_planned_on_top_of_a_step_given_up_runs_and_harms_nobody(folder: Path) -> None:
    """Pages of others stay as they are: the rows' own are written, or the sink."""
    running = engine(folder)
    planes = [plane for kv in running.pool.layers("kv") for plane in (kv.k, kv.v)]
    for plane in planes:
        plane.fill_(torch.nan)  # as what nobody has written may be
    planner = HandPlanner(PAGE, NUM_PAGES)
    for row in (1, 2):
        planner.admit(row, PROMPTS[row], GREEDY)
    running.executor.submit(planner.step({1: 6, 2: 13})).result()
    bystander = torch.tensor(planner.pages[2])[:, None] * PAGE + torch.arange(PAGE)
    before = [plane[bystander].view(torch.int64) for plane in planes]
    running.runner.run = Hog(running.runner.run, {0})  # type: ignore[method-assign]
    planner.admit(3, PROMPTS[3], GREEDY)
    plans = [planner.step({1: 1, 3: 8}), planner.step({1: 1, 3: 1}), planner.step({1: 1, 3: 1})]
    results = [running.executor.submit(plan).result() for plan in plans]
    assert [result.fault is None for result in results] == [False, True, True]
    after = [plane[bystander].view(torch.int64) for plane in planes]
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))


def test_page_tables_are_written_again_when_memory_ran_out_for_them(folder: Path) -> None:
    expected = tokens_again(engine(folder), admit(HandPlanner(PAGE, NUM_PAGES)))
    running = engine(folder)
    running.rows.sampling.write = Hog(running.rows.sampling.write, {0, 1}, after=True)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no memory for page tables"):
        running.executor.submit(admit(HandPlanner(PAGE, NUM_PAGES)).step({1: 1})).result()
    running.rows.sampling.write = Hog(running.rows.sampling.write, {0})  # type: ignore[method-assign]
    planner = admit(HandPlanner(PAGE, NUM_PAGES))
    assert running.executor.submit(planner.step({1: 6})).result().fault is None
    assert tokens_again(running, planner) == expected


@pytest.mark.parametrize("threaded", [False, True])
def test_any_other_error_is_raised(folder: Path, threaded: bool) -> None:
    running = engine(folder, threaded=threaded)

    def fail(inputs: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    running.runner.run = fail  # type: ignore[method-assign]
    future: Future[StepResult] = running.executor.submit(first_plan())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        future.result()
    running.executor.close()
    gc.collect()


def first_plan() -> BatchPlan:
    planner = admit(HandPlanner(PAGE, NUM_PAGES))
    return planner.step(dict(planner.known))


class Tells:
    """As transfers that copy nothing: remembers what they were told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def launch_begins(self) -> None:
        self.told.append("begins")

    def launch_ends(self) -> None:
        self.told.append("ends")

    def forward_done(self, step_id: int) -> None:
        self.told.append(f"done {step_id}")

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        return []

    def close(self) -> None:
        pass


class NoDevice:
    """What a launch needs of torch, where there is no CUDA."""

    cuda = SimpleNamespace(
        Event=lambda **options: SimpleNamespace(record=lambda: None, synchronize=lambda: None), empty_cache=lambda: None
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*shape, **options)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (None, ["begins", "runs", "done 1", "ends"]),
        (RuntimeError("CUDA out of memory"), ["begins", "runs", "ends", "done 1"]),
        (RuntimeError("an illegal memory access was encountered"), ["begins", "runs", "ends"]),
    ],
)
def test_stores_give_way_while_a_step_is_launched_and_no_longer_also_when_it_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: Exception | None, told: list[str]
) -> None:
    running, transfers = engine(folder), Tells()
    host = SimpleNamespace(
        prefault=SimpleNamespace(throttle=SimpleNamespace(step=lambda: None)),
        wait_checksums=lambda timeout_s: True,
        close=lambda: None,
    )
    executor = Executor(running.runners, running.rows, threaded=True, tier_transfers=TierTransfers(transfers, host))  # type: ignore[arg-type]
    monkeypatch.setattr(executor_module, "torch", NoDevice())
    executor._stream = object()  # type: ignore[assignment]
    executor._on_stream = nullcontext  # type: ignore[method-assign,assignment]
    run = running.runner.run

    def launch(*args: Any, **options: Any) -> Any:
        transfers.told.append("runs")
        if fails is not None:
            raise fails
        return run(*args, **options)

    running.runner.run = launch  # type: ignore[method-assign]
    future = executor.submit(first_plan())
    if fails is None or "memory access" not in str(fails):
        assert (future.result(60).fault is None) == (fails is None)
    else:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            future.result(60)
    assert transfers.told == told
    executor.close()
