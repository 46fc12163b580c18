"""Steps that verify or make drafts while their rows are spoiled, moved or still on their way: nobody's pages are touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.runners.device_rows import DeviceRows
from hiserve.spec.head import HeadProposer
from tests.helpers import cuda
from tests.helpers.cache_paths import HOST, SMALL_MODEL, pool
from tests.helpers.dialogues import conversations, trained
from tests.helpers.gated import hold_loads, watch
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, counts_of, engine_of, leave_device

PAGE, STEPS = 4, 3
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=14, ignore_eos=True)
PROPOSERS = ["eagle3", pytest.param("ngram", marks=pytest.mark.long)]


def settings(**others: Any) -> dict[str, Any]:
    return SMALL_MODEL | pool(PAGE) | HOST | {"spec": "off"} | others


def prompts(llm: LLM) -> list[list[int]]:
    return conversations(llm)[::11][:2]


def said(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts(llm), GREEDY)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**settings(host_cache_gib=0, disable_prefix_cache=True)) as llm:
        return said(llm)


def planes_of(llm: LLM) -> list[Tensor]:
    """All that is kept of pages on the device, the model's part and the head's: by page."""
    runners = engine_of(llm)._executor._runners  # type: ignore[attr-defined]
    layers, boundary = list(runners._eager._layers), []
    if isinstance(runners._proposer, HeadProposer):
        layers += runners._proposer._pool.layers
        boundary.append(runners._proposer._pool.page_hidden)
    return [plane.view(-1, PAGE, plane[0].numel()) for layer in layers for plane in (layer.k, layer.v)] + boundary


# --- spoiled rows ---------------------------------------------------------------------------------------


def tail(rows: DeviceRows, row: int) -> int:
    """The entry of a row's page that its next token goes to."""
    return int(rows.computed_len[row]) // PAGE


def set_page(page: int | None) -> Callable[[DeviceRows, int, int], None]:
    def spoil(rows: DeviceRows, row: int, neighbour: int) -> None:
        other = int(rows.page_table[neighbour, 0]) if page is None else page
        rows.page_table[row, tail(rows, row)] = other

    return spoil


def hand_out(rows: DeviceRows, row: int, neighbour: int) -> None:
    rows.page_owner[rows.page_table[row, tail(rows, row)]] += 1


def set_length(change: Callable[[Tensor], Tensor]) -> Callable[[DeviceRows, int, int], None]:
    def spoil(rows: DeviceRows, row: int, neighbour: int) -> None:
        rows.computed_len[row] = change(rows.computed_len[row])

    return spoil


SPOILS: dict[str, Callable[[DeviceRows, int, int], None]] = {
    "the page of a neighbour": set_page(None),
    "a page that there is not": set_page(1_000_000),
    "a negative page": set_page(-3),
    "a page that was handed out again": hand_out,
    "a length too long by one": set_length(lambda length: length + 1),
    "a length that no row has": set_length(lambda length: length + 100_000),
    "a negative length": set_length(lambda length: -length),
}


class Spoiler:
    """Spoils a row once, when it has drafts: before the step that verifies them, or between one and the next drafts.

    Attributes:
        spoil: What to do next; None is nothing.
        is_late: Whether drafts are made next.
    """

    def __init__(self, llm: LLM) -> None:
        executor = engine_of(llm)._executor
        self._rows: DeviceRows = executor._rows  # type: ignore[attr-defined]
        runners = executor._runners  # type: ignore[attr-defined]
        self._run, self._propose = runners.run, runners.propose
        runners.run, runners.propose = self.run, self.propose
        self._planes = planes_of(llm)
        self.spoil: Callable[[DeviceRows, int, int], None] | None = None
        self.is_late = False

    def run(self, plan: BatchPlan, *rest: Any) -> Any:
        return self._act(self._run, plan, rest) if not self.is_late else self._run(plan, *rest)

    def propose(self, plan: BatchPlan, *rest: Any) -> Any:
        return self._act(self._propose, plan, rest) if self.is_late else self._propose(plan, *rest)

    def _act(self, then: Callable[..., Any], plan: BatchPlan, rest: tuple[Any, ...]) -> Any:
        if self.spoil is None or plan.rows.size < 2 or not plan.num_draft.all():
            return then(plan, *rest)
        (row, neighbour), spoil, self.spoil = plan.rows[:2].tolist(), self.spoil, None
        own = {*self._rows.page_table[neighbour].tolist(), *self._rows.page_table[row].tolist()}
        theirs = [page for page in range(1, self._rows.num_pages) if page not in own]
        # What the neighbour computed before this step, it writes no more.
        end = max(0, int(self._rows.computed_len[neighbour]) - STEPS - 1) // PAGE
        shared = self._rows.page_table[neighbour, :end].tolist()
        spoil(self._rows, row, neighbour)
        before = self._bytes(theirs + shared)
        result = then(plan, *rest)
        assert self._bytes(theirs + shared) == before, "pages of others were written"
        return result

    def _bytes(self, pages: list[int]) -> list[bytes]:
        return [plane[pages].numpy().tobytes() for plane in self._planes]


@pytest.fixture(scope="module", params=PROPOSERS)
def spoiled(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Spoiler]]:
    spec = trained(request.param, small_model())
    with LLM(**settings(host_cache_gib=0, disable_prefix_cache=True, spec=spec, spec_steps=STEPS)) as llm:
        yield llm, Spoiler(llm)


@pytest.mark.parametrize("is_late", [False, True], ids=["verify", "draft"])
@pytest.mark.parametrize("name", SPOILS)
def test_a_spoiled_row_works_in_the_sink_and_is_computed_again(
    spoiled: tuple[LLM, Spoiler], expected: list[list[int]], name: str, is_late: bool
) -> None:
    llm, spoiler = spoiled
    before = engine_of(llm).stats().stale_rows
    spoiler.spoil, spoiler.is_late = SPOILS[name], is_late
    assert said(llm) == expected
    assert spoiler.spoil is None, "no step was spoiled"
    assert engine_of(llm).stats().stale_rows == before + 1
    counts = counts_of(llm).device
    assert counts.num_free + counts.num_evictable == counts.num_pages


# --- rows that are not there yet ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_draft_behind_the_load_that_they_were_started_behind(
    expected: list[list[int]], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first drafts read the head's part of pages that were on their way when the step was launched."""
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    with LLM(
        **settings(overlap=depth, spec=trained("eagle3", small_model()), spec_steps=STEPS, kv_canary=False)
    ) as llm:
        cold = llm.generate(prompts(llm), GREEDY)
        leave_device(llm)
        for plane in planes_of(llm):
            plane.fill_(torch.nan)  # what is read too early is found out
        engine_of(llm)._planner._overlaps_loads = True
        hold_loads(llm, 0.1)
        seen = watch(llm)
        loaded = llm.generate(prompts(llm), GREEDY)
        assert all(result.cached.host for result in loaded)
        assert any(step.decision.loads and step.plan.num_propose for step in seen)
        assert [result.outputs[0].token_ids for result in loaded] == expected
        assert [result.outputs[0].drafts for result in loaded] == [result.outputs[0].drafts for result in cold]
        hold_loads(llm, 0.0)
        check_whole(llm)
