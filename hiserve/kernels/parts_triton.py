"""Sums of products in parts (``parts.py``), in launches of their own and in those of norms."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.parts import Summand

_SUM_BLOCK = 512


def summed(delta: Summand) -> Tensor:
    """Returns a projection whose parts are added up."""
    if isinstance(delta, Tensor):
        return delta
    return sum_parts(delta.values, delta.bias, delta.values.new_empty(delta.values.shape[1:], dtype=delta.dtype))


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Writes the sum of float32 ``[num_parts, *out.shape]``, in this order, and of ``bias`` to ``out``; returns it."""
    _sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
        parts, bias, out, out.numel(), out.shape[1], parts.shape[0],
        BLOCK=_SUM_BLOCK, num_warps=4, **early_launch(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_parts"])
def _sum_kernel(parts, bias, out, num_elements, num_columns, num_parts, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums the parts of some elements of the result."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < num_elements
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + part * num_elements + element, mask=is_element, other=0.0)
    if bias is not None:
        total += tl.load(bias + element % num_columns, mask=is_element, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=is_element)


@triton.jit
def load_delta(delta, bias, place, column, mask, part_stride, dtype: tl.constexpr, NUM_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns elements of a ``Summand`` as the summed projection has them; ``place`` of the first part, ``column`` of the bias."""
    total = tl.load(delta + place, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(delta + part * part_stride + place, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)
