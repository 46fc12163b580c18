"""The gate against an independent model of what happens before what, over every world of a small space."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from hiserve.runners.gate import Action, Coverage, Decision, FullGraphs, PendingLoads, Reason, StepFacts, admit
from tests.helpers.happens_before import World, all_worlds
from tests.helpers.plans import make_plan

STEPS = ((1,), (2,), (1, 2))
GRAPHS = FullGraphs(buckets=(2,), max_len=99)
PRECISE = Coverage(full={1: GRAPHS})
STRICT = replace(PRECISE, is_strict=True)
EAGER = Coverage()
COVERAGES = (PRECISE, STRICT, EAGER)


@pytest.fixture(scope="module")
def every_world() -> list[World]:
    return [world for world in all_worlds() if world.planned is not None]


@pytest.fixture(scope="module")
def worlds(every_world: list[World]) -> list[World]:
    """Those in which a step is launched before the next plan is applied, as plans are.

    A page that moves behind the plan of the step is told by the next plan, and given to its next tenant by a later one.
    """
    return [
        world
        for world in every_world
        if world.planned is not None and world.planned.version == world.num_moves and _is_started(world)
    ]


def _is_started(world: World) -> bool:
    """Whether the loads that the step waits for were started: they are ordered by its plan, or by one before."""
    assert world.planned is not None
    waits = {op for of_row in world.planned.waits for op in of_row}
    return all(load.over is not None for load in world.loads if load.op in waits)


def ask(world: World, rows: tuple[int, ...], coverage: Coverage) -> Decision:
    """Tells the gate what a host in this world knows."""
    planned = world.planned
    assert planned is not None
    waits = tuple(sorted(op for row in rows for op in planned.waits[row - 1]))
    started = [load for load in world.loads if load.over is not None]
    loads = PendingLoads(
        open=frozenset(load.op for load in started if not load.answer),
        failed=frozenset(load.op for load in started if load.answer == "failed"),
        last_started=max((load.op for load in started), default=0),
    )
    return told(rows, waits, loads, COVERAGES.index(coverage))


@cache
def told(rows: tuple[int, ...], waits: tuple[int, ...], loads: PendingLoads, coverage: int) -> Decision:
    """The same words get the same decision."""
    plan = make_plan(list(rows), waits)
    return admit(plan, loads, COVERAGES[coverage], StepFacts.of(plan))


def test_precise_replays_whatever_is_ordered_and_nothing_else(worlds: list[World]) -> None:
    seen: Counter[Reason] = Counter()
    for world in worlds:
        for rows in STEPS:
            decision = ask(world, rows, PRECISE)
            seen[decision.reason] += 1
            if decision.action is Action.DEFER:  # nothing that could be waited for would have made it right
                assert world.dangers(rows, [load.op for load in world.loads]), (world, rows, decision)
                continue
            assert decision.action is Action.REPLAY, (world, rows, decision)
            assert not world.dangers(rows, decision.loads), (world, rows, decision)
            for op in decision.loads:  # it waits for nothing that it does not read
                assert world.dangers(rows, set(decision.loads) - {op}), (world, rows, decision)
    print(dict(seen))
    assert set(seen) == {Reason.DECODE, Reason.LOAD_FAILED}


def test_strict_refuses_replay_exactly_while_any_load_is_under_way(worlds: list[World]) -> None:
    for world in worlds:
        for rows in STEPS:
            precise, strict = ask(world, rows, PRECISE), ask(world, rows, STRICT)
            if precise.action is Action.REPLAY and world.is_loading:
                assert strict == Decision(Action.EAGER, Reason.STRICT_LOAD, precise.loads), (world, rows)
            else:
                assert strict == precise, (world, rows)


def test_an_eager_step_is_held_back_by_the_same_dangers(worlds: list[World]) -> None:
    for world in worlds:
        for rows in STEPS:
            precise, eager = ask(world, rows, PRECISE), ask(world, rows, EAGER)
            assert (eager.action is Action.DEFER) == (precise.action is Action.DEFER), (world, rows)
            assert eager.loads == precise.loads, (world, rows)


def test_the_oracle_knows_the_dangers_it_is_there_for(every_world: list[World]) -> None:
    """Each kind of danger comes about, and so does each thing that must not be taken for one."""
    kinds = Counter(
        word
        for world in every_world
        for danger in world.dangers((1, 2), ())
        for word in ("while load", "never brought", "next tenant", "which is the page of")
        if word in danger
    )
    assert len(kinds) == 4
    calm = [world for world in every_world if not world.dangers((1,), ())]
    assert any(world.is_loading for world in calm)  # loads of others
    assert any(
        world.is_flushed and "page of nobody" not in world.freed for world in calm
    )  # a flush, and its page reused
    assert any(
        world.moved[1] and world.planned and not world.planned.version for world in calm
    )  # another row's page moved
    assert any(world.moved[0] and world.planned and world.planned.version for world in calm)  # its own, before the plan
