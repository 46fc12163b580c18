"""Recorded graphs beside loads from the host: no replay reads a page before its bytes are there.

A load is held until somebody waits for it, or the step that reads it is over: whoever forgets to wait reads NaN, always.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.runners.gate import Action, Decision, Reason
from tests.helpers.gated import run_until, send
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, engine_of, rest, transfers_of
from tests.helpers.tiers import squeeze
from tests.helpers.transfers import hold_copies
from tests.helpers.widening import some

SEED, PAGE, NUM_NEW, MAX_HOLD_S = 29, 16, 8, 30.0
# Loaded are whole pages before the last token: these leave 16 tokens to compute, and 1.
LENGTHS = (64, 65)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
DEPTHS = pytest.mark.parametrize("depth", some([0, 1], 1), ids=["depth 0", "depth 1"])
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 128,
    "kv_pages": 40,
    "max_running_requests": 2,
    "max_batched_tokens": 32,
    "cpu_threads": 1,
    "log_level": "warning",
    "host_cache_gib": 0.02,
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    return [rng.integers(7, 4096, size).tolist() for size in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    with LLM(**SETTINGS | {"host_cache_gib": 0, "disable_prefix_cache": True, "spec": "off"}) as llm:
        tokens = tokens_of(llm, prompts)
    assert len({token for each in tokens for token in each}) >= 8
    return tokens


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]


class Held:
    """Loads that begin when their step has waited for them, or is over.

    Attributes:
        decisions: The gate's, of the steps that ran, with the loads that were open then.
    """

    def __init__(self, llm: LLM) -> None:
        executor: Any = engine_of(llm)._executor
        self.decisions: list[tuple[Decision, int]] = []
        self._go = threading.Event()
        self._runners, self._copier = executor._runners, executor._tier_transfers
        self._wait = self._copier.wait
        hold_copies(transfers_of(llm), self._hold)
        executor._runners, self._copier.wait = self, self.wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runners, name)

    def _hold(self, copy: PageCopy) -> None:
        if copy.kind is CopyKind.LOAD:
            assert self._go.wait(MAX_HOLD_S), f"nobody waited for load {copy.op}, and no step read it"
            self._go.clear()

    def wait(self, loads: tuple[int, ...], layer: int | None = None) -> None:
        self._go.set()
        self._wait(loads, layer)

    def run(self, plan: BatchPlan, decision: Decision, *rest: Any) -> Any:
        self.decisions.append((decision, len(self._copier.loads.open)))
        ran = self._runners.run(plan, decision, *rest)
        if decision.loads:
            self._go.set()
        return ran

    def release(self) -> None:
        """Lets the load go that nobody waits for on the device."""
        self._go.set()


@contextmanager
def stored(prompts: list[list[int]], expected: list[list[int]], **options: Any) -> Iterator[tuple[LLM, Held]]:
    """An engine whose host has all prompts, and whose device has none: its pages hold NaN."""
    with LLM(**SETTINGS | {"graphs": "all", "spec": "off"} | options) as llm:
        assert tokens_of(llm, prompts) == expected
        rest(llm)
        squeeze(engine_of(llm)._planner._cache)
        for kv in engine_of(llm)._executor._runners._eager._layers:  # type: ignore[attr-defined]
            kv.k.fill_(torch.nan)
            kv.v.fill_(torch.nan)
        yield llm, Held(llm)
        check_whole(llm)


@DEPTHS
@pytest.mark.parametrize(
    ("which", "graphs", "action", "reason"),
    [
        (1, "all", Action.REPLAY, Reason.DECODE),
        (0, "all", Action.REPLAY, Reason.PIECEWISE),
        (0, "decode", Action.EAGER, Reason.WIDTH),
    ],
    ids=["whole", "pieces", "eager"],
)
def test_a_step_waits_for_the_loads_that_it_reads(
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    which: int,
    graphs: str,
    action: Action,
    reason: Reason,
) -> None:
    allow_recording(monkeypatch)
    with stored(prompts, expected, overlap=depth, graphs=graphs) as (llm, held):
        assert tokens_of(llm, [prompts[which]]) == [expected[which]]
        (first,) = [decision for decision, _ in held.decisions if decision.loads]
        assert (first.action, first.reason) == (action, reason)


@DEPTHS
def test_a_strict_gate_waits_for_own_loads_and_replays_nothing_meanwhile(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    allow_recording(monkeypatch)
    with stored(prompts, expected, overlap=depth, graph_gate="strict") as (llm, held):
        assert tokens_of(llm, [prompts[1]]) == [expected[1]]
        (first,) = [decision for decision, _ in held.decisions if decision.loads]
        assert (first.action, first.reason) == (Action.EAGER, Reason.STRICT_LOAD)


@DEPTHS
@pytest.mark.parametrize(
    ("gate", "action", "reason"),
    [("precise", Action.REPLAY, Reason.DECODE), ("strict", Action.EAGER, Reason.STRICT_LOAD)],
)
def test_others_loads_keep_no_step_from_being_replayed_unless_the_gate_is_strict(
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    gate: str,
    action: Action,
    reason: Reason,
) -> None:
    """One row decodes while another's load is held, until it has said enough."""
    allow_recording(monkeypatch)
    with stored(prompts, expected, overlap=depth, graph_gate=gate) as (llm, held):
        engine, told = engine_of(llm), dict[int, list[int]]()
        send(engine, 1, prompts[0][::-1], GREEDY)
        run_until(engine, told, lambda: len(told.get(1, ())) >= 2)
        send(engine, 2, prompts[1], GREEDY)
        run_until(engine, told, lambda: len(told[1]) >= 5)
        meanwhile = {(decision.action, decision.reason) for decision, num_open in held.decisions if num_open}
        assert meanwhile == {(action, reason)}
        held.release()
        run_until(engine, told, lambda: not engine.has_work)
        assert told[2] == expected[1]


