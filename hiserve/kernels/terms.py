"""Inputs as sums of two numbers of E4M3, in plain torch: for products in 8 bits that round nothing.

A number of bfloat16 has 8 bits of precision and one of E4M3 has 4, so a number is the nearest of E4M3 and a rest that is one of E4M3
too. Both are scaled by the largest of 128 inputs: of inputs more than 2**14 times smaller than this one up to 2**-22 of it is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hiserve.kernels.quantized import PAIRED, join_halves

GROUP = PAIRED  # inputs with one scale
TOP = 7  # the exponent of the largest of a group, below that of the largest of E4M3
LEAST_EXPONENT = 8  # of float32 with its bias: smaller numbers have the scale of this one, whose inverse is finite
FINE = 32.0  # the factor of a rest


class Terms(NamedTuple):
    """Inputs ``[T, n]`` in two terms.

    Attributes:
        codes: float8_e4m3fn ``[T, 2, n]``, in the order of ``quantized.join_halves``: numbers, then their rests times ``FINE``.
        scales: float32 ``[T, n / 128]``, powers of two; infinite if an input of a group is not finite.
        sums: float32 ``[T, n / 128]``, of the inputs of a group.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor


Inputs = Tensor | Terms


def split_terms(x: Tensor) -> Terms:
    """Splits ``[T, n]`` of a 16-bit type, whose columns are a multiple of 128."""
    num_rows, depth = x.shape
    values = x.float().view(num_rows, depth // GROUP, GROUP)
    largest = values.abs().amax(-1).nan_to_num(torch.inf, torch.inf)
    exponents = (largest.view(torch.int32) >> 23).clamp_(LEAST_EXPONENT)
    scales, inverse = ((each << 23).view(torch.float32) for each in (exponents - TOP, 254 + TOP - exponents))
    scaled = values * inverse[..., None]
    coarse = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    fine = ((scaled - coarse.float()) * FINE).to(torch.float8_e4m3fn)
    codes = torch.stack([join_halves(each.view(num_rows, depth)).view(torch.uint8) for each in (coarse, fine)], 1)
    scales = torch.where(largest.isfinite(), scales, torch.inf)
    return Terms(codes.view(torch.float8_e4m3fn), scales, values.sum(-1))
