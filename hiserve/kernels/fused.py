"""The operations of a decoder as Triton kernels: one launch each, where plain torch takes five to ten.

Arithmetic is float32, or float64 for float64, with the same rounding as ``kernels.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.activation import SILU, Activation
from hiserve.core.forward import LayerKV
from hiserve.kernels import skinny_linear
from hiserve.kernels.activate import activate
from hiserve.kernels.delta_triton import delta as delta
from hiserve.kernels.experts import mix_experts as mix_experts
from hiserve.kernels.experts import route as route
from hiserve.kernels.gated_norm_triton import gated_rms_norm as gated_rms_norm
from hiserve.kernels.index_store import rotate_first as rotate_first
from hiserve.kernels.index_store import store_index_keys as store_index_keys
from hiserve.kernels.latent_store import store_latents as store_latents
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.parts import Summand, pieces
from hiserve.kernels.parts_triton import load_delta
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.quantized_linear import quantized_linear as quantized_linear
from hiserve.kernels.quantized_linear import quantized_parts as quantized_parts
from hiserve.kernels.routing_triton import route_in_groups as route_in_groups
from hiserve.kernels.row_codec_triton import store_halves
from hiserve.kernels.skinny_linear import linear as linear
from hiserve.kernels.skinny_linear import linear_parts as linear_parts
from hiserve.kernels.term_products import reads_terms
from hiserve.kernels.terms import Inputs
from hiserve.kernels.terms_triton import act_terms, norm_terms

is_exact = False

_MAX_WARPS = 8
_ELEMENTS_PER_WARP = 512
_MAX_BLOCK_HEADS = 8
_ACT_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like ``reference.rms_norm``, for ``[T, n]`` whose rows may lie apart."""
    return _norm(x, None, weight, eps)


def add_rms_norm(delta: Summand, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like ``reference.add_rms_norm``, for contiguous ``[T, n]``."""
    return _norm(residual, delta, weight, eps)


def norm_inputs(x: Tensor, delta: Summand | None, weight: Tensor, eps: float, reader: QuantizedWeight | None) -> Inputs:
    """Like ``reference.norm_inputs``, in two terms where the reader takes them."""
    return norm_terms(x, delta, weight, eps) if reads_terms(reader, x) else _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Summand | None, weight: Tensor, eps: float) -> Tensor:
    values, bias, num_parts = pieces(delta)
    assert x.stride(1) == 1 and (values is None or values.is_contiguous()), f"elements {x.stride()} apart"
    num_rows, size = x.shape
    out = x.new_empty(x.shape)
    block = triton.next_power_of_2(size)
    _norm_kernel[(num_rows,)](
        x, values, bias, weight, out, eps, num_rows * size,
        NUM_PARTS=num_parts, SIZE=size, STRIDE=x.stride(0), BLOCK=block, IS_WIDE=x.dtype == torch.float64,
        num_warps=_num_warps(block), **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, bias, weight, out, eps, part_stride,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    IS_WIDE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program norms one row; with a delta, it first writes the sum back."""
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + column
    source = x + tl.program_id(0).to(tl.int64) * STRIDE + column
    start_next(IS_EARLY)
    weights = tl.load(weight + column, mask=mask, other=0.0).to(wide)
    await_previous(IS_EARLY)
    value = tl.load(source, mask=mask, other=0.0).to(wide)
    if delta is not None:
        value += load_delta(delta, bias, row, column, mask, part_stride, dtype, NUM_PARTS).to(wide)
        narrow = value.to(dtype)
        tl.store(source, narrow, mask=mask)
        value = narrow.to(wide)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + row, ((value * scale).to(weight.dtype.element_ty).to(wide) * weights).to(dtype), mask=mask)


def rotations(
    positions: Tensor, frequencies: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    half = frequencies.shape[0]
    shape = (positions.shape[0], 1, 2 * half)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    _rotations_kernel[(positions.shape[0],)](
        positions, frequencies, cos, sin, attention_factor,
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1, **early_launch(positions.device),
    )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize=["attention_factor"])
