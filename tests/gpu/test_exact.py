"""With ``--exact`` the same bits on a GPU in bfloat16, whatever a step computes beside a token and however it is launched."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.attention.exact_triton import ExactTritonAttention
from hiserve.attention.triton import TritonAttention
from hiserve.kernels import exact, exact_linear
from hiserve.kernels.parts_triton import summed
from hiserve.sampling.sampler import pack_scores
from tests.helpers.attention import Case
from tests.helpers.cache_paths import check
from tests.helpers.dialogues import trained

pytestmark = pytest.mark.gpu

DEVICE, BF16 = "cuda", torch.bfloat16
ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 130, 255, 257, 600, 1100)
# Columns and depth: parts of the depth, none, uneven ends, fewer columns than a tile.
WEIGHTS = ((1024, 4096), (4096, 14_336), (9216, 2048), (130, 2880), (40, 1000), (1, 256))


def randn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_a_product_has_the_same_bits_in_every_batch(weight: tuple[int, int], dtype: torch.dtype) -> None:
    columns, depth = weight
    matrix, bias = randn(columns, depth, seed=1, dtype=dtype) / depth**0.5, randn(columns, seed=2, dtype=dtype)
    x = randn(ROWS[-1], depth, seed=3, dtype=dtype)
    whole = exact.linear(x, matrix, bias)
    torch.testing.assert_close(whole.double(), x.double() @ matrix.double().T + bias, atol=2e-2, rtol=2e-2)
    for rows in ROWS:
        for first in (0, ROWS[-1] - rows):
            assert torch.equal(exact.linear(x[first : first + rows], matrix, bias), whole[first : first + rows]), rows


def test_every_tile_adds_alike() -> None:
    matrix, x = randn(4096, 4096, seed=4), randn(300, 4096, seed=5)
    tiles = {*(each for both in exact_linear._TILES for each in both), exact_linear._TALL, exact_linear._TALLEST}
    first, *others = (summed(exact_linear.multiply(x, matrix, None, tile, is_early=False)) for tile in tiles)
    assert all(torch.equal(first, each) for each in others)


def test_a_token_has_the_same_bits_from_its_experts_whoever_else_asks_them() -> None:
    num_tokens, experts, hidden, inner = 700, 16, 256, 192
    x, gate_up, down = (
        randn(num_tokens, hidden, seed=6),
        randn(experts, 2 * inner, hidden, seed=7),
        randn(experts, hidden, inner, seed=8),
    )
    shares = torch.rand((num_tokens, 4), generator=torch.Generator().manual_seed(9)).to(DEVICE)
    chosen = torch.rand((num_tokens, experts), generator=torch.Generator().manual_seed(10)).topk(4).indices.to(DEVICE)
    whole = exact.mix_experts(x, shares, chosen, gate_up / 16, down / 16)
    for rows in (1, 2, 5, 16, 70, 200):
        some = exact.mix_experts(x[-rows:], shares[-rows:], chosen[-rows:], gate_up / 16, down / 16)
        assert torch.equal(some, whole[-rows:]), rows


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (100, 4), (128, 4), (128, 7), (256, 2)])
@pytest.mark.parametrize("window", [None, 300])
def test_a_query_has_the_same_bits_in_every_chunk(head_dim: int, group: int, window: int | None) -> None:
    """The last tokens of a row of three segments: alone, as drafts, as chunks, and beside other rows, long and short."""
    length = 700
    options: dict[str, Any] = {"head_dim": head_dim, "group": group, "window": window, "dtype": BF16, "device": DEVICE}
    whole = segmented(Case(((0, length),), **options))
    expected = whole.run(ExactTritonAttention(whole.shape))
    torch.testing.assert_close(expected.cpu().double(), whole.oracle()[0], atol=3e-2, rtol=3e-2)
    for new, beside in (
        (1, ()),
        (1, ((900, 1),) * 3),
        (1, ((20, 1),) * 130),
        (4, ((40, 4),)),
        (16, ()),
        (100, ()),
        (513, ((0, 60),)),
    ):
        part = segmented(Case(((length - new, new), *beside), **options))
        slots = [each.inputs.page_table[0, : -(-length // 16)].long()[:, None] * 16 for each in (part, whole)]
        mine, its = ((each + torch.arange(16, device=DEVICE)).flatten()[:length] for each in slots)
        for pool, other in ((part.kv.k, whole.kv.k), (part.kv.v, whole.kv.v)):
            pool[mine] = other[its]
        part.q[:new] = whole.q[-new:]
        part.k[:new], part.v[:new] = whole.k[-new:], whole.v[-new:]
        assert torch.equal(part.run(ExactTritonAttention(part.shape))[:new], expected[-new:]), (new, beside)


@pytest.mark.parametrize("kind", [TritonAttention, ExactTritonAttention])
def test_prompts_of_heads_that_are_no_multiple_of_16_bytes_are_those_of_the_oracle(kind: type[TritonAttention]) -> None:
    """Prompts without a prefix and behind one; the copy engine cannot load such heads."""
    case = Case(((300, 200), (0, 400)), head_dim=100, group=4, dtype=BF16, device=DEVICE)
    case = segmented(case) if kind is ExactTritonAttention else case
    torch.testing.assert_close(case.run(kind(case.shape)).cpu().double(), case.oracle()[0], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("vocab_size", [50_257, 3001, 128_256])
def test_a_score_has_the_same_bits_at_every_place_of_a_batch(vocab_size: int) -> None:
    """Rows of 50,257 numbers begin at other places within 16 bytes."""
    logits, tokens = randn(1, vocab_size, seed=10).repeat(130, 1), torch.full((130,), 7, device=DEVICE)
    for dtype in (BF16, torch.float32):
        found = pack_scores(logits.to(dtype), tokens, 5)
        assert torch.equal(found, found[:1].expand_as(found)), dtype
        assert torch.equal(pack_scores(logits[3:4].to(dtype), tokens[:1], 5), found[:1])


def segmented(case: Case) -> Case:
    case.shape = replace(case.shape, segment=256)
    return case


LENGTHS = (5, 255, 256, 300, 640)
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "device": DEVICE,
    "dtype": "bfloat16",
    "exact": True,
    "max_model_len": 1024,
    "kv_pages": 400,
    "log_level": "warning",
}


@lru_cache
def work() -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    """Prompts of up to three segments, and answers that were made one after the other, without cache, graphs and drafts."""
    rng = np.random.default_rng(51)
    shared = rng.integers(7, 4096, 640).tolist()
    prompts = [shared[: length // 2] + rng.integers(7, 4096, length - length // 2).tolist() for length in LENGTHS]
    prompts += [rng.integers(7, 4096, 3 + number % 9).tolist() for number in range(125)]
    sampling = [
        SamplingParams(seed=i, max_tokens=16, ignore_eos=True, temperature=0.9 * (i % 2), logprobs=3)
        for i in range(130)
    ]
    alone = {"max_running_requests": 1, "graphs": "off", "spec": "off", "overlap": 0, "disable_prefix_cache": True}
    with LLM(**SETTINGS | alone) as llm:
        results = llm.generate(prompts, sampling)
    return prompts, sampling, [result.outputs[0] for result in results]


@pytest.mark.parametrize(
    "settings",
    [
        {"spec": "off", "max_running_requests": 130},
        {"spec": "off", "graphs": "off", "max_batched_tokens": 48},
        {"spec": "off", "graphs": "decode", "max_batched_tokens": 96, "overlap": 0},
        {"spec": "eagle3", "spec_steps": 3, "max_batched_tokens": 256},
        {"spec": "ngram", "spec_steps": 5, "kv_pages": 120, "max_running_requests": 8},
    ],
    ids=["many", "eager chunks", "graphs and chunks", "heads", "repetitions and preemption"],
)
def test_a_reply_has_the_same_bits_however_it_is_served(settings: dict[str, Any]) -> None:
    prompts, sampling, expected = work()
    with LLM(**SETTINGS | settings | {"spec": trained(settings["spec"])}) as llm:
        for _ in range(2):  # the second time prefixes are cached
            results = llm.generate(prompts, sampling)
            for result, its in zip(results, expected, strict=True):
                check(result.outputs[0], its, 0.0)
        assert sum(result.cached.num_tokens for result in results) > 1000
