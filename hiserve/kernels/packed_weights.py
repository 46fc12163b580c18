"""Weights of experts in fewer bits, which products upcast tile by tile: their layout on the device, and the twin that upcasts all.

**4 bits** (OCP Microscaling Formats, 2023): 32 numbers of a row share a power of 2. Four such groups are a block: 16 words of 32
bits. Word w has the numbers 2 w and 2 w + 1 of each group, group g at bit 4 g of its lower half and of its upper one. So one shift
and one mask make two numbers of a group at once, in the order in which products take them. Rows end with whole blocks.

**8 bits**: 128 by 128 numbers share a scale (DeepSeek-V3, arXiv:2412.19437). Gate and up begin with a scale of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.core.packed_experts import BLOCK, GROUP, WORDS

PLAIN = "plain"  # the kind of numbers that have the type of the states
LARGEST_SCALE = 128  # code of 2: the factors of larger scales are infinite in 16 bits
_GROUPS = BLOCK // GROUP
_BIAS = 127  # of the exponents that are scales


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Matrices ``[num_experts, rows, columns]``, or one matrix ``[rows, columns]`` without the first dimension below.

    Attributes:
        codes: In 4 bits int32 ``[num_experts, rows, blocks * WORDS]``; in 8 bits uint8 ``[num_experts, rows, columns]``, E4M3.
        scales: In 4 bits int32 ``[num_experts, rows, blocks]``, the exponents of four groups each; in 8 bits float32
            ``[num_experts, num_parts, row blocks, blocks]``: those of gate, then of up, or of a single part.
        columns: Numbers of a row; of 4 bits a multiple of ``GROUP``.
    """

    codes: Tensor
    scales: Tensor
    columns: int

    @property
    def kind(self) -> str:
        """Name of the numbers' type, as kernels know it."""
        return "e2m1" if self.codes.dtype == torch.int32 else "e4m3"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices."""
        return (*self.codes.shape[:-1], self.columns)

    def is_contiguous(self) -> bool:
        """Whether both tensors are."""
        return self.codes.is_contiguous() and self.scales.is_contiguous()

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrices in a floating type; every product of a number and its scale is rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.kind == "e2m1":
            return _unpacked_4(self.codes, self.scales, wide)[..., : self.columns].to(dtype)
        numbers, (*matrices, rows, _) = self.codes.view(torch.float8_e4m3fn).to(wide), self.shape
        num_parts = self.scales.shape[-3]
        parts = numbers.view(*matrices, num_parts, rows // num_parts, self.columns)
        factors = self.scales.to(wide).repeat_interleave(BLOCK, -2)[..., : rows // num_parts, :]
        factors = factors.repeat_interleave(BLOCK, -1)[..., : self.columns]
        return (parts * factors).view(self.shape).to(dtype)


Weights = Tensor | PackedWeights
"""Matrices of experts, or of one: plain ones have the type of the states."""


def plain(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Returns matrices that are packed in a floating type, others as they are."""
    return weights.unpacked(dtype) if isinstance(weights, PackedWeights) else weights


def parts_of(weights: Weights | None) -> tuple[Tensor | None, Tensor | None, str]:
    """Returns what a kernel gets of matrices: numbers, scales, if there are any, and the kind of the numbers."""
    if isinstance(weights, PackedWeights):
        return weights.codes, weights.scales, weights.kind
    return weights, None, PLAIN


def packed_size(columns: int) -> tuple[int, int]:
    """Returns the words of a row of 4-bit numbers, and those of its scales."""
    blocks = -(-columns // BLOCK)
    return blocks * WORDS, blocks


def pack_words(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Reorders 4-bit numbers as they are stored in checkpoints.

    Args:
        codes: uint8 ``[..., groups, GROUP // 2]``, two numbers a byte, the lower bits first.
        scales: uint8 ``[..., groups]``, exponents with a bias of 127.

    Returns:
        ``codes`` and ``scales`` of ``PackedWeights``; numbers that fill the last block are 0.
    """
    missing = -codes.shape[-2] % _GROUPS
    codes = torch.nn.functional.pad(codes, (0, 0, 0, missing)).to(torch.int32)
    blocks = codes.view(*codes.shape[:-2], -1, _GROUPS, WORDS)
    words = torch.zeros_like(blocks[..., 0, :])
    for group in range(_GROUPS):
        pair = blocks[..., group, :]
        words |= (pair & 15) << (4 * group) | (pair >> 4) << (16 + 4 * group)
    return words.flatten(-2), torch.nn.functional.pad(scales, (0, missing)).view(torch.int32)


def _unpacked_4(words: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns whole blocks of 4-bit numbers."""
    places = torch.arange(0, 4 * _GROUPS, 4, device=words.device)[:, None, None]
    places = places + torch.arange(0, 32, 16, device=words.device)
    codes = (words.view(*words.shape[:-1], -1, 1, WORDS, 1) >> places) & 15  # [..., blocks, groups, WORDS, 2]
    exponent, half = codes >> 1 & 3, (codes & 1).to(dtype) / 2
    sizes = torch.where(exponent == 0, half, torch.ldexp(1 + half, exponent - 1))
    exponents = scales.contiguous().view(torch.uint8).view(*scales.shape, _GROUPS, 1, 1)
    factors = torch.exp2(exponents.to(dtype) - _BIAS)
    return (torch.where(codes & 8 == 0, sizes, -sizes) * factors).flatten(-4)
