"""Graphs beside loads from the host, through the whole engine: others' loads, a row's own, those that fail; moved tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.runners.gate import Action, Decision, Reason
from tests.helpers import cuda
from tests.helpers.gated import (
    Between,
    Seen,
    hold_loads,
    loads_open,
    rows_alone,
    run_until,
    send,
    spoil_device,
    watch,
    without_rows,
)
from tests.helpers.tiered import check_whole, engine_of

pytestmark = pytest.mark.gpu

SEED = 23
PAGE = 16
# Loaded are whole pages before the last token: these leave 16 tokens to compute, 1, and 15.
LENGTHS = (160, 161, 175, 193)
NUM_NEW = 12
LOAD_S = 0.3


def settings(**options: Any) -> dict[str, Any]:
    return {
        "in_process": True,
        "spec": "off",
        "device": cuda.DEVICE,
        "dtype": "float32",
        "page_size": PAGE,
        "max_model_len": 512,
        "kv_pages": 100,
        "max_running_requests": 4,
        "max_batched_tokens": 64,
        "cpu_threads": 1,
        "log_level": "warning",
        "host_cache_gib": 0.2,
    } | options


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in LENGTHS]
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
    free = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_NEW, ignore_eos=True)
    drawn = msgspec.structs.replace(free, top_p=0.95, seed=4)
    return prompts, [greedy, greedy, free, drawn]


PROMPTS, SAMPLING = workload()
OTHER = PROMPTS[0][:40][::-1]
LENGTHY = msgspec.structs.replace(SAMPLING[0], max_tokens=400)


def tokens_of(llm: LLM, which: tuple[int, ...] = (0, 1, 2, 3)) -> list[list[int]]:
    results = llm.generate([PROMPTS[index] for index in which], [SAMPLING[index] for index in which])
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[int]]:
    """The tokens of an engine without graphs and without a cache; of the workload, and of the other prompt."""
    with LLM(**settings(graphs="off", disable_prefix_cache=True, host_cache_gib=0)) as llm:
        tokens = tokens_of(llm)
        other = llm.generate([OTHER], [LENGTHY])[0].outputs[0].token_ids
    assert len({token for each in tokens for token in each}) >= 20
    return tokens, other


@pytest.fixture
def expected(plain: tuple[list[list[int]], list[int]]) -> list[list[int]]:
    return plain[0]


@contextmanager
def stored(expected: list[list[int]], **options: Any) -> Iterator[LLM]:
    """An engine whose host has all prompts, and whose device has none."""
    with LLM(**settings(**options)) as llm:
        assert tokens_of(llm) == expected
        spoil_device(llm)
        yield llm
        hold_loads(llm, 0.0)
        assert tokens_of(llm) == expected  # whatever happened, it goes on
        check_whole(llm)


# --- loads of others --------------------------------------------------------------------------------------


def beside(steps: list[Seen]) -> list[Decision]:
    """Returns what was decided of steps that ran while loads of others were open."""
    return [seen.decision for seen in steps if seen.num_open and not seen.decision.loads]


def decode_beside_a_load(llm: LLM) -> tuple[list[Seen], dict[int, list[int]]]:
    """One row decodes while another's load is open, in 10 steps; returns the steps until that has its first token."""
    engine, tokens = engine_of(llm), dict[int, list[int]]()
    hold_loads(llm, LOAD_S)
    send(engine, 1, OTHER, LENGTHY)
    run_until(engine, tokens, lambda: len(tokens.get(1, ())) >= 3)
    seen = watch(llm)
    with loads_open(llm):
        send(engine, 2, PROMPTS[1], SAMPLING[1])
        run_until(engine, tokens, lambda: len(beside(seen)) >= 10)
    run_until(engine, tokens, lambda: 2 in tokens)
    steps = list(seen)
    run_until(engine, tokens, lambda: not engine.has_work)
    return steps, tokens


@pytest.mark.parametrize(
    ("gate", "action", "reason"),
    [("precise", Action.REPLAY, Reason.DECODE), ("strict", Action.EAGER, Reason.STRICT_LOAD)],
)
def test_others_loads_keep_no_step_from_being_replayed_unless_the_gate_is_strict(
    plain: tuple[list[list[int]], list[int]], depth: int, gate: str, action: Action, reason: Reason
) -> None:
    expected, other = plain
    with stored(expected, overlap=depth, graph_gate=gate) as llm:
        steps, tokens = decode_beside_a_load(llm)
        assert {(decision.action, decision.reason) for decision in beside(steps)} == {(action, reason)}
        assert (tokens[1], tokens[2]) == (other, expected[1])


# --- a row's own loads ------------------------------------------------------------------------------------


def test_a_graph_waits_on_the_device_for_the_loads_that_it_reads(expected: list[list[int]], depth: int) -> None:
    """One token is left to compute, or a chunk, which waits layer by layer."""
    cases = ((1, Reason.DECODE), (3, Reason.DECODE), (0, Reason.PIECEWISE), (2, Reason.PIECEWISE))
    with stored(expected, overlap=depth) as llm:
        seen = watch(llm)
        for index, reason in cases:
            spoil_device(llm)
            hold_loads(llm, LOAD_S)
            assert tokens_of(llm, (index,)) == [expected[index]]
            (first,) = [each.decision for each in seen if each.decision.loads]
            assert (first.action, first.reason) == (Action.REPLAY, reason)
            assert {each.decision.action for each in seen} == {Action.REPLAY}
            seen.clear()


def test_a_strict_gate_waits_for_own_loads_too(expected: list[list[int]], depth: int) -> None:
    with stored(expected, overlap=depth, graph_gate="strict") as llm:
        hold_loads(llm, LOAD_S)
        seen = watch(llm)
        assert tokens_of(llm, (1,)) == [expected[1]]
        (first,) = [each.decision for each in seen if each.decision.loads]
        assert (first.action, first.reason) == (Action.EAGER, Reason.STRICT_LOAD)


def test_a_load_that_fails_behind_a_launched_step_costs_time_and_nothing_else(
    expected: list[list[int]], depth: int
) -> None:
    """The step reads what was never loaded; its result is thrown away."""
    with stored(expected, overlap=depth) as llm:
        hold_loads(llm, 0.0, "broken")
        seen = watch(llm)
        assert tokens_of(llm, (1, 0)) == [expected[1], expected[0]]
        assert any(each.decision.loads for each in seen)
        assert engine_of(llm).stats().cache.loads.unfulfilled["broken"] > 0


def test_a_load_that_fails_between_planning_and_launch_defers_the_step(expected: list[list[int]], depth: int) -> None:
    def fail_first(between: Between, plan: BatchPlan) -> BatchPlan:
        if not plan.waits or between.acks:
            return plan
        between.submit_alone(without_rows(plan))
        between.await_acks(plan.waits)
        return rows_alone(plan)

    with stored(expected, overlap=depth) as llm:
        hold_loads(llm, 0.0, "broken")
        Between(llm, fail_first)
        assert tokens_of(llm, (1,)) == [expected[1]]
        stats = engine_of(llm).stats()
        assert stats.graph_gate["defer"] == {"load_failed": stats.deferred_steps}
        assert stats.deferred_steps >= 1
