"""The layout of packed weights of experts against numbers that are unpacked one by one."""

from __future__ import annotations

import math

import pytest
import torch

from hiserve.kernels.packed_weights import PackedWeights, pack_words, packed_size


def number_4(code: int) -> float:
    """A sign, two bits of an exponent and one of the mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else math.ldexp(1 + mantissa / 2, exponent - 1)
    return -size if code & 8 else size


def number_8(code: int) -> float:
    """A sign, four bits of an exponent and three of the mantissa; of all ones NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7)
    return -size if code & 128 else size


@pytest.mark.parametrize("columns", [32, 128, 160, 512])
def test_every_number_of_4_bits_is_found(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (2, 5, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 253, (2, 5, columns // 32), generator=generator, dtype=torch.uint8)
    packed = PackedWeights(*pack_words(codes, scales), columns)
    assert packed.shape == (2, 5, columns) and (packed.codes.shape[-1], packed.scales.shape[-1]) == packed_size(columns)
    found = packed.unpacked(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    for matrix, row, column in ((m, r, c) for m in range(2) for r in range(5) for c in range(columns)):
        byte = int(codes[matrix, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        scale = int(scales[matrix, row, column // 32])
        assert found[matrix, row, column] == math.ldexp(number_4(code), scale - 127), (matrix, row, column)


def test_what_fills_the_last_block_is_zero() -> None:
    ones = torch.full((3, 1, 16), 0xFF, dtype=torch.uint8), torch.full((3, 1), 200, dtype=torch.uint8)
    packed = PackedWeights(*pack_words(*ones), 128)
    assert packed.unpacked(torch.float64)[:, 32:].abs().max() == 0


@pytest.mark.parametrize("num_parts", [1, 2])
def test_blocks_of_8_bits_end_with_gate_and_with_up(num_parts: int) -> None:
    """Of 200 rows the second block has 72, and so has that of up."""
    generator, rows, columns = torch.Generator().manual_seed(3), 200, 130
    codes = torch.randint(0, 127, (num_parts * rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_parts, 2, 2, generator=generator)
    found = PackedWeights(codes, scales, columns).unpacked(torch.float64)
    for row, column in ((r, c) for r in range(0, num_parts * rows, 9) for c in range(0, columns, 3)):
        scale = float(scales[row // rows, row % rows // 128, column // 128])
        assert found[row, column] == number_8(int(codes[row, column])) * scale, (row, column)
