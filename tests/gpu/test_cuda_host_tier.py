"""Prefixes that left a CUDA device come back from the host: the CPU's tokens, whatever the streams do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.storage.segment import PageLayout
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.models.model_config import NANO, find_model, read_model_config
from tests.helpers import cuda
from tests.helpers.gated import hold_loads, loads_open, run_until, send
from tests.helpers.tiered import engine_of, transfers_of
from tests.helpers.tiers import squeeze
from tests.helpers.transfers import hold_copies

pytestmark = pytest.mark.gpu

SEED = 11
# Lengths on, one after and one before the end of a page.
LENGTHS = (160, 161, 175, 192, 193, 207, 160, 161)
NUM_NEW = 20
SHORT = 10_000_000  # cycles: 5 ms
LOAD_S = 1.0
# Pages of 256 KiB, which a kernel copies, and of 1 MiB, which pass through staging memory.
PAGES = {16: 60, 64: 19}


def settings(page_size: int) -> dict[str, Any]:
    return {
        "in_process": True,
        "spec": "off",
        "device": cuda.DEVICE,
        "dtype": "float64",
        "page_size": page_size,
        "max_model_len": 512,
        "kv_pages": PAGES[page_size],
        "max_running_requests": 4,
        "max_batched_tokens": 64,
        "cpu_threads": 1,
        "log_level": "warning",
    }


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    shared = rng.integers(7, 4096, 64).tolist()
    prompts = [shared * (i % 2) + rng.integers(7, 4096, size - 64 * (i % 2)).tolist() for i, size in enumerate(LENGTHS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    drawn = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=NUM_NEW, ignore_eos=True) for i in range(8)]
    return prompts, [greedy if i % 2 else drawn[i] for i in range(len(prompts))]


def tokens_of(llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]


def check_pages(llm: LLM, page_size: int = 16) -> None:
    stats = engine_of(llm).stats()
    assert stats.free_pages + stats.evictable_pages == PAGES[page_size] - 1


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of the CPU, and of no cache."""
    prompts, sampling = workload()
    with LLM(disable_prefix_cache=True, **settings(16) | {"device": "cpu"}) as llm:
        tokens = tokens_of(llm, prompts, sampling)
    assert len({token for each in tokens for token in each}) >= 20
    return tokens


@pytest.fixture
def llm(depth: int) -> Iterator[LLM]:
    with LLM(host_cache_gib=0.2, overlap=depth, **settings(16)) as made:
        yield made


@pytest.mark.parametrize("page_size", PAGES)
def test_what_left_the_device_comes_back_with_the_cpu_s_tokens(
    page_size: int, depth: int, expected: list[list[int]]
) -> None:
    prompts, sampling = workload()
    with LLM(host_cache_gib=0.2, overlap=depth, **settings(page_size)) as llm:
        mechanism = bool(transfers_of(llm)._streams[CopyKind.LOAD]._slots) if cuda.DEVICE == "cuda" else page_size > 16
        assert mechanism == (page_size == 64)
        assert tokens_of(llm, prompts, sampling) == expected
        stored = engine_of(llm).stats()
        assert stored.cache.offloads.num_fulfilled > 0
        for _ in range(2):
            results = llm.generate(prompts, sampling)
            assert [result.outputs[0].token_ids for result in results] == expected
            for result in results:
                assert result.num_cached_tokens == (len(result.prompt_token_ids) - 1) // page_size * page_size
        loaded = engine_of(llm).stats()
        assert loaded.evicted_pages > stored.evicted_pages
        assert loaded.cache.loads.num_fulfilled > PAGES[page_size] // 2
        assert loaded.cache.loads.unfulfilled.keys() <= {"not_worth_loading"}
        assert loaded.graph_gate.keys() == {"replay"}
        assert loaded.graph_gate["replay"].keys() == {"piecewise"}  # attention in float64 cannot be captured
        check_pages(llm, page_size)


def test_loads_that_fail_cost_time_and_nothing_else(llm: LLM, expected: list[list[int]]) -> None:
    prompts, sampling = workload()
    assert tokens_of(llm, prompts, sampling) == expected
    num_loads = 0

    def fail_some(copy: PageCopy) -> str | None:
        nonlocal num_loads
        num_loads += copy.kind is CopyKind.LOAD
        return "broken" if copy.kind is CopyKind.LOAD and num_loads % 3 == 0 else None

    hold_copies(transfers_of(llm), fail_some)
    for _ in range(3):
        assert tokens_of(llm, prompts, sampling) == expected
    stats = engine_of(llm).stats()
    assert stats.cache.loads.unfulfilled["broken"] > 0
    assert stats.cache.loads.num_fulfilled > 0
    check_pages(llm)


