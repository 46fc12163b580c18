"""What is measured at start: every size and tier once warm, on rows and pages that are forgotten afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM
from hiserve.cache.storage.device import DevicePool
from hiserve.config.options import MAX_SPEC_STEPS
from hiserve.config.settings import AUTO_TREES
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.plan import BatchPlan
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.engine import executing_half
from hiserve.engine.draft_costs import LONG_CONTEXT, DraftTimer, _Seconds, without_stalls
from hiserve.errors import ConfigError
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Decision
from hiserve.runners.step_output import LaunchedStep
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.tiered import engine_of


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[DevicePool]:
    """The pools of the engines that are built; each holds NaN."""
    made: list[DevicePool] = []

    def poisoned(groups: Sequence[CacheGroupSpec], *sizes: Any) -> DevicePool:
        made.append(DevicePool(groups, *sizes))
        for group in groups:
            made[-1].storage(group.name).fill_(torch.nan)
        return made[-1]

    monkeypatch.setattr(executing_half, "DevicePool", poisoned)
    return made


def test_what_the_memory_held_before_is_not_measured(pools: list[DevicePool]) -> None:
    """With NaN in the pages that it attends to, a row would choose the experts of all others."""
    with LLM(**SMALL_MODEL | pool(16, 2000) | {"host_cache_gib": 0, "spec_steps": "auto"}) as llm:
        assert llm.draft_costs is not None
        kv = pools[0].storage("kv")
        num_cleared = 16 * (1 + -(-(LONG_CONTEXT + 2 * MAX_SPEC_STEPS + 2) // 16))
        assert kv[:, :, : 16 + 160].isfinite().all() and kv[:, :, num_cleared:].isnan().all()


def test_steps_are_measured_and_leave_no_trace(pools: list[DevicePool]) -> None:
    tiers = (0, 1, 3)
    with LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0, "spec": "ngram", "spec_steps": 3}) as llm:
        executor = engine_of(llm)._executor
        rows = executor._rows  # type: ignore[attr-defined]
        with torch.inference_mode():
            costs = DraftTimer(executor._runners, rows, pools[0], 300).measure(tiers, 4)  # type: ignore[attr-defined]
        assert not rows.known_len.any() and not rows.computed_len.any()
        assert (rows.entry_owner < 0).all() and not rows.page_table.any()
        assert llm.generate("Two cappuccinos, please.")[0].outputs[0].drafts is not None
    assert costs.rows == [1, 4]
    assert costs.tiers == list(tiers)
    verify, follow = np.array(costs.verify), np.array(costs.follow)
    assert verify.shape == follow.shape == (2, 3)
    assert (verify > 0).all() and (follow > 0).all() and min(costs.draft) >= 0
    for each in (verify, follow):
        assert (np.diff(each, axis=0) >= 0).all() and (np.diff(each, axis=1) >= 0).all(), "more takes no less"
    assert costs.times_own_drafts
    assert np.isfinite([costs.verify_token, costs.draft_token]).all()
    measurements = StartupMeasurements(free_bytes=7, draft_costs=costs)  # a successor gets them unchanged
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(measurements), type=StartupMeasurements) == measurements


def test_a_step_behind_which_nothing_is_drafted_costs_what_it_takes_then(
    monkeypatch: pytest.MonkeyPatch, pools: list[DevicePool]
) -> None:
    def took(_meter: DraftTimer, _num_rows: int, num_draft: int, num_propose: int, *_context: int) -> _Seconds:
        return _Seconds(10.0 + num_draft, 1.0 + num_draft + 2 * num_propose)

    monkeypatch.setattr(DraftTimer, "_time", took)
    with LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0, "spec": "ngram", "spec_steps": 3}) as llm:
        executor = engine_of(llm)._executor
        costs = DraftTimer(executor._runners, executor._rows, pools[0], 300).measure((0, 1, 3), 1)  # type: ignore[attr-defined]
    assert costs.follow == [[1.0, 4.0, 6.0]]


def test_the_growth_of_trees_is_measured_apart_from_the_first_forward(
    monkeypatch: pytest.MonkeyPatch, pools: list[DevicePool]
) -> None:
    def took(_meter: DraftTimer, _num_rows: int, num_draft: int, num_propose: int, *_context: int) -> _Seconds:
        return _Seconds(10.0 + num_draft, 1.0 + num_draft + (5.0 * num_propose if num_propose > 3 else num_propose))

    monkeypatch.setattr(DraftTimer, "_time", took)
    with LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0, "spec": "ngram", "spec_steps": 3}) as llm:
        executor = engine_of(llm)._executor
        timer = DraftTimer(executor._runners, executor._rows, pools[0], 300)  # type: ignore[attr-defined]
        costs = timer.measure((0, 1, 3, 7, 15), 1, AUTO_TREES)
    assert (costs.num_chains, costs.max_chain, costs.tree_depths) == (3, 3, [4, 6])
    assert costs.follow == [[1.0, 3.0, 5.0, 9.0, 17.0]]
    assert costs.draft == [1.0]  # of two after the first
    assert costs.grow == [[34.0, 74.0]]
    assert costs.extend_s(0, 0.0).tolist() == [0.0, 0.0, 2.0, 34.0, 74.0]
    longer = costs.extend_s(0, 100.0) - costs.extend_s(0, 0.0)
    assert longer.tolist() == [100 * costs.draft_token * forwards for forwards in (0, 0, 2, 3, 5)]


def test_each_row_has_tokens_and_drafts_of_its_own(monkeypatch: pytest.MonkeyPatch, pools: list[DevicePool]) -> None:
    """With one token for all, all choose the same experts: verifying seems to read no more of them than decoding."""
    seen: list[list[tuple[int, ...]]] = []
    run = Dispatch.run
    with LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0, "spec": "ngram", "spec_steps": 3}) as llm:
        executor = engine_of(llm)._executor
        rows: DeviceRows = executor._rows  # type: ignore[attr-defined]

        def watched(runners: Dispatch, plan: BatchPlan, decision: Decision) -> LaunchedStep:
            ends = rows.known_len.tolist()
            new = [slice(ends[row] - 1, ends[row] + 3) for row in plan.rows.tolist()]
            seen.append(
                [tuple(rows.state.tokens[row, each].tolist()) for row, each in zip(plan.rows, new, strict=True)]
            )
            return run(runners, plan, decision)

        monkeypatch.setattr(Dispatch, "run", watched)
        with torch.inference_mode():
            DraftTimer(executor._runners, rows, pools[0], 300).measure((0, 3), 4)  # type: ignore[attr-defined]
    assert max(len(each) for each in seen) == 4
    for each in seen:
        tokens = [token for row in each for token in row]
        assert len(set(tokens)) > 0.7 * len(tokens) and max(tokens) < 300, tokens


def test_what_took_longer_than_more_of_the_same_was_held_up() -> None:
    took = np.array([[3.0, 9.0, 5.0], [4.0, 4.5, 8.0]])
    assert without_stalls(took).tolist() == [[3.0, 4.5, 5.0], [4.0, 4.5, 8.0]]
    assert without_stalls(np.array([2.0, 1.0, 3.0])).tolist() == [1.0, 1.0, 3.0]


def test_a_context_too_short_to_measure_is_refused_and_one_that_suffices_is_not() -> None:
    for max_len in (12, 13):
        settings = SMALL_MODEL | pool(16) | {"host_cache_gib": 0, "spec": "ngram", "spec_steps": "auto"}
        settings |= {"max_model_len": max_len}
        if max_len == 12:
            with pytest.raises(ConfigError, match="set --spec-steps") as raised:
                LLM(**settings)
            assert raised.value.param == "spec_steps"
        else:
            LLM(**settings).close()
