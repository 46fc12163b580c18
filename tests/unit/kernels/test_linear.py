"""Projections of few tokens against plain ones, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

PROGRAM = """
import torch
from torch.testing import assert_close
from hiserve.kernels import linear, reference

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)

def randn(*shape, dtype):
    return torch.randn(shape, generator=generator).to(dtype)

def refuse(*arguments):
    raise AssertionError("a row that has a kernel")

# (depth, columns): less than a block, uneven ends, some blocks of depth
for depth, columns in ((40, 6), (1024, 9), (2100, 4), (4096 + 16, 3)):
    for dtype in (torch.float16, torch.bfloat16):
        weight, bias = randn(columns, depth, dtype=dtype), randn(columns, dtype=dtype)
        for given in (None, bias):
            x = randn(1, depth, dtype=dtype)
            expected = reference.linear(x.double(), weight.double(), None if given is None else given.double())
            plain, linear.F.linear = linear.F.linear, refuse
            got = linear.linear(x, weight, given)
            linear.F.linear = plain
            assert got.dtype == dtype and got.shape == (1, columns)
            assert_close(got.double(), expected, atol=1e-2, rtol=8e-3)
for rows, dtype in ((0, torch.float16), (2, torch.float16), (1, torch.float32), (1, torch.float64)):
    x, weight, bias = randn(rows, 40, dtype=dtype), randn(6, 40, dtype=dtype), randn(6, dtype=dtype)
    assert torch.equal(linear.linear(x, weight, bias), reference.linear(x, weight, bias))
"""


@pytest.mark.timeout(120)
def test_one_row_is_projected_as_rows_are() -> None:
    run_interpreted(PROGRAM)
