"""Prefixes that left the device come back from the host: the same tokens, and the copies really ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.ipc.messages import WorkerStats
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, engine_of
from tests.helpers.widening import some

PAGE = 16
SMALL: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 512,
    "kv_pages": 60,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "spec_steps": 2,
    "cpu_threads": 1,
    "log_level": "warning",
}
SEED = 11
# Lengths on, one after and one before the end of a page.
LENGTHS = (160, 161, 175, 192, 193, 207, 160, 161)


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    shared = rng.integers(7, 4096, 64).tolist()
    prompts = [shared * (i % 2) + rng.integers(7, 4096, size - 64 * (i % 2)).tolist() for i, size in enumerate(LENGTHS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    drawn = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=20, ignore_eos=True) for i in range(8)]
    return prompts, [greedy if i % 2 else drawn[i] for i in range(len(prompts))]


def tokens_of(llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]


def stats_of(llm: LLM) -> WorkerStats:
    return engine_of(llm).stats()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    prompts, sampling = workload()
    with LLM(disable_prefix_cache=True, spec="off", **SMALL) as llm:
        tokens = tokens_of(llm, prompts, sampling)
    assert len({token for each in tokens for token in each}) >= 20
    return tokens


@pytest.fixture(params=some([0, 1], 1), ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(host_cache_gib=0.2, overlap=request.param, **SMALL) as made:
        yield made


def test_what_left_the_device_comes_back_with_the_same_tokens(llm: LLM, expected: list[list[int]]) -> None:
    prompts, sampling = workload()
    assert tokens_of(llm, prompts, sampling) == expected
    stored = stats_of(llm)
    assert stored.cache.offloads.num_fulfilled > 0
    for _ in range(2):
        results = llm.generate(prompts, sampling)
        assert [result.outputs[0].token_ids for result in results] == expected
        for result in results:
            assert result.num_cached_tokens == (len(result.prompt_token_ids) - 1) // PAGE * PAGE
    loaded = stats_of(llm)
    assert loaded.evicted_pages > stored.evicted_pages
    assert loaded.cache.loads.num_fulfilled > 100
    assert loaded.cache.loads.unfulfilled.keys() <= {"not_worth_loading"}
    check_whole(llm)


def test_a_flush_empties_both_tiers(llm: LLM, expected: list[list[int]]) -> None:
    prompts, sampling = workload()
    assert tokens_of(llm, prompts, sampling) == expected
    engine_of(llm).flush()
    results = llm.generate(prompts[:1], sampling[:1])
    assert results[0].num_cached_tokens == 0
    assert results[0].outputs[0].token_ids == expected[0]
    check_whole(llm)