def _rotations_kernel(  # type: ignore[no-untyped-def]
    positions, frequencies, cos, sin, attention_factor,
    HALF: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes the angles of one token."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=mask, other=0.0)
    cosine, sine = tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor
    first = token * (2 * HALF) + pair
    dtype: tl.constexpr = cos.dtype.element_ty
    tl.store(cos + first, cosine.to(dtype), mask=mask)
    tl.store(cos + first + HALF, cosine.to(dtype), mask=mask)
    tl.store(sin + first, -sine.to(dtype), mask=mask)
    tl.store(sin + first + HALF, sine.to(dtype), mask=mask)


def rotate_and_store(
    qkv: Tensor, qk_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv: LayerKV, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Like ``reference.rotate_and_store``: keys are rotated, and rounded as values, in place; queries go to a new tensor."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = kv.k.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    assert qkv.stride()[1:] == (head_dim, 1), qkv.stride()
    assert kv.k[0].is_contiguous() and kv.k.stride(0) == kv.v.stride(0), kv.k.stride()
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_heads = min(_MAX_BLOCK_HEADS, triton.next_power_of_2(num_kv_heads))
    num_blocks = triton.cdiv(num_heads, block_heads) + 2 * triton.cdiv(num_kv_heads, block_heads)  # of a token
    block_pairs = triton.next_power_of_2(head_dim // 2)
    _rotate_and_store_kernel[(num_tokens * num_blocks,)](
        qkv, qk_weight, cos, sin, slots, q, kv.k, kv.v, kv.scales, eps, qkv.stride(0), kv.k.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs, num_warps=_num_warps(2 * block_heads * block_pairs), **early_launch(qkv.device),
    )  # fmt: skip
    return q, qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]


@triton.jit(do_not_specialize=["eps"])
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv, qk_weight, cos, sin, slots, q, pool_k, pool_v, scales, eps, token_stride, slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Each program handles some heads of one token, of one kind: queries, then keys, then values."""
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    key_blocks: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    num_rotated: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    num_blocks: tl.constexpr = query_blocks + 2 * key_blocks
    block, token = tl.program_id(0) % num_blocks, (tl.program_id(0) // num_blocks).to(tl.int64)
    is_query, is_value = block < query_blocks, block >= query_blocks + key_blocks
    before = tl.where(is_query, 0, tl.where(is_value, query_blocks + key_blocks, query_blocks))
    head = (block - before) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # among those of its kind
    place = head + tl.where(is_query, 0, tl.where(is_value, num_rotated, NUM_HEADS))  # among all
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = (head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)) & (pair < HALF)
    source = qkv + token * token_stride + place * (2 * HALF) + pair
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
    slot = tl.load(slots + token)
    stored = slot * slot_stride + head * (2 * HALF) + pair
    if is_value:
        first, second = store_halves(first, second, pool_v, scales, slot, stored, HALF, head, 1, mask, NUM_KV_HEADS)
        if scales is not None:
            tl.store(source, first, mask=mask)
            tl.store(source + HALF, second, mask=mask)
    else:
        wide: tl.constexpr = cos.dtype.element_ty
        dtype: tl.constexpr = qkv.dtype.element_ty
        one, other = first.to(wide), second.to(wide)
        if qk_weight is not None:
            scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(other * other, 1)) / (2 * HALF) + eps)[:, None]
            weights = qk_weight + place * (2 * HALF) + pair
            near, far = tl.load(weights, mask=mask, other=0.0), tl.load(weights + HALF, mask=mask, other=0.0)
            one = ((one * scale).to(qk_weight.dtype.element_ty).to(wide) * near).to(dtype).to(wide)
            other = ((other * scale).to(qk_weight.dtype.element_ty).to(wide) * far).to(dtype).to(wide)
        angle = token * (2 * HALF) + HALF + pair  # the second half, whose sines have their own sign
        is_pair = pair < HALF
        cosine, sine = tl.load(cos + angle, mask=is_pair, other=0.0), tl.load(sin + angle, mask=is_pair, other=0.0)
        turned, partner = (one * cosine - other * sine).to(dtype), (other * cosine + one * sine).to(dtype)
        if is_query:
            target = q + token * (NUM_HEADS * 2 * HALF) + head * (2 * HALF) + pair
            tl.store(target, turned, mask=mask)
            tl.store(target + HALF, partner, mask=mask)
        else:
            turned, partner = store_halves(
                turned, partner, pool_k, scales, slot, stored, HALF, head, 0, mask, NUM_KV_HEADS
            )
            tl.store(source, turned, mask=mask)
            tl.store(source + HALF, partner, mask=mask)


def act_mul(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """Like ``reference.act_mul``, for contiguous ``[T, 2 n]``."""
    assert gate_up.is_contiguous(), f"rows {gate_up.stride()} apart"
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_ACT_BLOCK, triton.next_power_of_2(size))
    _act_mul_kernel[(num_rows * triton.cdiv(size, block),)](
        gate_up, out,
        SIZE=size, BLOCK=block, ACTIVATION=activation, IS_WIDE=out.dtype == torch.float64, num_warps=_num_warps(block),
        **early_launch(gate_up.device),
    )  # fmt: skip
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Like ``reference.sigmoid_mul``, for a contiguous ``x``."""
    assert x.is_contiguous() and gate.stride(1) == 1, f"elements {x.stride()} and {gate.stride()} apart"
    num_rows, size = x.shape
    out = torch.empty_like(x)
    block = min(_ACT_BLOCK, triton.next_power_of_2(size))
    _sigmoid_mul_kernel[(num_rows * triton.cdiv(size, block),)](
        x, gate, out, gate.stride(0),
        SIZE=size, BLOCK=block, IS_WIDE=x.dtype == torch.float64, num_warps=_num_warps(block), **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _sigmoid_mul_kernel(  # type: ignore[no-untyped-def]
    x, gate, out, gate_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    dtype: tl.constexpr = x.dtype.element_ty
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    opened = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(wide)
    value = tl.load(x + row * SIZE + column, mask=mask, other=0.0).to(wide)
    share = (1.0 / (1.0 + tl.exp(-opened))).to(dtype).to(wide)
    tl.store(out + row * SIZE + column, (value * share).to(dtype), mask=mask)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Like ``reference.act_linear``."""
    out = skinny_linear.act_linear(x, weight, bias, activation)
    return act_mul(linear(x, weight, bias), activation) if out is None else out


def act_inputs(gate_up: Tensor, activation: Activation, reader: QuantizedWeight | None) -> Inputs:
    """Like ``reference.act_inputs``, in two terms where the reader takes them."""
    return act_terms(gate_up, activation) if reads_terms(reader, gate_up) else act_mul(gate_up, activation)


@triton.jit
def _act_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, IS_WIDE: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    dtype: tl.constexpr = out.dtype.element_ty
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * SIZE
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    gate = tl.load(gate_up + 2 * row + column, mask=mask, other=0.0).to(wide)
    up = tl.load(gate_up + 2 * row + SIZE + column, mask=mask, other=0.0).to(wide)
    tl.store(out + row + column, activate(gate, up, dtype, ACTIVATION).to(dtype), mask=mask)


def _num_warps(num_elements: int) -> int:
    """Warps of a program for its number of elements, a power of two."""
    return min(_MAX_WARPS, max(1, num_elements // _ELEMENTS_PER_WARP))
