"""The same tokens, whatever became of a prompt's pages before it came again; each case shows that its path was taken.

Exact: float64 on the CPU, against an engine that reuses nothing. The canary checks each page that is read.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.cache.pools.segment import SHARED_MEMORY
from hiserve.core.copies import CopyKind, PageCopy
from hiserve.core.reuse import CacheUse
from tests.helpers.tiered import check_whole, counts_of, engine_of, garble_host, leave_device, rest, seal, transfers_of

PAGE = 16
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE,
    "max_model_len": 160,
    "kv_pages": 64,
    "max_running_requests": 4,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "log_level": "warning",
}
SEED = 41
NUM_NEW = 16
NUM_PROMPTS = 4  # no more loads than are believed to be worth it unmeasured
NUM_PAGES = 3  # whole pages of each prompt, at least
HOST = {"host_cache_gib": 0.025, "kv_canary": True}  # some 100 pages
# Some ten pages on each of two tiers: fewer than the prompts of one round take.
SMALL = {"kv_pages": 11, "host_cache_gib": 0.003, "kv_canary": True}


@dataclass(frozen=True)
class Work:
    """Prompts, how they are answered, and what the answers must be.

    Attributes:
        prompts: Every second begins like the first.
        sampling: Of each.
        expected: Tokens of each answer.
        num_full: Tokens of each prompt that can come from a cache.
    """

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    expected: list[list[int]]
    num_full: list[int]


def ask(llm: LLM, work: Work, *, backwards: bool = False) -> list[CacheUse]:
    """Asks everything once and returns what came from where; ``backwards``: what was used last comes first."""
    order = -1 if backwards else 1
    results = llm.generate(work.prompts[::order], work.sampling[::order])[::order]
    tokens = [result.outputs[0].token_ids for result in results]
    assert tokens == work.expected
    return [result.cached for result in results]


@lru_cache
def work_of(remainder: int, is_greedy: bool, seed: int) -> Work:
    """Makes prompts whose lengths leave a remainder by the page, and asks an engine that reuses nothing."""
    rng = np.random.default_rng([seed, remainder, is_greedy])
    shared = rng.integers(7, 4096, PAGE + 5).tolist()
    prompts = []
    for index in range(NUM_PROMPTS):
        head = shared if index % 2 else []
        size = (NUM_PAGES + index % 2) * PAGE + remainder
        prompts.append(head + rng.integers(7, 4096, size - len(head)).tolist())
    options = {"temperature": 0.0} if is_greedy else {"temperature": 0.9, "top_p": 0.95}
    sampling = [SamplingParams(seed=i, max_tokens=NUM_NEW, ignore_eos=True, **options) for i in range(NUM_PROMPTS)]
    with LLM(disable_prefix_cache=True, host_cache_gib=0, **SETTINGS) as llm:
        results = llm.generate(prompts, sampling)
    expected = [result.outputs[0].token_ids for result in results]
    assert len({token for each in expected for token in each}) >= 20
    assert all(result.cached.num_tokens == 0 for result in results)
    return Work(prompts, sampling, expected, [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts])


# --- paths: each takes a directory of its own, and the settings of the case --------------------------------


def device_hits(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | {"host_cache_gib": 0, "kv_canary": True} | settings) as llm:
        ask(llm, work)
        again = ask(llm, work)
        assert [use.device for use in again] == work.num_full
        check_whole(llm)


def host_hits(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | HOST | settings) as llm:
        ask(llm, work)
        leave_device(llm)
        again = ask(llm, work)
        assert sum(use.host for use in again) > 0
        assert [use.num_tokens for use in again] == work.num_full
        assert counts_of(llm).loads.num_fulfilled >= NUM_PAGES * NUM_PROMPTS // 2
        check_whole(llm)


def store_hits(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | HOST | {"store": f"file:{folder}", "store_prefetch": "wait"} | settings) as llm:
        ask(llm, work)
        rest(llm)
        assert counts_of(llm).uploads.num_fulfilled > 0
        engine_of(llm).flush()
        again = ask(llm, work)
        assert sum(use.store for use in again) > 0
        assert [use.num_tokens for use in again] == work.num_full
        assert counts_of(llm).prefetches.num_fulfilled > 0
        check_whole(llm)


def eviction_storm(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | SMALL | settings) as llm:
        ask(llm, work)
        rest(llm)
        for backwards in (True, False, True):
            ask(llm, work, backwards=backwards)
        counts = counts_of(llm)
        assert counts.device.num_evicted > 0 and counts.host.num_evicted > 0 and counts.loads.num_fulfilled > 0
        check_whole(llm)


def warm_restart(work: Work, folder: Path, **settings: Any) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    try:
        for life in range(2):
            with LLM(**SETTINGS | HOST | {"host_cache_name": name} | settings) as llm:
                found = ask(llm, work)
                if life:
                    assert [use.num_tokens for use in found] == work.num_full
                    assert sum(use.host for use in found) > 0
                    check_whole(llm)
                else:
                    seal(llm)
            del llm
            gc.collect()  # the lock of the name goes with the last view of its memory
    finally:
        for path in [*SHARED_MEMORY.glob(f"hiserve-{name}*"), *SHARED_MEMORY.glob(f".hiserve-{name}*")]:
            path.unlink()


def failed_loads(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | HOST | settings) as llm:
        ask(llm, work)
        leave_device(llm)
        num_loads = 0

        def fail_some(copy: PageCopy) -> str | None:
            nonlocal num_loads
            num_loads += copy.kind is CopyKind.LOAD
            return "broken" if copy.kind is CopyKind.LOAD and num_loads % 2 else None

        transfers_of(llm)._hold = fail_some
        ask(llm, work)
        assert counts_of(llm).loads.unfulfilled["broken"] > 0
        check_whole(llm)


def garbled_pages(work: Work, folder: Path, **settings: Any) -> None:
    with LLM(**SETTINGS | HOST | {"cache_verify": "all"} | settings) as llm:
        ask(llm, work)
        leave_device(llm)
        seal(llm)
        garble_host(llm)
        ask(llm, work)
        counts = counts_of(llm)
        assert counts.loads.unfulfilled["checksum"] == counts.loads.num_wanted > 0
        leave_device(llm)
        again = ask(llm, work)  # what was computed again took the place of what was garbled
        assert sum(use.host for use in again) > 0
        check_whole(llm)


Life = Callable[..., None]
PATHS: tuple[Life, ...] = (
    device_hits,
    host_hits,
    store_hits,
    eviction_storm,
    warm_restart,
    failed_loads,
    garbled_pages,
)
REMAINDERS, DEPTHS, IS_GREEDY = (0, 1, 15), (0, 1), (True, False)
Case = tuple[Life, int, int, bool]
ALL: list[Case] = list(product(PATHS, REMAINDERS, DEPTHS, IS_GREEDY))
NUM_REQUESTS_LONG = 2000
NUM_ROUNDS_LONG = -(-NUM_REQUESTS_LONG // (len(ALL) * NUM_PROMPTS * 2))  # each path asks everything twice at least


def pairs_of(case: Case) -> set[tuple[int, Any, int, Any]]:
    return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}


def pairwise(cases: list[Case]) -> Iterator[Case]:
    """Yields cases until each pair of two factors' values has occurred, those first that bring most new ones."""
    missing = set().union(*map(pairs_of, cases))
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        yield best


def named(case: Case) -> str:
    path, remainder, depth, is_greedy = case
    return f"{path.__name__}-{remainder}_over-depth_{depth}-{'greedy' if is_greedy else 'drawn'}"


@pytest.mark.parametrize("case", list(pairwise(ALL)), ids=named)
def test_the_tokens_are_those_of_an_engine_without_cache(case: Case, tmp_path: Path) -> None:
    path, remainder, depth, is_greedy = case
    path(work_of(remainder, is_greedy, SEED), tmp_path, overlap=depth)


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product(case: Case, tmp_path: Path) -> None:
    path, remainder, depth, is_greedy = case
    for number in range(NUM_ROUNDS_LONG):
        print(f"seed {SEED + 1 + number}")
        path(work_of(remainder, is_greedy, SEED + 1 + number), tmp_path / str(number), overlap=depth)


def test_the_product_and_its_covering_are_what_they_claim() -> None:
    covering = list(pairwise(ALL))
    assert set().union(*map(pairs_of, covering)) == set().union(*map(pairs_of, ALL))
    assert len(covering) < len(ALL) / 3
