"""Constant traffic with the host over a small pool, graphs on, delays on every stream: no token differs."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from tests.helpers import cuda
from tests.helpers.jitter import jitter
from tests.helpers.storm import (
    PAGE,
    Load,
    Requests,
    check_margins,
    load_whatever_it_costs,
    settings,
    share_of_replays,
    tokens_of,
)
from tests.helpers.tiered import check_whole, engine_of

pytestmark = pytest.mark.gpu

SEED = 91
MAX_PAGES_OF_FOREWORD = 12
WHAT = ("record", "wait_event", "replay")
STRETCH = 250  # requests that ask for the same kind of answer
MIN_REPLAYS = 0.98  # of all steps: graphs cover every one of them

LOADS = [
    pytest.param(Load(300, 16, 48, 180), id="300"),
    pytest.param(Load(10_000, 256, 400, 2_000), id="10000", marks=pytest.mark.long),
]


def traffic(load: Load) -> Requests:
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


@pytest.mark.parametrize("load", LOADS)
def test_no_token_differs_under_jitter_and_constant_traffic_with_the_host(load: Load) -> None:
    prompts, sampling = traffic(load)
    begin = time.monotonic()
    with LLM(**settings(load, graphs="off", kv_pages=3_000 + 2 * load.num_requests, host_cache_gib=0)) as plain:
        expected = tokens_of(plain, prompts, sampling)
    print(f"endless cache, no graphs: {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    with LLM(**settings(load, overlap=1, kv_pages=load.kv_pages, host_cache_gib=1.0)) as llm:
        load_whatever_it_costs(llm)
        with jitter(SEED) as delays:
            tokens = tokens_of(llm, prompts, sampling)
            cuda.wait_for_stream()
        stats = engine_of(llm).stats()
        cache = stats.cache
        print(f"{time.monotonic() - begin:.1f} s; {dict(delays.counts)}; {cache.loads} {cache.offloads}")
        # Constant traffic both ways. Pages are loaded as often as they are wanted again: more than one for each request. A
        # page is stored once, whoever asks for it later, and only pages that differ are stored: few of so many requests
        # that share forewords or come again. But more went out than twice all that the device holds at a time.
        assert cache.loads.num_fulfilled > load.num_requests
        assert cache.offloads.num_fulfilled > 2 * load.kv_pages
        assert stats.evicted_pages > load.num_requests
        assert min(delays.counts[f"{when} {what}"] for when in ("before", "after") for what in WHAT) > 0
        assert share_of_replays(stats) >= MIN_REPLAYS
        check_whole(llm)
    check_margins((prompts, sampling), tokens, expected)