def test_a_host_that_is_small_evicts_and_stays_right(expected: list[list[int]]) -> None:
    prompts, sampling = workload()
    page_bytes = PageLayout(read_model_config(find_model(NANO)).kv_groups("float64"), 16).page_bytes
    with LLM(host_cache_gib=34 * page_bytes / 2**30, **settings(16)) as llm:
        for _ in range(3):
            assert tokens_of(llm, prompts, sampling) == expected
        assert engine_of(llm).stats().cache.offloads.num_fulfilled > 34
        check_pages(llm)


class Delayed:
    """Runners whose steps begin and end late on the device, so that whatever does not wait for them is early."""

    def __init__(self, runners: Any) -> None:
        self._runners = runners

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runners, name)

    def run(self, *arguments: Any) -> Any:
        torch.cuda._sleep(SHORT)
        outcome = self._runners.run(*arguments)
        torch.cuda._sleep(SHORT)
        return outcome


def delay(llm: LLM) -> None:
    executor: Any = engine_of(llm)._executor
    executor._runners = Delayed(executor._runners)


def test_tc_20_a_store_begins_when_the_forward_that_writes_its_pages_is_done(
    llm: LLM, expected: list[list[int]]
) -> None:
    prompts, sampling = workload()
    delay(llm)
    assert tokens_of(llm, prompts, sampling) == expected
    squeeze(engine_of(llm)._planner._cache)
    before = engine_of(llm).stats().cache.loads.num_fulfilled
    assert tokens_of(llm, prompts, sampling) == expected  # reads what was stored
    assert engine_of(llm).stats().cache.loads.num_fulfilled > before
    check_pages(llm)


def test_tc_21_a_load_leaves_reclaimed_pages_to_the_forward_that_still_writes_them(
    llm: LLM, expected: list[list[int]]
) -> None:
    """Rows end at a stop token, which the step launched ahead does not know: it writes to pages given back since."""
    prompts, sampling = workload()
    stops = [tokens[NUM_NEW // 2] for tokens in expected]
    short = [msgspec.structs.replace(each, stop_token_ids=(stop,)) for each, stop in zip(sampling, stops, strict=True)]
    cut = [tokens[: tokens.index(stop) + 1] for tokens, stop in zip(expected, stops, strict=True)]
    assert tokens_of(llm, prompts, short) == cut
    delay(llm)
    for _ in range(2):
        assert tokens_of(llm, prompts, short) == cut
    assert engine_of(llm).stats().cache.loads.num_fulfilled > 50
    check_pages(llm)


def test_a_load_stays_open_for_many_steps_while_others_decode(llm: LLM, expected: list[list[int]]) -> None:
    prompts, sampling = workload()
    assert tokens_of(llm, prompts, sampling) == expected
    engine, tokens = engine_of(llm), dict[int, list[int]]()
    hold_loads(llm, LOAD_S)
    lengthy = msgspec.structs.replace(sampling[1], seed=1, max_tokens=400)
    other = [int(token) for token in np.random.default_rng(1).integers(7, 4096, 40)]
    send(engine, 1, other, lengthy)
    run_until(engine, tokens, lambda: len(tokens.get(1, ())) >= 3)
    squeeze(engine._planner._cache)
    before, loaded = len(tokens[1]), engine.stats().cache.loads.num_fulfilled
    with loads_open(llm):
        send(engine, 2, prompts[0], sampling[0])
        run_until(engine, tokens, lambda: len(tokens[1]) >= before + 20)
        assert 2 not in tokens
    run_until(engine, tokens, lambda: 2 in tokens)
    assert engine.stats().cache.loads.num_fulfilled == loaded + (LENGTHS[0] - 1) // 16
    run_until(engine, tokens, lambda: not engine.has_work)
    assert tokens[2] == expected[0]
    again = llm.generate([other], [msgspec.structs.replace(lengthy, max_tokens=len(tokens[1]))])
    assert again[0].outputs[0].token_ids == tokens[1]
    check_pages(llm)
