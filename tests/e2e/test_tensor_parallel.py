"""Groups of ranks give the tokens of one, exactly, in float64 over gloo (S1), whatever became of pages and drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hiserve import SamplingParams
from tests.helpers.cache_paths import Case, Work, answer, chunks, device_hits, pairwise, preemption
from tests.helpers.dialogues import trained
from tests.helpers.rank_threads import rank_threads
from tests.helpers.widening import some

SEED = 43
NUM_NEW = 10
PATHS: tuple[Callable[..., None], ...] = (chunks, preemption, device_hits)
ALL: list[Case] = list(product(PATHS, ("off", "ngram", "eagle3", "mtp"), (0, 2, "auto"), (0, 1), (2, 4)))
USUAL: list[Case] = [(preemption, "eagle3", "auto", 1, 2)]


@lru_cache
def work() -> Work:
    """Prompts that repeat themselves: greedy, drawn from all tokens, from few, and with penalties, scores and a bias."""
    rng = np.random.default_rng(SEED)
    shared = rng.integers(7, 4096, 20).tolist()
    prompts = [shared + rng.integers(7, 4096, 3 + 5 * index).tolist() + shared[:9] for index in range(4)]
    ways: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "logit_bias": {9: -4.0}},
    ]
    sampling = [
        SamplingParams(seed=i, max_tokens=NUM_NEW - i % 2, ignore_eos=True, **way) for i, way in enumerate(ways)
    ]  # type: ignore[arg-type]
    return answer(prompts, sampling)


@pytest.mark.parametrize(
    ("path", "proposer", "steps", "depth", "size"), some(dict.fromkeys([*USUAL, *pairwise(ALL)]), *USUAL)
)
def test_a_group_has_the_tokens_of_one(
    path: Callable[..., None], proposer: str, steps: int | str, depth: int, size: int, tmp_path: Path
) -> None:
    spec = {"spec": "off"} if proposer == "off" else {"spec": trained(proposer), "spec_steps": steps}
    with rank_threads():
        path(work(), tmp_path, 16, overlap=depth, tp=size, host_cache_gib=0, max_model_len=96, **spec)
