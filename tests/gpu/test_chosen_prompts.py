"""Prompts that attend to chosen ones of expanded keys on CUDA: the kernel and the bits of a choice against their twins."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hiserve.kernels import chosen_prompts, index_topk, union_reference
from hiserve.kernels.chosen_bits import MAX_SPAN
from tests.helpers.chosen_case import ChosenCase
from tests.helpers.compressed_cases import CompressedStep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "tolerance"),
    [
        (192, 128, torch.bfloat16, 2e-2),  # DeepSeek-V3.2
        (256, 256, torch.bfloat16, 2e-2),  # GLM-5
        (24, 12, torch.float32, 1e-5),
    ],
)
def test_expanded_keys_under_a_mask(key_dim: int, value_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Of rows behind prefixes and without, of a token alone, and of whole tiles."""
    rows = ((0, 300), (701, 200), (255, 1), (640, 128))
    case = ChosenCase(rows, num_heads=5, key_dim=key_dim, value_dim=value_dim, dtype=dtype, device="cuda")
    found = case.attend(chosen_prompts)
    assert_close(found.double().cpu(), case.expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert_close(case.attend(chosen_prompts), found, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("most", [512, 2048])
def test_a_choice_in_bits_is_exactly_the_best(most: int) -> None:
    """Of small whole numbers, whose scores are exact and often equal; some tokens see no more than they may choose."""
    torch.manual_seed(most)
    num_tokens = 40
    case = CompressedStep(num_rows=3, context=MAX_SPAN * most, device="cuda")
    keys = case.range(1, 128, num_tokens)
    keys.positions[::7] = torch.arange(len(keys.positions[::7]), device="cuda") * most // 4
    keys.pool.copy_(torch.randint(-1, 2, keys.pool.shape, device="cuda"))
    q = torch.randint(-1, 2, (num_tokens, 64, 128), device="cuda").bfloat16()
    weights = torch.randint(-1, 3, (num_tokens, 64), device="cuda").float()
    for each in (weights, torch.zeros_like(weights)):
        found, expected = (ops.choose_bits(q, each, keys, most, 0.125) for ops in (index_topk, union_reference))
        assert torch.equal(found, expected)
