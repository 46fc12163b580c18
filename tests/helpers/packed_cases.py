"""Random weights of experts in packed form, for tests of kernels; they use no more than torch."""

from __future__ import annotations

import torch
from torch import Generator

from hiserve.core.packed_experts import BLOCK, GROUP
from hiserve.kernels.packed_weights import PackedWeights, pack_words


def random_4(generator: Generator, *shape: int, scales: tuple[int, int] = (122, 126)) -> PackedWeights:
    """Returns matrices ``[..., rows, columns]`` of any codes, with exponents of a range, whose end is not in it."""
    *rows, columns = shape
    codes = torch.randint(0, 256, (*rows, columns // GROUP, GROUP // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(*scales, codes.shape[:-1], generator=generator, dtype=torch.uint8)
    return PackedWeights(*pack_words(codes, exponents), columns)


def random_8(generator: Generator, *shape: int, num_parts: int = 1) -> PackedWeights:
    """Returns matrices ``[..., rows, columns]`` of any finite codes; gate and up are two parts."""
    *before, rows, columns = shape
    numbers = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = -(-rows // num_parts // BLOCK), -(-columns // BLOCK)
    scales = torch.rand((*before, num_parts, *blocks), generator=generator) * 0.2 + 0.05
    return PackedWeights(numbers, scales, columns)
