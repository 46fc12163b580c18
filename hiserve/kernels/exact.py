"""The operations of ``kernels.fused``, with sums that do not depend on the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels import exact_linear
from hiserve.kernels.experts import mix_experts_exactly as mix_experts
from hiserve.kernels.fused import (
    act_inputs,
    act_mul,
    add_rms_norm,
    delta,
    gated_rms_norm,
    norm_inputs,
    rms_norm,
    rotate_and_store,
    rotate_first,
    rotations,
    route,
    route_in_groups,
    sigmoid,
    store_index_keys,
    store_latents,
)
from hiserve.kernels.parts import Summand
from hiserve.kernels.parts_triton import summed
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.skinny_linear import row_linear

__all__ = [
    "act_inputs",
    "act_linear",
    "act_mul",
    "add_rms_norm",
    "delta",
    "gated_rms_norm",
    "is_exact",
    "linear",
    "linear_parts",
    "mix_experts",
    "norm_inputs",
    "quantized_linear",
    "quantized_parts",
    "rms_norm",
    "rotate_and_store",
    "rotate_first",
    "rotations",
    "route",
    "route_in_groups",
    "sigmoid",
    "store_index_keys",
    "store_latents",
]

is_exact = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Tensor:
    """Like ``reference.linear``, for ``x`` of a 16-bit type and weights of that or of float32, as a router's."""
    return summed(linear_parts(x, weight, bias, is_after_attention=is_after_attention))


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Summand:
    """As ``linear``; parts of few rows are left to the reader, who adds them up in their order."""
    assert x.dtype.itemsize == 2 and weight.dtype in (x.dtype, torch.float32), (x.dtype, weight.dtype)
    if weight.dtype == torch.float32:
        return row_linear(x, weight, bias)  # each row is a program's own
    return exact_linear.linear_parts(x, weight, bias, is_after_attention=is_after_attention)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Like ``reference.act_linear``."""
    return act_mul(linear(x, weight, bias), activation)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool = False
) -> Tensor:
    """Refused before a model is loaded (``models.exactness``)."""
    raise AssertionError(f"weights of {weight.spec.bits} bits have no exact products")


quantized_parts = quantized_linear
