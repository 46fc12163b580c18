"""The same tokens, whatever became of a prompt's pages before it came again; each case shows that its path was taken.

Exact: float64 on the CPU, against an engine that reuses nothing. The canary checks each page that is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hiserve import SamplingParams
from tests.helpers.cache_paths import (
    PAGE,
    Case,
    Work,
    answer,
    device_hits,
    eviction_storm,
    failed_loads,
    garbled_pages,
    host_hits,
    pairs_of,
    pairwise,
    store_hits,
    warm_restart,
)
from tests.helpers.small_model import small_model
from tests.helpers.widening import usual

SEED = 41
NUM_NEW = 16
NUM_PROMPTS = 4  # no more loads than are believed to be worth it unmeasured
NUM_PAGES = 3  # whole pages of each prompt, at least
PATHS: tuple[Callable[..., None], ...] = (
    device_hits,
    host_hits,
    store_hits,
    eviction_storm,
    warm_restart,
    failed_loads,
    garbled_pages,
)
REMAINDERS, DEPTHS, IS_GREEDY = (0, 1, 15), (0, 1), (True, False)
ALL: list[Case] = list(product(PATHS, REMAINDERS, DEPTHS, IS_GREEDY))
NUM_REQUESTS_LONG = 2000
NUM_ROUNDS_LONG = -(-NUM_REQUESTS_LONG // (len(ALL) * NUM_PROMPTS * 2))  # each path asks everything twice at least


@lru_cache
def work_of(remainder: int, is_greedy: bool, seed: int) -> Work:
    """Makes prompts whose lengths leave a remainder by the page; every second begins like the first."""
    rng = np.random.default_rng([seed, remainder, is_greedy])
    shared = rng.integers(7, 4096, PAGE + 5).tolist()
    prompts = []
    for index in range(NUM_PROMPTS):
        head = shared if index % 2 else []
        size = (NUM_PAGES + index % 2) * PAGE + remainder
        prompts.append(head + rng.integers(7, 4096, size - len(head)).tolist())
    options = {"temperature": 0.0} if is_greedy else {"temperature": 0.9, "top_p": 0.95}
    sampling = [SamplingParams(seed=i, max_tokens=NUM_NEW, ignore_eos=True, **options) for i in range(NUM_PROMPTS)]
    return answer(prompts, sampling, model=small_model())


def named(case: Case) -> str:
    path, remainder, depth, is_greedy = case
    return f"{path.__name__}-{remainder}_over-depth_{depth}-{'greedy' if is_greedy else 'drawn'}"


@pytest.mark.parametrize("case", usual(pairwise(ALL)), ids=named)
def test_the_tokens_are_those_of_an_engine_without_cache(case: Case, tmp_path: Path) -> None:
    path, remainder, depth, is_greedy = case
    path(work_of(remainder, is_greedy, SEED), tmp_path, overlap=depth, model=small_model())


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product(case: Case, tmp_path: Path) -> None:
    path, remainder, depth, is_greedy = case
    for number in range(NUM_ROUNDS_LONG):
        print(f"seed {SEED + 1 + number}")
        path(
            work_of(remainder, is_greedy, SEED + 1 + number), tmp_path / str(number), overlap=depth, model=small_model()
        )


def test_the_product_and_its_covering_are_what_they_claim() -> None:
    covering = list(pairwise(ALL))
    assert set().union(*map(pairs_of, covering)) == set().union(*map(pairs_of, ALL))
    assert len(covering) < len(ALL) / 3
