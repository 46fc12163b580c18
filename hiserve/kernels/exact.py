"""The operations of ``kernels.fused`` whose sums depend on the number of rows, with sums that do not."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels import exact_linear
from hiserve.kernels.exact_reference import quantized_linear as quantized_linear
from hiserve.kernels.exact_reference import quantized_parts as quantized_parts
from hiserve.kernels.experts import mix_experts_exactly as mix_experts  # noqa: F401 - by the name of its twin
from hiserve.kernels.fused import act_mul
from hiserve.kernels.parts import Summand
from hiserve.kernels.parts_triton import summed
from hiserve.kernels.skinny_linear import row_linear

is_exact = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Tensor:
    """Like ``reference.linear``, for ``x`` of a 16-bit type and weights of that or of float32, as a router's."""
    return summed(linear_parts(x, weight, bias, is_after_attention=is_after_attention))


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Summand:
    """As ``linear``; parts of few rows are left to the reader, who adds them up in their order.

    The rows of 16-bit weights are a multiple of 16 bytes.
    """
    assert x.dtype.itemsize == 2 and weight.dtype in (x.dtype, torch.float32), (x.dtype, weight.dtype)
    if weight.dtype == torch.float32:
        return row_linear(x, weight, bias)  # each row is a program's own
    tile = exact_linear.tile_for(x.shape[0], weight.shape[0])
    return exact_linear.multiply(x, weight, bias, tile, is_early=not is_after_attention)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Like ``reference.act_linear``."""
    return act_mul(linear(x, weight, bias), activation)
