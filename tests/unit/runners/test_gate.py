"""The gate gives every step exactly one verdict."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan
from hiserve.runners.gate import Action, Verdict, admit

LOADS = (1, 2)


def plan_of(rows: list[int], waits: tuple[int, ...], version: int) -> BatchPlan:
    count = len(rows)
    ones = np.ones(count, dtype=np.int32)
    return BatchPlan(
        step_id=1,
        rows=np.array(rows, dtype=np.int32),
        num_new=ones,
        num_draft=0 * ones,
        samples=np.ones(count, dtype=np.bool_),
        num_scored=0 * ones,
        max_len=ones,
        waits=waits,
        relocation_version=version,
    )


def states() -> list[tuple[tuple[int, ...], tuple[str, ...], tuple[int, int], int]]:
    """Every combination of: loads waited for, how each load stands, versions of two rows, version of the plan."""
    waits = [(), (1,), (1, 2)]
    stands = list(itertools.product(("open", "done", "failed"), repeat=2))
    return list(itertools.product(waits, stands, itertools.product((0, 1, 2), repeat=2), (0, 1, 2)))


@pytest.mark.parametrize("rows", [[1], [2], [1, 2]], ids=str)
def test_a_step_runs_exactly_when_all_it_reads_is_there_or_on_its_way(rows: list[int]) -> None:
    seen = set()
    for waits, stands, versions, version in states():
        how = dict(zip(LOADS, stands, strict=True))
        verdict = admit(
            plan_of(rows, waits, version),
            np.array([9, *versions], dtype=np.int64),
            {op for op in LOADS if how[op] == "open"},
            {op for op in LOADS if how[op] == "failed"},
        )
        is_lost = any(how[op] == "failed" for op in waits)
        is_stale = any(versions[row - 1] > version for row in rows)
        assert (verdict.action is Action.DEFER) == (is_lost or is_stale), (waits, how, versions, version)
        assert bool(verdict.reason) == (verdict.action is Action.DEFER)
        if verdict.action is not Action.DEFER:
            assert verdict.loads == tuple(op for op in waits if how[op] == "open")
            assert (verdict.action is Action.WAIT) == bool(verdict.loads)
        seen.add((verdict.action, verdict.reason))
    wanted = {(Action.LAUNCH, ""), (Action.WAIT, ""), (Action.DEFER, "load_failed"), (Action.DEFER, "stale_table")}
    assert seen == wanted


def test_a_plan_without_rows_is_launched() -> None:
    assert admit(plan_of([], (), 0), np.array([9, 9]), {1}, {2}) == Verdict(Action.LAUNCH)
