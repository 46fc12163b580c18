"""Attention of prompts to chosen keys among expanded ones, against one softmax a token, and the kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from hiserve.kernels import chosen_reference
from hiserve.kernels.chosen_bits import num_words, pack_bits, unpack_bits
from tests.helpers.chosen_case import ChosenCase
from tests.helpers.interpreted import run_interpreted

ROWS = ((0, 9), (130, 3), (40, 20))  # keys before, and tokens


@pytest.mark.parametrize("num_keys", [1, 64, 129])
def test_bits_come_back_as_they_were(num_keys: int) -> None:
    is_chosen = torch.rand(5, num_keys) < 0.5
    is_chosen[0], is_chosen[1] = True, False
    bits = pack_bits(is_chosen)
    assert bits.shape == (5, num_words(num_keys)) and bits.dtype == torch.int64
    assert torch.equal(unpack_bits(bits, num_keys), is_chosen)
    assert not unpack_bits(bits, num_words(num_keys) * 64)[:, num_keys:].any()


@pytest.mark.parametrize("num_scores", [1 << 24, 1])
def test_each_token_attends_to_the_keys_that_it_has_chosen(monkeypatch: pytest.MonkeyPatch, num_scores: int) -> None:
    """Other tokens of the step are not written."""
    monkeypatch.setattr(chosen_reference, "_NUM_SCORES", num_scores)  # few queries at a time
    case = ChosenCase(ROWS, num_heads=3, key_dim=10, value_dim=5, dtype=torch.float64)
    torch.testing.assert_close(case.attend(chosen_reference), case.expected, rtol=1e-12, atol=1e-12, equal_nan=True)


KERNEL = """
import torch
from hiserve.kernels import chosen_prompts, chosen_reference
from hiserve.kernels.chosen_prompts import Tile
from tests.helpers.chosen_case import ChosenCase

torch.set_num_threads(1)
for dtype, dims, tile, tolerance in (
    (torch.float32, (24, 12), Tile(16, 64, 4, 1), 2e-6),  # heads that are no powers of 2, in blocks of several tokens
    (torch.float16, (32, 16), Tile(32, 32, 4, 1), 2e-3),
):
    case = ChosenCase(((0, 9), (130, 3), (40, 20)), num_heads=2, key_dim=dims[0], value_dim=dims[1], dtype=dtype)
    found = case.attend(chosen_prompts, tile=tile)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), case.expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(found, case.attend(chosen_reference), rtol=tolerance, atol=tolerance, equal_nan=True)
"""


def test_the_kernel_computes_what_its_twin_does() -> None:
    run_interpreted(KERNEL)
