"""Inputs in two terms of E4M3 (``terms.py``), in launches of their own and in those of norms and activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import Activation
from hiserve.kernels.activate import activate
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.parts import Summand, pieces
from hiserve.kernels.parts_triton import load_delta
from hiserve.kernels.row_codec_triton import to_e4m3
from hiserve.kernels.terms import FINE, GROUP, LEAST_EXPONENT, TOP, Terms

_GROUPS = 4  # of a program
_MAX_WARPS = 16
_GROUPS_PER_WARP = 2
_FINE, _LEAST, _TOP = tl.constexpr(FINE), tl.constexpr(LEAST_EXPONENT), tl.constexpr(TOP)


def split_terms(x: Tensor, order: Tensor | None = None, *, is_early: bool = True) -> Terms:
    """Like ``terms.split_terms``, of contiguous ``[T, n]`` or of its columns in an ``order``, int32 ``[n]``."""
    assert x.is_contiguous(), x.stride()
    num_rows, size = x.shape
    terms, groups = _empty(num_rows, size, x.device), size // GROUP
    _split_kernel[(num_rows, triton.cdiv(groups, _GROUPS))](
        x,
        order,
        *_pointers(terms),
        groups,
        GROUPS=_GROUPS,
        num_warps=_GROUPS // _GROUPS_PER_WARP,
        **early_launch(x.device, is_early),
    )
    return terms


def norm_terms(x: Tensor, delta: Summand | None, weight: Tensor, eps: float) -> Terms:
    """Like ``split_terms`` of ``rms_norm`` or ``add_rms_norm``, which rounds as these do; of 16-bit types."""
    values, bias, num_parts = pieces(delta)
    assert x.stride(1) == 1 and (values is None or values.is_contiguous()), f"elements {x.stride()} apart"
    (num_rows, size), groups = x.shape, x.shape[1] // GROUP
    terms, block = _empty(num_rows, size, x.device), triton.next_power_of_2(groups)
    _norm_kernel[(num_rows,)](
        x, values, bias, weight, *_pointers(terms), eps, x.stride(0), num_rows * size, groups,
        NUM_PARTS=num_parts, GROUPS=block, num_warps=max(1, min(_MAX_WARPS, block // _GROUPS_PER_WARP)),
        **early_launch(x.device),
    )  # fmt: skip
    return terms


def act_terms(gate_up: Tensor, activation: Activation) -> Terms:
    """Like ``split_terms`` of ``act_mul``, which rounds as that does; of contiguous ``[T, 2 n]`` of a 16-bit type."""
    assert gate_up.is_contiguous(), f"rows {gate_up.stride()} apart"
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    terms, groups = _empty(num_rows, size, gate_up.device), size // GROUP
    _act_kernel[(num_rows, triton.cdiv(groups, _GROUPS))](
        gate_up,
        *_pointers(terms),
        groups,
        GROUPS=_GROUPS,
        ACTIVATION=activation,
        num_warps=_GROUPS // _GROUPS_PER_WARP,
        **early_launch(gate_up.device),
    )
    return terms


def _empty(num_rows: int, size: int, device: torch.device) -> Terms:
    scales, sums = torch.empty((2, num_rows, size // GROUP), dtype=torch.float32, device=device)
    return Terms(torch.empty((num_rows, 2, size), dtype=torch.float8_e4m3fn, device=device), scales, sums)


def _pointers(terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    return terms.codes.view(torch.int16), terms.scales, terms.sums


@triton.jit
def _store_terms(low, high, codes, scales, sums, row, group, groups):  # type: ignore[no-untyped-def]
    """Splits float32 ``[GROUPS, 64]`` twice, the halves of groups of a row, whose values are numbers of bfloat16."""
    is_group = group < groups
    largest = tl.max(tl.maximum(_size(low), _size(high)), 1)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, _LEAST)
    inverse = ((254 - (exponent - _TOP)) << 23).to(tl.float32, bitcast=True)[:, None]
    low_coarse, low_fine = _split(low * inverse)
    high_coarse, high_fine = _split(high * inverse)
    target = codes + row.to(tl.int64) * (groups * 128) + group[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(target, low_coarse | high_coarse << 8, mask=is_group[:, None])
    tl.store(target + groups * 64, low_fine | high_fine << 8, mask=is_group[:, None])
    scale = ((exponent - _TOP) << 23).to(tl.float32, bitcast=True)
    # Of what is not finite no number is read: its scale is infinite.
    tl.store(scales + row * groups + group, tl.where(largest < float("inf"), scale, float("inf")), mask=is_group)
    tl.store(sums + row * groups + group, tl.sum(low + high, 1), mask=is_group)


@triton.jit
def _size(values):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))


@triton.jit
def _split(scaled):  # type: ignore[no-untyped-def]
    # By bits: of the instruction's results, stored side by side, ptxas of CUDA 12.8 lost every fourth.
    coarse = to_e4m3(scaled)
    fine = to_e4m3((scaled - coarse.to(tl.float8e4nv, bitcast=True).to(tl.float32)) * _FINE)
    return coarse.to(tl.int16), fine.to(tl.int16)


@triton.jit
def _split_kernel(x, order, codes, scales, sums, groups, GROUPS: tl.constexpr, IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program splits some groups of a row."""
    row, group = tl.program_id(0), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    low = group[:, None] * 128 + tl.arange(0, 64)[None, :]
    high, mask = low + 64, (group < groups)[:, None]
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    if order is not None:
        low, high = tl.load(order + low, mask=mask, other=0), tl.load(order + high, mask=mask, other=0)
    x += row.to(tl.int64) * (groups * 128)
    first = tl.load(x + low, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + high, mask=mask, other=0.0).to(tl.float32)
    _store_terms(first, second, codes, scales, sums, row, group, groups)


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, bias, weight, codes, scales, sums, eps, stride, part_stride, groups,
    NUM_PARTS: tl.constexpr, GROUPS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program norms one row, as ``fused._norm_kernel`` does, and splits the result."""
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 64)[None, :]
    mask = (group < groups)[:, None]
    start_next(IS_EARLY)
    low_weight = tl.load(weight + column, mask=mask, other=0.0)
    high_weight = tl.load(weight + column + 64, mask=mask, other=0.0)
    await_previous(IS_EARLY)
    source, beside = x + row * stride + column, row * (groups * 128) + column
    low = _add(source, delta, bias, beside, column, mask, part_stride, NUM_PARTS)
    high = _add(source + 64, delta, bias, beside + 64, column + 64, mask, part_stride, NUM_PARTS)
    factor = tl.rsqrt(tl.sum(tl.sum(low * low + high * high, 1), 0) / (groups * 128) + eps)
    dtype: tl.constexpr = x.dtype.element_ty
    low = ((low * factor).to(low_weight.dtype).to(tl.float32) * low_weight.to(tl.float32)).to(dtype).to(tl.float32)
    high = ((high * factor).to(low_weight.dtype).to(tl.float32) * high_weight.to(tl.float32)).to(dtype).to(tl.float32)
    _store_terms(low, high, codes, scales, sums, row, group, groups)


@triton.jit
def _add(source, delta, bias, beside, column, mask, part_stride, NUM_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 numbers of the residual stream; with a delta, it first writes the sum back."""
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        dtype: tl.constexpr = source.dtype.element_ty
        value += load_delta(delta, bias, beside, column, mask, part_stride, dtype, NUM_PARTS).to(tl.float32)
        narrow = value.to(source.dtype.element_ty)
        tl.store(source, narrow, mask=mask)
        value = narrow.to(tl.float32)
    return value


@triton.jit
def _act_kernel(  # type: ignore[no-untyped-def]
    gate_up, codes, scales, sums, groups,
    GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes and splits some groups of a row."""
    row, group = tl.program_id(0), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 64)[None, :]
    mask = (group < groups)[:, None]
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    gate = gate_up + row.to(tl.int64) * (groups * 256) + column
    low = _activated(gate, groups, mask, ACTIVATION)
    high = _activated(gate + 64, groups, mask, ACTIVATION)
    _store_terms(low, high, codes, scales, sums, row, group, groups)


@triton.jit
def _activated(gate, groups, mask, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype: tl.constexpr = gate.dtype.element_ty
    first = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(gate + groups * 128, mask=mask, other=0.0).to(tl.float32)
    return activate(first, second, dtype, ACTIVATION).to(dtype).to(tl.float32)
