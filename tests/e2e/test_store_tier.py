"""Prefixes survive their server in a store: the same tokens, and a store that misbehaves costs hits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.messages.types import WorkerStats

PAGE = 16
SMALL: dict[str, Any] = {
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 512,
    "kv_pages": 60,
    "host_cache_gib": 0.1,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "warning",
}
SEED = 17
LENGTHS = (160, 161, 175)  # on, one after and one before the end of a page


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=10, ignore_eos=True)
    return prompts, [greedy, drawn, greedy]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(*workload())]


def stats_of(llm: LLM) -> WorkerStats:
    return llm._backend.engine.stats()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(disable_prefix_cache=True, **SMALL) as llm:
        return tokens_of(llm)


@pytest.mark.parametrize("policy", ["wait", "timeout"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_server_finds_what_the_one_before_it_stored(
    tmp_path: Path, expected: list[list[int]], depth: int, policy: str
) -> None:
    options = SMALL | {"store": f"file:{tmp_path}", "store_prefetch": policy, "overlap": depth}
    with LLM(**options) as llm:
        assert tokens_of(llm) == expected
        assert stats_of(llm).cache.uploads.num_fulfilled >= 10 + 10 + 10
    with LLM(**options) as llm:
        results = llm.generate(*workload())
        assert [result.outputs[0].token_ids for result in results] == expected
        for result in results:
            assert result.cached.store == (len(result.prompt_token_ids) - 1) // PAGE * PAGE
            assert result.cached.num_tokens == result.cached.store
        print(stats_of(llm).cache)
