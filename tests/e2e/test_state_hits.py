"""Requests that resume from snapshots of recurrent states: the same tokens as if all were computed, on every tier.

Exact, in float64, against an engine that reuses nothing.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiserve.engine.build as build
from hiserve import LLM, SamplingParams
from hiserve.cache.index.prefix_cache import TailPool
from hiserve.cache.storage.device import DevicePool
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.loop import Engine
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cuda import wait_for_stream
from tests.helpers.models import save_family
from tests.helpers.tiered import cache_of, engine_of

NUM_NEW, VOCAB, PAGE = 14, 4096, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 160,
    "page_size": PAGE,
    "kv_pages": 400,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "cpu_threads": 1,
    "host_cache_gib": 0,
    "spec": "off",
    "in_process": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_family("qwen3_5_text", tmp_path_factory.mktemp("states"), vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is loaded, however slow the machine is now."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)


class Poisoned:
    """The pools that engines make while a test runs; after each step, what no row, tail or transfer holds becomes NaN."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[DevicePool] = []

        def kept(*args: Any, **options: Any) -> DevicePool:
            self.made.append(DevicePool(*args, **options))
            return self.made[-1]

        patch.setattr(build, "DevicePool", kept)

    def watch(self, llm: LLM) -> Engine:
        engine, carried = engine_of(llm), self.made[-1].carried
        step, state = engine.step, engine._planner._rows
        snapshots = snapshots_of(llm)

        def watched() -> Any:
            updates = step()
            snapshots.check()
            state.check()
            wait_for_stream()
            free = torch.from_numpy(np.flatnonzero(snapshots.num_refs == 0)[1:])
            idle = torch.from_numpy(np.flatnonzero(state.generation == 0)[1:])
            for memory in carried.values():
                memory.snapshots[:, free] = torch.nan
                if not engine._planner._in_flight:
                    memory.rows[:, idle] = torch.nan
            return updates

        engine.step = watched  # type: ignore[method-assign]
        return engine


def snapshots_of(llm: LLM) -> TailPool:
    snapshots = cache_of(llm).snapshots
    assert snapshots is not None
    return snapshots


def prompts_of(seed: int = 3) -> list[list[int]]:
    """Prompts that share beginnings of any length, some on a boundary of a page."""
    rng = np.random.default_rng(seed)
    base = rng.integers(7, VOCAB, 64).tolist()
    return [base[:length] + rng.integers(7, VOCAB, 1 + index).tolist() for index, length in enumerate(range(0, 64, 9))]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def next_turns(first: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts_of(), first, strict=True)]


@lru_cache
def expected(folder: Path, sampling: SamplingParams) -> tuple[list[list[int]], list[list[int]]]:
    """First turns and next turns."""
    with LLM(model=str(folder), **SETTINGS | {"disable_prefix_cache": True}) as llm:
        first = told(llm.generate(prompts_of(), sampling))
        return first, told(llm.generate(next_turns(first), sampling))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of one token": {"page_size": 1, "kv_pages": 800},
    "long pages": {"page_size": 16},
    "chunks of a few tokens": {"max_batched_tokens": 5},
    "overlap": {"overlap": 1},
    "drafts": {"spec": "ngram", "spec_steps": 3},
    "drafts, overlap": {"spec": "ngram", "spec_steps": 3, "overlap": 1},
    "few slots": {"tail_share": 0.01},
    "tails within prompts": {"tail_every": 8, "max_batched_tokens": 64},
    "preemption": {"kv_pages": 45, "max_model_len": 128},
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_do_not_depend_on_the_snapshot_that_a_request_resumes_from(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5 on the device; H1 and H2 after each step."""
    sampling = DRAWN if "drafts" in case else GREEDY
    first, later = expected(folder, sampling)
    pools = Poisoned(monkeypatch)
    with LLM(model=str(folder), **SETTINGS | CASES[case]) as llm:
        engine = pools.watch(llm)
        assert told(llm.generate(prompts_of(), sampling)) == first
        again = llm.generate(prompts_of(), sampling)
        turns = llm.generate(next_turns(first), sampling)
        assert told(again) == first and told(turns) == later
        num_cached = sum(output.cached.num_tokens for output in (*again, *turns))
        assert num_cached > (0 if case in ("few slots", "preemption") else 200), num_cached
        assert (engine.stats().preemptions > 0) == (case == "preemption")
        engine.flush()
        snapshots = snapshots_of(llm)
        assert snapshots.num_tails == 0 and snapshots.num_free == snapshots.num_pages - 1
