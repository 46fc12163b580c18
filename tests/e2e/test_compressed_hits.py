"""Requests with compressed rows that resume from cached prefixes: transformers' tokens, on all tiers, with drafts and preemption.

All memory is NaN that no row, page, tail or transfer holds.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.engine.host_loads import LoadCostModel
from hiserve.models.compressed_attention import CompressedSelfAttention
from tests.helpers.compressed_models import HEAVY, SPARSE, PoisonedPool, add_stream_head, save_compressed
from tests.helpers.compressed_oracle import PAGE, SETTINGS, check_replies, prompts_of
from tests.helpers.widening import some

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts of a head, overlap": {"spec": "mtp", "spec_steps": 2, "overlap": 1},
    "drafts, few tails": {"spec": "ngram", "spec_steps": 3, "tail_share": 0.05},
    "all layers share their pages": {"window_pages": 0, "max_batched_tokens": 64},
    "preemption": {"kv_pages": 14, "spec": "ngram", "spec_steps": 2},
    "host": {"kv_pages": 16, "host_cache_gib": 0.01, "overlap": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_compressed(tmp_path_factory.mktemp("hits"))
    add_stream_head(folder)
    return folder


def shared_prompts() -> list[list[int]]:
    """Prompts that share beginnings, on a boundary of a page, beside one, and none."""
    base, *others = prompts_of(40, 3, 20, 64, 1, 20)
    return [base[:length] + other for length, other in zip((37, 40, 0, 33, 32), others, strict=True)]


@pytest.mark.parametrize("case", some(CASES, "drafts of a head, overlap", "preemption", "host"))
def test_tokens_do_not_depend_on_the_prefix_that_a_request_resumes_from(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5, and with room for tails H9: a repeated prompt of L tokens computes the last page of L - 1 again, and no more."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)
    num_new = 26 if case == "preemption" else 10
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    pools, prompts = PoisonedPool(monkeypatch), shared_prompts()
    options = {"disable_prefix_cache": False, "tail_share": 0.9, "kv_pages": 200, "spec": "off"} | CASES[case]
    with LLM(model=str(folder), **SETTINGS | options) as llm:
        engine = pools.watch(llm)

        def told(prompts: list[list[int]]) -> list[list[int]]:
            return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]

        first = told(prompts)
        before = engine.stats().cached_tokens
        assert told(prompts) == first
        cached = engine.stats().cached_tokens - before
        turns = [[*prompt, *reply, 5, 6] for prompt, reply in zip(prompts, first, strict=True)]
        later = told(turns)
        stats = engine.stats()
    check_replies(folder, prompts, first)
    check_replies(folder, turns, later)
    whole = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
    assert 0 < cached <= whole and stats.stale_rows == 0
    if case in ("plain", "drafts of a head, overlap", "all layers share their pages"):
        assert cached == whole
    assert (stats.preemptions > 0) == (case == "preemption")


def test_layers_without_an_index_need_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a boundary that the ratio divides no row is begun."""
    save_compressed(tmp_path, layer_types=[HEAVY] * 5, compress_rates={SPARSE: 4, HEAVY: 8})
    pools, prompts = PoisonedPool(monkeypatch), prompts_of(40, 33)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"disable_prefix_cache": False, "tail_share": 0.9, "kv_pages": 200}
    with LLM(model=str(tmp_path), **SETTINGS | options) as llm:
        engine = pools.watch(llm)
        assert llm.settings.cache.snapshot_slots == 0
        first = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]
        assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)] == first
        assert engine.stats().cached_tokens == 32 + 32
    check_replies(tmp_path, prompts, first)


@pytest.mark.wide
def test_memory_that_runs_out_between_two_layers_leaves_nothing_of_a_step_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14, amidst drafts and snapshots: layers before the failure have written rings, windows and compressed rows already."""
    pools, prompts, calls = PoisonedPool(monkeypatch), shared_prompts()[:3], count()
    attend = CompressedSelfAttention.__call__

    def fail_at_times(self: CompressedSelfAttention, *given: Any) -> torch.Tensor:
        out = attend(self, *given)
        if next(calls) in (17, 58, 99, 163):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out

    monkeypatch.setattr(CompressedSelfAttention, "__call__", fail_at_times)
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    options = {"disable_prefix_cache": False, "tail_share": 0.9, "tail_every": 16, "kv_pages": 200}
    with LLM(model=str(folder), **SETTINGS | options | CASES["drafts of a head, overlap"]) as llm:
        engine = pools.watch(llm)
        first, again = ([list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)] for _ in range(2))
        assert sum(engine.stats().step_faults.values()) > 2 and engine.stats().cached_tokens > 0
    assert again == first
    check_replies(folder, prompts, first)
