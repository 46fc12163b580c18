"""Rotation of adjacent pairs, the norms before it, and its angles, in Triton; ``kernels.pairs`` is the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels import pairs
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.pairs import PairFrequencies
from hiserve.kernels.row_codec_triton import store_row, tile_of

_ELEMENTS = 4096  # of a program


def pair_angles(positions: Tensor, kinds: PairFrequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Like ``pairs.pair_angles``."""
    num_kinds, num_pairs = kinds.frequencies.shape
    shape = (num_kinds, positions.shape[0], num_pairs)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    _angles_kernel[(positions.shape[0], num_kinds)](
        positions, kinds.frequencies, kinds.factors, kinds.ratios, cos, sin,
        PAIRS=num_pairs, BLOCK=triton.next_power_of_2(num_pairs), num_warps=1, **early_launch(positions.device),
    )  # fmt: skip
    return cos, sin


@triton.jit
def _angles_kernel(  # type: ignore[no-untyped-def]
    positions, frequencies, factors, ratios, cos, sin,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes the angles of one token for one kind of layers."""
    token, kind, pair = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    mask = pair < PAIRS
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    ratio, factor = tl.load(ratios + kind), tl.load(factors + kind)
    position = tl.load(positions + token) // ratio * ratio
    angle = position.to(tl.float32) * tl.load(frequencies + kind * PAIRS + pair, mask=mask, other=0.0)
    target = (kind * tl.num_programs(0) + token) * PAIRS + pair
    tl.store(cos + target, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + target, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=mask)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like ``pairs.rotate_pairs``; float64, and heads whose elements are no power of 2, use the twin."""
    if not _fits(x):
        return pairs.rotate_pairs(x, cos, sin)
    return _turn(x, cos, sin)


def store_rows(
    heads: Tensor,
    row: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> Tensor:
    """Like ``pairs.store_rows``; as ``rotate_pairs``."""
    if not _fits(heads):
        return pairs.store_rows(heads, row, norm, eps, cos, sin, pool, slots, packed)
    assert row.stride(1) == pool.stride(1) == slots.stride(0) == 1, (row.stride(), pool.stride(), slots.stride())
    return _turn(heads, cos, sin, (row, norm, pool, slots), eps, packed)


def _fits(x: Tensor) -> bool:
    return x.dtype != torch.float64 and not x.shape[-1] & (x.shape[-1] - 1)


def _turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    stored: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    eps: float = 0.0,
    packed: PackedPages | None = None,
) -> Tensor:
    """Turns heads; with ``stored`` it norms them before, and stores rows: these, weights of their norm, pool and slots; ``packed`` is the pool's."""
    num_tokens, num_heads, width = x.shape
    assert x.stride(2) == 1 and cos.stride(1) == 1 and sin.stride() == cos.stride(), "heads or turns lie apart"
    out = torch.empty((num_tokens, num_heads, width), dtype=x.dtype, device=x.device)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _ELEMENTS // width))
    row, norm, pool, slots = (None,) * 4 if stored is None else stored
    page_rows = 1 if packed is None else packed.page_rows
    _turn_kernel[(num_tokens, triton.cdiv(num_heads, block_heads) + (stored is not None))](
        x, cos, sin, out, row, norm, pool, slots, eps, x.stride(0), x.stride(1), cos.stride(0), num_heads,
        0 if row is None else row.stride(0), 0 if pool is None else pool.stride(0),
        WIDTH=width, PAIRS=cos.shape[1], BLOCK_HEADS=block_heads,
        TILE=0 if pool is None else tile_of(packed, pool, width, page_rows), PAGE_ROWS=page_rows,
        num_warps=max(1, min(8, block_heads * width // 512)), **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["eps", "num_heads"],
)
def _turn_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, out, row, norm, pool, slots, eps, token_stride, head_stride, turn_stride, num_heads, row_stride,
    slot_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr, TILE: tl.constexpr,
    PAGE_ROWS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program turns some heads of a token; with rows it norms them before, and the last one stores the token's row."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    source = x + token * token_stride + head[:, None] * head_stride + column[None, :]
    target = out + (token * num_heads + head[:, None]) * WIDTH + column[None, :]
    mask = (head < num_heads)[:, None]
    turns = cos + token * turn_stride, sin + token * turn_stride
    if row is None:
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        value = turned(value, turns, BLOCK_HEADS, WIDTH, PAIRS, False)
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)
    elif tl.program_id(1) + 1 < tl.num_programs(1):
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        value = value.to(x.dtype.element_ty).to(tl.float32)
        value = turned(value, turns, BLOCK_HEADS, WIDTH, PAIRS, False)
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)
    else:
        weight = tl.load(norm + column)
        made = tl.load(row + token * row_stride + column).to(tl.float32)
        made *= tl.rsqrt(tl.sum(made * made, 0) / WIDTH + eps)
        made = made.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        made = made.to(row.dtype.element_ty).to(tl.float32)[None, :]
        made = turned(made, turns, 1, WIDTH, PAIRS, False)
        # As an activation of this type would be.
        made = tl.reshape(made, [WIDTH]).to(row.dtype.element_ty).to(tl.float32)
        store_row(made, pool, tl.load(slots + token), slot_stride, WIDTH, TILE, PAGE_ROWS)


@triton.jit
def turned(value, turns, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, IS_BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotates the last pairs of float32 ``[ROWS, WIDTH]`` by the cosines and sines at two pointers, or back."""
    even, odd = tl.split(tl.reshape(value, [ROWS, WIDTH // 2, 2]))
    pair = tl.arange(0, WIDTH // 2) - (WIDTH // 2 - PAIRS)
    cosine = tl.load(turns[0] + pair, mask=pair >= 0, other=1.0)[None, :]
    sine = tl.load(turns[1] + pair, mask=pair >= 0, other=0.0)[None, :]
    if IS_BACK:
        sine = -sine
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    return tl.reshape(turned, [ROWS, WIDTH])
