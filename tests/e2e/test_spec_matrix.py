"""The same tokens, ends and scores with every proposer, whatever became of a prompt's pages meanwhile.

Exact: float64 on the CPU, against an engine that guesses nothing and reuses nothing.
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
    Case,
    Work,
    answer,
    chunks,
    device_hits,
    host_hits,
    pairwise,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.dialogues import trained
from tests.helpers.small_model import small_model
from tests.helpers.widening import usual

SEED = 43
NUM_NEW = 17


PATHS: tuple[Callable[..., None], ...] = (chunks, preemption, device_hits, host_hits, store_hits, storm)
PROPOSERS, STEPS, PAGES, DEPTHS, IS_GREEDY = (
    ("ngram", "draft_model", "eagle3", "mtp"),
    (0, 1, 3, 7, "auto"),
    (1, 16, 64),
    (0, 1),
    (True, False),
)
ALL: list[Case] = list(product(PATHS, PROPOSERS, STEPS, PAGES, DEPTHS, IS_GREEDY))


@lru_cache
def work_of(is_greedy: bool) -> Work:
    """Prompts that repeat themselves, and share their beginnings in pairs."""
    rng = np.random.default_rng([SEED, is_greedy])
    shared = rng.integers(7, 4096, 20).tolist()
    prompts = [shared * 2 + rng.integers(7, 4096, 10 + 9 * index).tolist() + shared[:9] for index in range(4)]
    options = {"temperature": 0.0} if is_greedy else {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2}
    sampling = [
        SamplingParams(seed=i, max_tokens=NUM_NEW - i, ignore_eos=bool(i % 2), logprobs=2, **options) for i in range(4)
    ]
    return answer(prompts, sampling, model=small_model())


def named(case: Case) -> str:
    path, proposer, steps, page_size, depth, is_greedy = case
    return f"{path.__name__}-{proposer}-{steps}-page_{page_size}-depth_{depth}-{'greedy' if is_greedy else 'drawn'}"


@pytest.mark.parametrize("case", usual(pairwise(ALL)), ids=named)
def test_speculation_changes_nothing(case: Case, tmp_path: Path) -> None:
    path, proposer, steps, page_size, depth, is_greedy = case
    settings = {"spec": trained(proposer, small_model()), "spec_steps": steps, "overlap": depth}
    path(work_of(is_greedy), tmp_path, page_size, model=small_model(), **settings)


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product_changes_nothing(case: Case, tmp_path: Path) -> None:
    test_speculation_changes_nothing(case, tmp_path)
