"""Attention that plans with lengths of the host gets exact ones, whoever drafts and however far steps are planned ahead.

Exact: float64 on the CPU. The reference attends by what the host said, as FlashInfer's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.paired import GraphedAttention, PairedAttention
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.engine import runner_factory
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.dialogues import trained
from tests.helpers.recorded import HostLengthAttention, RecordableAttention
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

SEED, NUM_NEW, STEPS = 61, 20, 3
SPECS = ("off", "ngram", "draft_model", "eagle3", "mtp")
PROPOSERS = pytest.mark.parametrize("proposer", some(SPECS, "off", "eagle3"))
DRAFTS = pytest.mark.parametrize("proposer", some(SPECS, "eagle3"))
Make = Callable[[ReferenceAttention], Attention]


@lru_cache
def workload() -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts of all lengths that repeat themselves, how they are answered, and what must be answered."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    phrase = rng.integers(7, 4096, 11).tolist()
    prompts = [phrase * 2 + rng.integers(7, 4096, 3 + 17 * index).tolist() + phrase[:5] for index in range(6)]
    sampling = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=NUM_NEW - 2 * index, ignore_eos=True)
        for index in range(6)
    ]
    with LLM(**SMALL_MODEL, **pool(16), spec="off", host_cache_gib=0) as llm:
        results = llm.generate(prompts, sampling)
    return prompts, sampling, [result.outputs[0].token_ids for result in results]


def ask(llm: LLM) -> None:
    """Six requests on four rows: prompts are computed in chunks, beside rows that decode."""
    prompts, sampling, expected = workload()
    results = llm.generate(prompts, sampling)
    assert [result.outputs[0].token_ids for result in results] == expected
    if llm.settings.spec.spec != "off":
        assert sum(result.outputs[0].drafts.proposed for result in results if result.outputs[0].drafts) > 0


def settings(proposer: str, depth: int, **others: Any) -> dict[str, Any]:
    options = (
        SMALL_MODEL
        | pool(16)
        | {"spec": trained(proposer, small_model()), "spec_steps": STEPS, "overlap": depth, "host_cache_gib": 0}
    )
    return options | others


def open_with(patch: pytest.MonkeyPatch, make: Make) -> list[bool]:
    """Gives models this attention, whatever is asked for; returns a list of what is told of drafts."""
    told: list[bool] = []

    def open_attention(name: str, shape: AttentionShape, device: object, *, has_drafts: bool, **_: Any) -> Attention:
        told.append(has_drafts)
        return make(ReferenceAttention(shape))

    patch.setattr(runner_factory, "open_attention", open_attention)
    return told


@pytest.mark.parametrize(("proposer", "depth"), some(product(SPECS, (0, 1)), ("off", 1), ("eagle3", 1)))
def test_lengths_that_a_backend_plans_with_are_exact(
    proposer: str, depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[bool] = []
    workload()
    has_drafts = open_with(monkeypatch, partial(HostLengthAttention, log=log))
    with LLM(**settings(proposer, depth)) as llm:
        ask(llm)
        planned_ahead = engine_of(llm)._depth
    assert len(log) > 10 and all(log), f"{log.count(False)} of {len(log)} plans were inexact"
    assert has_drafts == [proposer != "off"]
    # Nothing is lost where every length is known, and whoever loses something is told.
    assert planned_ahead == (depth if proposer == "off" else 0)
    told = [record.getMessage() for record in caplog.records if "planned ahead" in record.getMessage()]
    assert len(told) == (depth == 1 and proposer != "off")


def test_no_step_is_planned_ahead_where_drafts_may_be_chosen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[bool] = []
    has_drafts = open_with(monkeypatch, partial(HostLengthAttention, log=log))
    with LLM(**settings("ngram", 1, spec_steps="auto")) as llm:
        assert has_drafts == [True]
        assert llm.settings.spec.tiers[0] == 0 < llm.settings.spec.tiers[-1]
        assert engine_of(llm)._depth == 0


@DRAFTS
def test_graphs_that_are_planned_before_each_replay_get_exact_lengths_too(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload()
    allow_recording(monkeypatch, HostLengthAttention)
    with LLM(**settings(proposer, 1, graphs="all")) as llm:
        ask(llm)
        replayed = engine_of(llm).stats().graph_gate["replay"]
    assert replayed["decode" if proposer == "off" else "verify"] >= 5 and replayed["piecewise"] > 0


class DecodeGraphs(HostLengthAttention):
    """Of rows of one token, as FlashInfer's of absorbed queries."""

    def is_ready(self) -> bool:
        return True

    def captured(self, num_rows: int, width: int) -> HostLengthAttention | None:  # type: ignore[override]
        return super().captured(num_rows, width) if width == 1 else None


@DRAFTS
def test_a_backend_of_graphs_alone_gets_exact_lengths_beside_one_that_needs_none(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beside prompts keep their graphs, which read lengths on the device."""
    workload()

    def make(reference: ReferenceAttention) -> Attention:
        return GraphedAttention(RecordableAttention(reference), DecodeGraphs(_another(reference)), min_rows=1)

    allow_recording(monkeypatch, make)
    with LLM(**settings(proposer, 1, graphs="all")) as llm:
        ask(llm)
        replayed, depth = engine_of(llm).stats().graph_gate["replay"], engine_of(llm)._depth
    assert replayed["decode" if proposer == "off" else "verify"] >= 5 and replayed["mixed"] > 0
    assert depth == (proposer == "off")


@PROPOSERS
def test_of_two_backends_that_for_prompts_gets_exact_lengths_while_steps_are_planned_ahead(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload()
    log: list[bool] = []

    def pair(reference: ReferenceAttention) -> Attention:
        return PairedAttention(RecordableAttention(reference), HostLengthAttention(_another(reference), log=log))

    open_with(monkeypatch, pair)
    with LLM(**settings(proposer, 1)) as llm:
        ask(llm)
        assert engine_of(llm)._depth == 1
    assert len(log) >= 6 and all(log), f"{log.count(False)} of {len(log)} plans were inexact"


def _another(reference: ReferenceAttention) -> ReferenceAttention:
    """Each keeps the layout of its own part."""
    return ReferenceAttention(reference._shape)
