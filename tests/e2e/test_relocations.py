"""A row's page moves while a step that was planned with the old one has not been launched: what keeps that right.

Two rows with the same prompt publish the same pages: the later one moves to the pages of the other, and its own are free for
a third row. Steps are planned ahead and launched as late as can be, so that rows move between planning and launch. The guards
are taken away one after the other; each time the next one, and nothing before it, must tell or make it right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan, StepResult, TableWrites
from hiserve.kernels import step_reference
from hiserve.runners.gate import Action, Reason
from tests.helpers.gated import rows_alone, without_rows
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import cache_of, check_whole, engine_of

SEED, PAGE, NUM_NEW = 71, 4, 26
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 64,
    "kv_pages": 22,  # hardly more than the rows take: what one leaves is soon another's
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "error",
    "spec": "off",
    "host_cache_gib": 0,
    "graphs": "all",
}
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Too short to share a page: both twins compute their own."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    twin = rng.integers(7, 4096, PAGE - 1).tolist()
    return [twin, twin, rng.integers(7, 4096, PAGE + 1).tolist()]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    settings = SETTINGS | {"graphs": "auto", "kv_pages": 80, "disable_prefix_cache": True}
    with LLM(**settings) as llm:
        return tokens_of(llm, prompts)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]


class _Late:
    """A result that is computed when it is asked for."""

    def __init__(self, compute: Callable[[], StepResult]) -> None:
        self.result = compute


class Lagging:
    """An executor that launches a step when its result is asked for: the next one has been planned by then.

    Args:
        llm: Whose engine it serves from now on.
        keeps_order: Plans are applied in their order; otherwise pages move, and have their next tenants, before a step is
            launched that was planned before.
        has_versions: Plans tell how many relocations they know of.
        loses_entry: The first entry that moves never reaches the device.

    Attributes:
        num_moved: Steps between whose planning and launch a page of a live row moved.
    """

    def __init__(
        self, llm: LLM, *, keeps_order: bool = True, has_versions: bool = True, loses_entry: bool = False
    ) -> None:
        engine: Any = engine_of(llm)
        self._executor, engine._executor = engine._executor, self
        self._cache = cache_of(llm)
        self._keeps_order, self._has_versions, self._loses_entry = keeps_order, has_versions, loses_entry
        self._planned: deque[tuple[BatchPlan, int]] = deque()
        self._done: dict[int, StepResult] = {}
        self._written: set[tuple[int, int]] = set()
        self.num_moved = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: BatchPlan) -> Any:
        version = plan.relocation_version
        plan = plan if self._has_versions else replace(plan, relocation_version=1)
        plan = replace(plan, table=self._told(plan))
        if self._planned and not self._keeps_order:
            gone = {*plan.release.tolist(), *(each.row for each in plan.admit)}
            stays = np.array([row not in gone for row in plan.table.rows.tolist()], dtype=np.bool_)
            early = replace(rows_alone(without_rows(plan)), table=_pick(plan.table, stays))
            self._executor.submit(early).result()
        self._planned.append((plan, version))
        return _Late(lambda: self._result(plan.step_id))

    def _told(self, plan: BatchPlan) -> TableWrites:
        """What the device is told of the tables: all, or all but the first entry that moves."""
        new = {*plan.release.tolist(), *(each.row for each in plan.admit)}
        self._written = {(row, index) for row, index in self._written if row not in new}
        places = list(zip(plan.table.rows.tolist(), plan.table.indices.tolist(), strict=True))
        moved = [place in self._written for place in places]
        self._written.update(places)
        if not (self._loses_entry and any(moved)):
            return plan.table
        self._loses_entry = False
        return _pick(plan.table, ~np.array(moved))

    def _result(self, step_id: int) -> StepResult:
        while step_id not in self._done:
            plan, version = self._planned.popleft()
            self.num_moved += bool(plan.rows.size) and self._cache.relocation_version > version
            self._done[plan.step_id] = self._executor.submit(plan).result()
        return self._done.pop(step_id)


def _pick(table: TableWrites, which: Any) -> TableWrites:
    return TableWrites(table.rows[which], table.indices[which], table.pages[which], table.owners[which])


@contextmanager
def lagging(patch: pytest.MonkeyPatch, **how: Any) -> Iterator[tuple[LLM, Lagging]]:
    allow_recording(patch)
    with LLM(**SETTINGS | {"overlap": 1}) as llm:
        yield llm, Lagging(llm, **how)


def test_pages_move_between_planning_and_launch_and_nothing_is_wrong_or_refused(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version grew behind the plan. Plans are applied in order, so the step reads where the row was when planned."""
    with lagging(monkeypatch) as (llm, executor):
        assert tokens_of(llm, prompts) == expected
        stats = engine_of(llm).stats()
        assert executor.num_moved >= 3
        assert (stats.stale_rows, stats.deferred_steps) == (0, 0)
        assert stats.graph_gate["replay"]["decode"] > NUM_NEW // 2
        check_whole(llm)


def test_without_the_order_the_version_tells(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(AssertionError, match="planned under relocation version"),
        lagging(monkeypatch, keeps_order=False) as (llm, _),
    ):
        tokens_of(llm, prompts)


def test_without_order_and_version_the_table_is_read_where_it_is_at_launch(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay reads a row's table when it runs: it finds the canonical pages, which hold the same."""
    with lagging(monkeypatch, keeps_order=False, has_versions=False) as (llm, executor):
        assert tokens_of(llm, prompts) == expected
        assert executor.num_moved >= 3
        assert engine_of(llm).stats().stale_rows == 0


def test_without_the_new_entry_too_the_owners_of_pages_tell(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page that the row has left is another's: the row works in the sink, and is computed again."""
    with lagging(monkeypatch, keeps_order=False, has_versions=False, loses_entry=True) as (llm, _):
        assert tokens_of(llm, prompts) == expected
        assert engine_of(llm).stats().stale_rows == 1


def test_without_owners_nothing_is_left_that_tells(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each of the guards above was there for something."""
    monkeypatch.setattr(step_reference, "is_table_owned", lambda table, *others: table[:, 0] >= 0)
    with lagging(monkeypatch, keeps_order=False, has_versions=False, loses_entry=True) as (llm, _):
        assert tokens_of(llm, prompts) != expected
        assert engine_of(llm).stats().stale_rows == 0


@pytest.mark.parametrize("gate", ["precise", "strict"])
def test_a_strict_gate_replays_nothing_while_a_page_moves(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """The step before, which was planned with the old page, may still run: of all steps those behind it run eagerly."""
    allow_recording(monkeypatch)
    with LLM(**SETTINGS | {"overlap": 1, "graph_gate": gate}) as llm:
        versions = []
        executor: Any = engine_of(llm)._executor
        run = executor._runners.run

        def watch(plan: BatchPlan, decision: Any, *rest: Any) -> Any:
            versions.append((plan.relocation_version, decision))
            return run(plan, decision, *rest)

        executor._runners.run = watch
        assert tokens_of(llm, prompts) == expected
    moved = [decision for (before, _), (now, decision) in pairwise(versions) if now > before]
    calm = [decision for (before, _), (now, decision) in pairwise(versions) if now == before]
    assert len(moved) >= 3
    if gate == "strict":
        assert {(each.action, each.reason) for each in moved} == {(Action.EAGER, Reason.STRICT_RELOCATION)}
    assert {each.action for each in calm + (moved if gate == "precise" else [])} == {Action.REPLAY}
