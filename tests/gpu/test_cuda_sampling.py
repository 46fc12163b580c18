"""The sampler, scores and scored prompts on CUDA: no waiting, and the results of the CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from hiserve.core.plan import Scores
from hiserve.core.request import SamplingParams
from hiserve.engine.graph_check import no_sync
from hiserve.kernels.noise import gumbel, gumbel_at
from hiserve.kernels.sampling import argmax, ascending, likeliest, token_counts
from tests.gpu.reference_engine import NUM_PAGES, engine
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import GREEDY, HandPlanner

pytestmark = pytest.mark.gpu

NUM_NEW = 30
PROMPTS = {1: [7, 3, 300, 3, 8, 41], 2: list(range(40, 180)), 3: [9] * 33, 4: [5, 6], 5: list(range(70))}
SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=1, logprobs=4),
    SamplingParams(temperature=1.1, top_p=0.9, min_p=0.02, frequency_penalty=0.5, seed=2, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_k=100, logit_bias={5: 2.0, 6: -100.0}, seed=3, logprobs=0, prompt_logprobs=20),
    SamplingParams(temperature=0.7, min_tokens=20, stop_token_ids=(3, 9), presence_penalty=0.3, seed=4, logprobs=20),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def told(subject: Engine, settings: tuple[SamplingParams, ...]) -> tuple[list[int], list[Scores]]:
    """Tokens and scores of ragged chunks and decode steps, all submitted before the first result is read."""
    planner = HandPlanner(16, NUM_PAGES, shuffle_seed=1)
    for (row, prompt), params in zip(PROMPTS.items(), settings, strict=True):
        planner.admit(row, prompt, params)
    plans = [
        planner.step({row: min(24, planner.known[row] - planner.computed[row]) for row in PROMPTS})
        for _ in range(NUM_NEW)
    ]
    results = [future.result() for future in [subject.executor.submit(plan) for plan in plans]]
    subject.executor.close()
    tokens = [token for result in results for token in result.tokens[:, 0].tolist()]
    return tokens, [each for result in results for each in (result.scores, result.prompt_scores) if each is not None]


def test_every_setting_at_once_gives_the_tokens_and_scores_of_the_cpu_in_float64(folder: Path) -> None:
    tokens, scores = told(engine(folder, "float64"), SETTINGS)
    wanted_tokens, wanted_scores = told(engine(folder, "float64", "cpu"), SETTINGS)
    assert tokens == wanted_tokens
    assert len(set(tokens)) >= 20
    assert len(scores) == len(wanted_scores) > NUM_NEW
    for got, wanted in zip(scores, wanted_scores, strict=True):
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, rtol=1e-6)
        np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, rtol=1e-6)
        assert (got.top_tokens == wanted.top_tokens).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_setting_makes_a_launch_wait_for_the_device(folder: Path, dtype: str) -> None:
    """All at once, and each for all rows: subsets and whole batches take different paths."""
    for settings in (SETTINGS, *((each,) * len(PROMPTS) for each in SETTINGS)):
        ready = engine(folder, dtype)  # loading weights may wait
        with no_sync():
            tokens, _ = told(ready, settings)
        assert len(tokens) >= NUM_NEW


def test_scores_do_not_change_a_token(folder: Path) -> None:
    silent = tuple(msgspec.structs.replace(each, logprobs=None, prompt_logprobs=None) for each in SETTINGS)
    assert told(engine(folder, "float64"), silent)[0] == told(engine(folder, "float64"), SETTINGS)[0]


@pytest.mark.parametrize("size", [333, 128_256])
def test_kernels_are_those_of_the_cpu(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = -torch.randn((6, size), generator=generator).abs().mul(10).round() / 10  # many equal values
    tokens = torch.randint(0, size, (6, 500), generator=generator)
    start, end = torch.arange(6), torch.arange(6) * 100
    seed, choice, entries = torch.arange(6) * 2**40, torch.arange(6), tokens[:, :64]
    for device in ("cpu", "cuda"):
        assert torch.equal(likeliest(x.to(device), 20).cpu(), likeliest(x, 20))
        assert torch.equal(ascending(x.to(device)).cpu(), ascending(x))
        assert torch.equal(argmax(x.to(device)).cpu(), argmax(x))
        counts = token_counts(tokens.to(device), start.to(device), end.to(device), size)
        assert torch.equal(counts.cpu(), token_counts(tokens, start, end, size))
        key = [each.to(device) for each in (seed, choice, end)]
        every = gumbel(*key, 0, size)
        assert torch.equal(gumbel_at(*key, 0, entries.to(device)), every.gather(1, entries.to(device)))
