"""Projections whose sums do not depend on the number of rows, run by Triton's interpreter where there is no device."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import exact, exact_linear, reference
from hiserve.kernels.exact_linear import Tile, count_parts
from hiserve.kernels.parts_triton import summed

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)

def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator).to(dtype)

def multiply(*arguments):
    return summed(exact_linear.multiply(*arguments, is_early=False))
"""
TILES = """
exact_linear._PART_DEPTH = 128
# Of one depth: numpy, which stands for matrix instructions here, adds by the depth of a tile.
few, tall, wide = Tile(16, 32, 64, 4, 2), Tile(64, 64, 64, 4, 2), Tile(64, 128, 64, 4, 2)
# (depth, columns, parts): parts with and without a rest, one part, uneven tiles
for depth, columns, parts in ((416, 40, 3), (256, 64, 2), (72, 72, 1)):
    exact_linear._PROGRAMS = 3 * -(-columns // 64)
    assert count_parts(columns, depth) == parts
    x, weight, bias = randn(20, depth), randn(columns, depth), None if parts == 2 else randn(columns)
    expected = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = [multiply(x, weight, bias, tile) for tile in (few, tall, wide)]
    exact_linear._SPREAD_ROWS = 0  # parts are joined by the program that makes them
    found.append(multiply(x, weight, bias, tall))
    exact_linear._SPREAD_ROWS = 128
    assert_close(found[0].double(), expected, atol=1e-2, rtol=8e-3)
    assert all(torch.equal(found[0], each) for each in found[1:]), (depth, columns)
    for rows in (1, 5):
        assert torch.equal(multiply(x[:rows], weight, bias, few), found[0][:rows])
assert multiply(x[:0], weight, bias, few).shape == (0, columns)
"""
CHOICES = """
for rows in range(1, 3000, 7):
    for columns in (1, 64, 16895, 16896, 200_000):
        tile = exact_linear.tile_for(rows, columns)
        assert tile.rows >= min(rows, 128) and (rows > 128 or tile.rows < 2 * max(rows, 16))
        assert tile.columns == 64 or rows > 128 or columns >= 132 * tile.columns
        assert exact_linear._UNIT % tile.depth == 0 and max(tile.rows, tile.columns) >= 64  # rows of a matrix instruction
launched = []
exact_linear.multiply = lambda x, weight, bias, tile, is_early: launched.append(is_early) or x
x, weight = randn(3, 64), randn(8, 64)
for is_after_attention in (True, False):
    exact.linear(x, weight, None, is_after_attention=is_after_attention)
assert launched == [False, True]
router, wide = randn(8, 64, dtype=torch.float32), randn(5, 64)
made = exact.linear(wide, router, None)
assert made.dtype == torch.float32 and torch.equal(made[3:4], exact.linear(wide[3:4], router, None))
"""


def test_every_tile_makes_the_same_bits_for_a_row_whatever_its_neighbours() -> None:
    run_interpreted(HEADER + TILES)


def test_tiles_follow_the_number_of_rows_and_routers_have_programs_of_one_row() -> None:
    run_interpreted(HEADER + CHOICES)