@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no gate"])
def test_a_load_that_fails_between_planning_and_launch_costs_time_and_nothing_else(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, has_gate: bool
) -> None:
    """The thread that launches comes to the gate when the planner has taken the pages from the row, and the row from it.

    The gate defers the step. If it did not, the step would read NaN, and its result would be that of a former tenancy.
    """
    allow_recording(monkeypatch)
    with stored(prompts, expected, overlap=1) as (llm, _):
        executor: Any = engine_of(llm)._executor
        runners, copier = executor._runners._runners, executor._tier_transfers
        executor._runners, copier.wait = runners, lambda *_: None
        facts, submit, take_acks = runners.facts, executor.submit, copier.take_acks
        is_started, is_told, waiting = threading.Event(), threading.Event(), list[int]()
        before = engine_of(llm)._planner._cache.tiers.relocation_version

        def note(plan: BatchPlan) -> Any:
            waiting.extend(plan.waits)
            return submit(plan)

        def take(wait_s: float) -> Any:
            """Waits for the news that a step is waiting for, of which its thread is not told."""
            if not waiting:
                return take_acks(wait_s)
            assert is_started.wait(MAX_HOLD_S), f"loads {waiting} were not started"
            waiting.clear()
            acks = take_acks(MAX_HOLD_S)
            is_told.set()
            return acks

        def come_late(plan: BatchPlan) -> Any:
            if plan.waits:
                is_started.set()
                assert is_told.wait(MAX_HOLD_S), f"nobody was told of loads {plan.waits}"
                if not has_gate:
                    copier._failed_loads.clear()
            return facts(plan)

        monkeypatch.setattr(executor, "submit", note)
        monkeypatch.setattr(copier, "take_acks", take)
        monkeypatch.setattr(runners, "facts", come_late)
        hold_copies(transfers_of(llm), lambda copy: "broken" if copy.kind is CopyKind.LOAD else None)
        assert tokens_of(llm, [prompts[1]]) == [expected[1]]
        stats = engine_of(llm).stats()
        deferred = {"defer": {"load_failed": stats.deferred_steps}} if has_gate else {}
        assert {action: counts for action, counts in stats.graph_gate.items() if action == "defer"} == deferred
        assert stats.deferred_steps == has_gate
        assert engine_of(llm)._planner._cache.tiers.relocation_version == before + 1
