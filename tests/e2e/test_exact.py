"""With ``--exact`` the same bits on the CPU, whatever became of a prompt's pages, in which chunks it came and beside what.

The types are those that people serve; log-probabilities are compared without tolerance. The rows that are compared with were
computed one after the other, without cache, drafts or steps planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hiserve import SamplingParams
from tests.helpers.cache_paths import Work, answer, chunks, device_hits, host_hits, preemption
from tests.helpers.dialogues import trained
from tests.helpers.widening import usual

SEED = 47
PATHS: tuple[Callable[..., None], ...] = (chunks, preemption, device_hits, host_hits)
PROPOSERS, DEPTHS, DTYPES = ("off", "ngram", "eagle3"), (0, 1), ("bfloat16", "float32")


@lru_cache
def work_of(dtype: str) -> Work:
    """Prompts that repeat themselves and share their beginnings; one ends at the boundary of a page."""
    rng = np.random.default_rng(SEED)
    shared = rng.integers(7, 4096, 20).tolist()
    prompts = [(shared * 2 + rng.integers(7, 4096, 40).tolist())[:length] for length in (49, 64, 80)]
    sampling = [
        SamplingParams(seed=i, max_tokens=11 - i, ignore_eos=True, temperature=0.9 * (i % 2), logprobs=3)
        for i in range(3)
    ]
    work = answer(prompts, sampling, exact=True, dtype=dtype, max_running_requests=1, overlap=0)
    return replace(work, max_error=0.0)


def name_of(case: tuple[Callable[..., None], str, int, str]) -> str:
    path, *others = case
    return "-".join((path.__name__, *map(str, others)))


@pytest.mark.parametrize("case", usual(product(PATHS, PROPOSERS, DEPTHS, DTYPES)), ids=name_of)
def test_nothing_changes_a_bit(case: tuple[Callable[..., None], str, int, str], tmp_path: Path) -> None:
    path, proposer, depth, dtype = case
    options = {"spec": trained(proposer), "spec_steps": 0 if proposer == "off" else 3, "overlap": depth}
    path(work_of(dtype), tmp_path, 16, exact=True, dtype=dtype, **options)
