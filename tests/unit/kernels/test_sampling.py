"""Counts of tokens, values in order, best entries, noise of some entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.kernels.noise import gumbel, gumbel_at
from hiserve.kernels.sampling import argmax, ascending, likeliest, token_counts


def test_tokens_are_counted_between_start_and_end() -> None:
    tokens = torch.tensor([[3, 1, 3, 3, 2, 0], [3, 1, 3, 3, 2, 0], [0, 0, 0, 0, 0, 0]])
    start, end = torch.tensor([1, 0, 2]), torch.tensor([4, 6, 2])
    assert token_counts(tokens, start, end, 5).tolist() == [[0, 1, 0, 2, 0], [1, 1, 1, 3, 0], [0] * 5]
    assert token_counts(tokens, None, end, 5).tolist() == [[0, 1, 0, 3, 0], [1, 1, 1, 3, 0], [2, 0, 0, 0, 0]]


@pytest.mark.parametrize("size", [30, 31, 1000])
def test_the_likeliest_come_in_order_and_equal_ones_by_entry(size: int) -> None:
    rng = np.random.default_rng(size)
    x = -np.abs(rng.normal(size=(9, size))).astype(np.float32).round(1)  # many equal values, some of them -0.0
    x[1, ::2] = -np.inf
    x[2] = -np.inf
    x[3] = 0.0
    x[4, :4] = [-0.0, 0.0, -0.0, 0.0]
    expected = [sorted(range(size), key=lambda entry: (-row[entry], entry))[:20] for row in x.tolist()]
    assert likeliest(torch.from_numpy(x), 20).tolist() == expected


def test_the_likeliest_of_a_whole_row_are_a_stable_sort() -> None:
    x = torch.tensor([[-1.0, -3.0, -1.0, -2.0]])
    assert likeliest(x, 4).tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ascending_and_argmax_are_those_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn((3, 50), generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[0, [4, 9]] = 99.0
    assert torch.equal(ascending(x), x.sort(-1).values)
    assert argmax(x).tolist() == [4, *x[1:].argmax(-1).tolist()]
    assert argmax(x[:0]).shape == (0,)


def test_the_noise_of_some_entries_is_theirs_among_all() -> None:
    seed, choice, position = torch.tensor([7, 2**62, 1]), torch.tensor([0, 5, 63]), torch.tensor([1, 2, 100_000])
    entries = torch.randint(0, 1001, (3, 64), generator=torch.Generator().manual_seed(1))
    every = gumbel(seed, choice, position, 2, 1001)
    assert torch.equal(gumbel_at(seed, choice, position, 2, entries), every.gather(1, entries))
