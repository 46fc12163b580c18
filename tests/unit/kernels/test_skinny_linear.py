"""Projections of few tokens against plain ones, run by Triton's interpreter where there is no device."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import parts_triton, reference, skinny_linear as linear

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

def check_plain(rows, depth, columns, dtype):
    x, weight, bias = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype), randn(columns, dtype=dtype)
    assert torch.equal(linear.linear(x, weight, bias), reference.linear(x, weight, bias))
"""
ONE_ROW = """
# (depth, columns): less than a block, uneven ends, some blocks of depth
for depth, columns in ((40, 6), (1024, 9), (2048, 3), (2100, 4), (4096 + 16, 3)):
    for dtype in (torch.float16, torch.bfloat16):
        check(1, depth, columns, dtype)
for rows, dtype in ((0, torch.float16), (2, torch.float16), (1, torch.float32), (1, torch.float64)):
    check_plain(rows, 40, 6, dtype)
linear._MAX_ROW_ELEMENTS = 0
check(1, 40, 6, torch.float16)
"""
WIDE_WEIGHTS = """
# Rows of 16 bits by float32, as a router's: no copy of the rows, one row or several.
for rows, depth, columns in ((1, 40, 6), (3, 2100, 5), (32, 64, 8)):
    for dtype in (torch.float16, torch.bfloat16):
        x, weight, bias = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=torch.float32), randn(columns, dtype=torch.float32)
        for given in (None, bias):
            expected = reference.linear(x, weight.double(), None if given is None else given.double())
            plain, linear.F.linear = linear.F.linear, refuse
            got = linear.linear(x, weight, given)
            linear.F.linear = plain
            assert got.dtype == torch.float32 and got.shape == (rows, columns)
            assert_close(got.double(), expected, atol=1e-3, rtol=1e-4)
linear._MAX_WIDE_ELEMENTS = 3 * weight.numel()
linear.row_linear = refuse
for rows, of_weight in ((4, torch.float32), (0, torch.float32), (1, torch.float64)):  # too much for the cache, none, wider
    x, wide = randn(rows, depth, dtype=torch.float16), weight.to(of_weight)
    assert torch.equal(linear.linear(x, wide, None), torch.nn.functional.linear(x.to(of_weight), wide))
"""
FEW_ROWS = """
class Told:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        grids.append(grid)
        return self.kernel[grid]

grids = []
linear._tile_kernel, parts_triton._sum_kernel = Told(linear._tile_kernel), Told(parts_triton._sum_kernel)
# (processors, depth, columns): whole tiles; parts with and without a rest; parts of no less than four blocks; no more
# parts than there are processors for
for processors, depth, columns, of_tiles in (
    (4, 256, 320, (5, 1)), (7, 1664, 128, (2, 3)), (4, 1024, 128, (2, 2)), (9, 1024, 64, (1, 2)),
    (5, 2048, 128, (2, 2))
):
    linear.num_processors = lambda device: processors
    for rows in (2, 7, 16, 17, 32):
        grids.clear()
        check(rows, depth, columns, torch.float16)
        of_sums = [(-(-rows * columns // 512),)] * (of_tiles[1] > 1)
        assert grids == [of_tiles, *of_sums] * 2, grids
linear._MAX_ROW_ELEMENTS, linear.row_linear = 0, refuse
check(1, 1024, 64, torch.float16)
wanted = []
plain = linear.early_launch
linear.early_launch = lambda device, is_wanted=True: wanted.append(is_wanted) or plain(device)
x, weight = randn(2, 128, dtype=torch.float16), randn(64, 128, dtype=torch.float16)
for is_after_attention in (False, True):
    linear.linear(x, weight, None, is_after_attention=is_after_attention)
assert wanted == [True, False]
for rows, depth, columns in ((33, 128, 64), (2, 128, 96), (2, 192, 64), (0, 128, 64)):
    check_plain(rows, depth, columns, torch.float16)
check_plain(2, 128, 64, torch.float32)
"""
ACTIVATED = """
from hiserve.core.activation import SILU, Activation
from hiserve.kernels import fused

linear.num_processors = lambda device: 4
# (rows, depth, columns): a row alone, with uneven ends and two blocks; tiles, of which every processor has one, with a rest of rows
CAPPED = Activation(slope=1.702, shift=1.0, limit=7.0)
for rows, depth, columns, activation in (
    (1, 40, 6, CAPPED), (1, 2100, 10, SILU), (3, 256, 256, SILU), (17, 128, 320, CAPPED), (33, 128, 512, SILU)
):
    x, bias = randn(rows, depth, dtype=torch.float16), randn(columns, dtype=torch.float16)
    weight = randn(columns, depth, dtype=torch.float16) / 16
    got = linear.act_linear(x, weight, bias, activation)
    assert torch.equal(got, fused.act_mul(linear.linear(x, weight, bias), activation)), (rows, depth, columns)
    assert_close(got, reference.act_linear(x, weight, bias, activation), atol=2e-2, rtol=8e-3)
# Depth in parts, too many rows, no whole tiles, no row, a wider type: in two launches.
for rows, depth, columns, dtype in (
    (2, 1024, 128, torch.float16), (129, 128, 256, torch.float16), (2, 128, 96, torch.float16), (0, 128, 256, torch.float16),
    (2, 128, 256, torch.float32),
):
    x, weight = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype) / 16
    assert linear.act_linear(x, weight, None, SILU) is None, (rows, depth, columns)
    assert torch.equal(fused.act_linear(x, weight, None, SILU), fused.act_mul(linear.linear(x, weight, None)))
linear._MAX_ROW_ELEMENTS, linear.row_linear = 0, refuse
x, weight = randn(1, 128, dtype=torch.float16), randn(256, 128, dtype=torch.float16)
assert torch.equal(linear.act_linear(x, weight, None, SILU), fused.act_mul(linear.linear(x, weight, None)))
"""
MORE_ROWS = """
linear.num_processors = lambda device: 2
tiles = []
class Told:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, **named: (tiles.append((named["ROWS"], named["COLUMNS"], *grid)), self.kernel[grid](*given, **named))

linear._tile_kernel = Told(linear._tile_kernel)
# Many columns; a split depth, with a rest of rows: tiles of their own. Neither of both, and more rows: a library's product.
for rows, depth, columns, expected in (
    (33, 128, 256, (64, 128, 2, 1)), (100, 128, 256, (128, 128, 2, 1)), (65, 1024, 64, (128, 64, 1, 2)), (32, 128, 256, (32, 64, 4, 1))
):
    tiles.clear()
    check(rows, depth, columns, torch.float16)
    assert tiles == [expected] * 2, tiles
for rows, depth, columns in ((33, 128, 128), (129, 128, 256)):
    check_plain(rows, depth, columns, torch.float16)
parts = linear.linear_parts(randn(33, 1024, dtype=torch.float16), randn(64, 1024, dtype=torch.float16), None)
assert parts.values.shape == (2, 33, 64) and parts.dtype == torch.float16
"""


def test_one_row_is_projected_as_rows_are() -> None:
    run_interpreted(HEADER + ONE_ROW)


def test_rows_of_few_bits_are_projected_by_wide_weights() -> None:
    run_interpreted(HEADER + WIDE_WEIGHTS)


def test_few_rows_are_projected_as_rows_are() -> None:
    run_interpreted(HEADER + FEW_ROWS)


def test_the_activation_of_a_projection_has_the_bits_of_its_own_launch() -> None:
    run_interpreted(HEADER + ACTIVATED)


def test_more_rows_have_tiles_of_their_own_where_these_win() -> None:
    run_interpreted(HEADER + MORE_ROWS)
