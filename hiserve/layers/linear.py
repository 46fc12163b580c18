"""Dense projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hiserve.kernels.ops import ops_for
from hiserve.kernels.packed_linear import can_pack, pack, packed_linear


class Linear:
    """A projection; several projections of one input are one matrix.

    Args:
        weight: ``[out_features, in_features]``. Copied where packing makes products faster.
        bias: ``[out_features]``, or None.
        is_behind_attention: The input is an attention's output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, is_behind_attention: bool = False) -> None:
        is_packed = can_pack(weight)
        self._weight = pack(weight) if is_packed else weight
        self._bias = bias
        self._project: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
            packed_linear
            if is_packed
            else partial(ops_for(weight.device).linear, is_behind_attention=is_behind_attention)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Projects ``[T, in_features]``."""
        return self._project(x, self._weight, self._bias)
