"""Constant traffic with the host over a small pool, graphs on, delays on every stream: no token differs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.kernels.reference import gumbel
from hiserve.kernels.step_reference import SAMPLE_STREAM
from hiserve.messages.types import WorkerStats
from hiserve.models.config import NANO, find_model
from tests.helpers import cuda
from tests.helpers.jitter import jitter
from tests.helpers.margin import MAX_SHARE, as_tensor, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import check_whole, engine_of

pytestmark = pytest.mark.gpu

SEED = 91
PAGE = 16
MAX_PAGES_OF_FOREWORD = 12
WHAT = ("record", "wait_event", "replay")
STRETCH = 250  # requests that ask for the same kind of answer
MIN_REPLAYS = 0.98  # of all steps: graphs cover every one of them


@dataclass(frozen=True)
class Load:
    """How much traffic.

    Attributes:
        num_requests: In all.
        num_running: At once.
        num_forewords: Prefixes that requests share; of six pages, in the mean.
        kv_pages: Of the device: much less than forewords and replies take.
    """

    num_requests: int
    num_running: int
    num_forewords: int
    kv_pages: int


LOADS = [
    pytest.param(Load(300, 16, 48, 180), id="300"),
    pytest.param(Load(10_000, 256, 400, 2_000), id="10000", marks=pytest.mark.long),
]


def settings(load: Load, **options: Any) -> dict[str, Any]:
    return {
        "in_process": True,
        "device": cuda.DEVICE,
        "dtype": "float32",
        "page_size": PAGE,
        "max_model_len": 320,
        "max_running_requests": load.num_running,
        "max_batched_tokens": 2048,
        "cpu_threads": 1,
        "log_level": "warning",
    } | options


def traffic(load: Load) -> tuple[list[list[int]], list[SamplingParams]]:
    """Forewords that many share, of any length, and a few tokens of each one's own; every second request comes again.

    By stretches replies are greedy, or drawn, and have scores, or none.
    """
    print(f"traffic seed {SEED}")
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(1, MAX_PAGES_OF_FOREWORD * PAGE, load.num_forewords)
    forewords = [rng.integers(7, 4096, size).tolist() for size in sizes]
    greedy = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
    free = msgspec.structs.replace(greedy, temperature=0.7)
    kinds = (greedy, msgspec.structs.replace(greedy, logprobs=1), free, msgspec.structs.replace(free, logprobs=1))
    prompts: list[list[int]] = []
    sampling: list[SamplingParams] = []
    for index in range(load.num_requests):
        if index % 2 and index > 40:
            earlier = int(rng.integers(max(0, index - 600), index))
            prompts.append(prompts[earlier])
            sampling.append(sampling[earlier])
            continue
        own = rng.integers(7, 4096, rng.integers(1, 40)).tolist()
        prompts.append(forewords[rng.integers(load.num_forewords)] + own)
        kind = kinds[index // STRETCH % len(kinds)]
        sampling.append(msgspec.structs.replace(kind, seed=index, max_tokens=int(rng.integers(8, 17))))
    return prompts, sampling


def tokens_of(llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(list(prompts), list(sampling))]


def check_margins(differing: list[tuple[list[int], SamplingParams, list[int]]], num_requests: int) -> None:
    """Tokens that another shape of batch rounded the other way: each must be as good as the best, and few may be."""
    assert len(differing) <= MAX_SHARE * num_requests, f"{len(differing)} replies differ: {differing[:2]}"
    if not differing:
        return
    forced = {row: teacher_forced(prompt, tokens) for row, (prompt, _, tokens) in enumerate(differing, start=1)}
    sizes = {"num_pages": 21 * len(forced) + 1, "max_rows": len(forced), "max_len": 320}
    scores = [
        Engine(find_model(NANO), device=cuda.DEVICE, attention="reference", **sizes).logits(
            HandPlanner(PAGE, sizes["num_pages"]), forced, chunk
        )
        for chunk in (64, 7)
    ]
    difference = shape_difference(scores[0], scores[1])
    for row, (prompt, sampling, tokens) in enumerate(differing, start=1):
        reference = scores[0][row][len(prompt) - 1 :].cpu().double()
        verdict = margin(reference + noise(prompt, sampling, tokens), as_tensor(tokens), difference)
        print(verdict)
        assert verdict.worst <= verdict.epsilon, (prompt, tokens, verdict)


def noise(prompt: list[int], sampling: SamplingParams, tokens: list[int]) -> torch.Tensor:
    """What drawing adds to the scores: the token is the best of the sum."""
    assert sampling.seed is not None
    places = torch.arange(len(prompt), len(prompt) + len(tokens))
    seeds = torch.full_like(places, sampling.seed)
    return sampling.temperature * gumbel(seeds, torch.zeros_like(places), places, SAMPLE_STREAM, 4096)


def share_of_replays(stats: WorkerStats) -> float:
    counts = stats.graph_gate
    num_steps = sum(sum(reasons.values()) for reasons in counts.values())
    share = sum(counts["replay"].values()) / num_steps
    print(f"{share:.4f} of {num_steps} steps replayed: {counts}")
    return share


@pytest.mark.parametrize("load", LOADS)
def test_no_token_differs_under_jitter_and_constant_traffic_with_the_host(load: Load) -> None:
    prompts, sampling = traffic(load)
    begin = time.monotonic()
    with LLM(**settings(load, graphs="off", kv_pages=3_000 + 2 * load.num_requests, host_cache_gib=0)) as plain:
        expected = tokens_of(plain, prompts, sampling)
    print(f"endless cache, no graphs: {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    with LLM(**settings(load, overlap=1, kv_pages=load.kv_pages, host_cache_gib=1.0)) as llm:
        engine_of(llm)._planner._costs.is_worth_loading = lambda *_: True  # type: ignore[method-assign]
        with jitter(SEED) as delays:
            tokens = tokens_of(llm, prompts, sampling)
            cuda.wait_for_stream()
        stats = engine_of(llm).stats()
        cache = stats.cache
        print(f"{time.monotonic() - begin:.1f} s; {dict(delays.counts)}; {cache.loads} {cache.stores}")
        # Constant traffic both ways. Pages are loaded as often as they are wanted again: more than one for each request. A
        # page is stored once, whoever asks for it later, and only pages that differ are stored: few of so many requests
        # that share forewords or come again. But more went out than twice all that the device holds at a time.
        assert cache.loads.num_fulfilled > load.num_requests
        assert cache.stores.num_fulfilled > 2 * load.kv_pages
        assert stats.evicted_pages > load.num_requests
        assert min(delays.counts[f"{when} {what}"] for when in ("before", "after") for what in WHAT) > 0
        assert share_of_replays(stats) >= MIN_REPLAYS
        check_whole(llm)
    differing = [
        (prompt, params, got)
        for prompt, params, got, wanted in zip(prompts, sampling, tokens, expected, strict=True)
        if got != wanted
    ]
    print(f"{len(differing)} of {len(prompts)} replies differ")
    check_margins(differing, load.num_requests)
