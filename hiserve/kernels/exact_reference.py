"""The operations of ``kernels.reference`` whose sums depend on the number of rows, with sums that do not.

torch and its libraries choose how they sum by the shape of a product. Here each row is a product of its own, of one shape. Likewise
activations: vector instructions round exponentials otherwise than the scalar ones at the end of a tensor, or of a thread's part of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.kernels import reference
from hiserve.kernels.quantized import QuantizedWeight

is_exact = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Tensor:
    """Like ``reference.linear``."""
    return _row_by_row(partial(reference.linear, weight=weight, bias=bias), x)


linear_parts = linear  # in one part


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool = False
) -> Tensor:
    """Refused before a model is loaded (``models.exactness``)."""
    raise AssertionError(f"weights of {weight.spec.bits} bits have no exact products")


quantized_parts = quantized_linear


def act_mul(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Like ``reference.act_mul``."""
    return _row_by_row(partial(reference.act_mul, activation=activation), gate_up)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Like ``reference.act_linear``."""
    return act_mul(linear(x, weight, bias), activation)


def act_inputs(gate_up: Tensor, activation: Activation, reader: QuantizedWeight | None) -> Tensor:
    """Like ``reference.act_inputs``."""
    return act_mul(gate_up, activation)


def route(
    logits: Tensor, num_per_token: int, is_normalized: bool, gated: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Like ``reference.route``."""
    shares, experts = reference.route(logits, num_per_token, is_normalized)
    if gated is not None:
        x, gate = gated
        shares = torch.cat((shares, _row_by_row(torch.sigmoid, linear(x, gate[None], None).to(shares.dtype))), 1)
    return shares, experts


def mix_experts(x: Tensor, shares: Tensor, chosen: Tensor, *weights: Any) -> Tensor:
    """Like ``reference.mix_experts``."""
    rows = zip(torch.split(x, 1), torch.split(shares, 1), torch.split(chosen, 1), strict=True)
    mixed = [reference.mix_experts(*each, *weights) for each in rows]
    return torch.cat(mixed) if mixed else torch.empty_like(x)


def _row_by_row(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([compute(row) for row in torch.split(x, 1)]) if x.shape[0] else compute(x)
