"""Projections of few tokens against plain ones, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import linear, reference

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)

def randn(*shape, dtype):
    return torch.randn(shape, generator=generator).to(dtype)

def refuse(*arguments):
    raise AssertionError("rows that have a kernel")

def check(rows, depth, columns, dtype):
    x, weight, bias = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype), randn(columns, dtype=dtype)
    for given in (None, bias):
        expected = reference.linear(x.double(), weight.double(), None if given is None else given.double())
        plain, linear.F.linear = linear.F.linear, refuse
        got = linear.linear(x, weight, given)
        linear.F.linear = plain
        assert got.dtype == dtype and got.shape == (rows, columns)
        assert_close(got.double(), expected, atol=1e-2, rtol=8e-3)

def check_plain(rows, columns, dtype):
    x, weight, bias = randn(rows, 40, dtype=dtype), randn(columns, 40, dtype=dtype), randn(columns, dtype=dtype)
    assert torch.equal(linear.linear(x, weight, bias), reference.linear(x, weight, bias))
"""
ONE_ROW = """
# (depth, columns): less than a block, uneven ends, some blocks of depth
for depth, columns in ((40, 6), (1024, 9), (2048, 3), (2100, 4), (4096 + 16, 3)):
    for dtype in (torch.float16, torch.bfloat16):
        check(1, depth, columns, dtype)
for rows, dtype in ((0, torch.float16), (2, torch.float16), (1, torch.float32), (1, torch.float64)):
    check_plain(rows, 6, dtype)
"""
FEW_ROWS = """
linear._TILED = ((30, 80),)
for rows in (2, 7, 16):
    for depth, columns in ((40, 31), (300, 80)):
        check(rows, depth, columns, torch.float16)
for rows, columns, dtype in ((2, 30, torch.float16), (2, 81, torch.float16), (17, 64, torch.float16), (2, 64, torch.float32)):
    check_plain(rows, columns, dtype)
"""


@pytest.mark.timeout(120)
def test_one_row_is_projected_as_rows_are() -> None:
    run_interpreted(HEADER + ONE_ROW)


@pytest.mark.timeout(120)
def test_few_rows_are_projected_as_rows_are() -> None:
    run_interpreted(HEADER + FEW_ROWS)
