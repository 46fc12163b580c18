"""The keys of an index beside latents, and the rotation of its queries, in Triton; ``kernels.index_rows`` is the twin."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.row_codec_triton import store_key, tile_of

_BLOCK_HEADS = 16


def store_index_keys(
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> None:
    """Like ``index_rows.store_index_keys``."""
    (num_tokens, width), rope_dim = key.shape, cos.shape[2]
    assert key.stride(1) == pool.stride(1) == 1, (key.stride(), pool.stride())
    page_rows = 1 if packed is None else packed.page_rows
    tile = tile_of(packed, pool, width, page_rows)
    assert tile or (pool.shape[1] == width and pool.dtype == key.dtype), (pool.shape, pool.dtype)
    _store_index_keys[(num_tokens,)](
        key, weight, bias, cos, sin, pool, slots, eps, key.stride(0), pool.stride(0),
        WIDTH=width, TILE=tile, PAGE_ROWS=page_rows, HALF=rope_dim // 2,
        BLOCK_PLAIN=triton.next_power_of_2(max(1, width - rope_dim)), BLOCK_PAIRS=triton.next_power_of_2(rope_dim // 2),
        num_warps=1, **early_launch(key.device),
    )  # fmt: skip


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like ``index_rows.rotate_first``, in place."""
    num_tokens, num_heads, width = x.shape
    assert x.is_contiguous(), x.stride()
    _rotate_first[(num_tokens, triton.cdiv(num_heads, _BLOCK_HEADS))](
        x, cos, sin,
        NUM_HEADS=num_heads, WIDTH=width, HALF=cos.shape[2] // 2, BLOCK_HEADS=_BLOCK_HEADS,
        BLOCK_PAIRS=triton.next_power_of_2(cos.shape[2] // 2), num_warps=2, **early_launch(x.device),
    )  # fmt: skip
    return x


@triton.jit(do_not_specialize=["eps"])
def _store_index_keys(  # type: ignore[no-untyped-def]
    key, weight, bias, cos, sin, pool, slots, eps, key_stride, slot_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr, BLOCK_PAIRS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program handles one token: the two halves that are rotated, and what lies behind them."""
    wide: tl.constexpr = cos.dtype.element_ty
    dtype: tl.constexpr = key.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    pair, rest = tl.arange(0, BLOCK_PAIRS), 2 * HALF + tl.arange(0, BLOCK_PLAIN)
    is_pair, is_rest = pair < HALF, rest < WIDTH
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    mine, slot = key + token * key_stride, tl.load(slots + token)
    one = tl.load(mine + pair, mask=is_pair, other=0.0).to(wide)
    other = tl.load(mine + HALF + pair, mask=is_pair, other=0.0).to(wide)
    plain = tl.load(mine + rest, mask=is_rest, other=0.0).to(wide)
    mean = (tl.sum(one, 0) + tl.sum(other, 0) + tl.sum(plain, 0)) / WIDTH
    one, other = tl.where(is_pair, one - mean, 0.0), tl.where(is_pair, other - mean, 0.0)
    plain = tl.where(is_rest, plain - mean, 0.0)
    scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(other * other, 0) + tl.sum(plain * plain, 0)) / WIDTH + eps)
    one = one * scale * tl.load(weight + pair, mask=is_pair, other=0.0).to(wide)
    one = (one + tl.load(bias + pair, mask=is_pair, other=0.0).to(wide)).to(dtype).to(wide)
    other = other * scale * tl.load(weight + HALF + pair, mask=is_pair, other=0.0).to(wide)
    other = (other + tl.load(bias + HALF + pair, mask=is_pair, other=0.0).to(wide)).to(dtype).to(wide)
    plain = plain * scale * tl.load(weight + rest, mask=is_rest, other=0.0).to(wide)
    plain = plain + tl.load(bias + rest, mask=is_rest, other=0.0).to(wide)
    angle = token * (2 * HALF) + HALF + pair  # the second half, whose sines have their own sign
    cosine = tl.load(cos + angle, mask=is_pair, other=0.0)
    sine = tl.load(sin + angle, mask=is_pair, other=0.0)
    turned, partner = (one * cosine - other * sine).to(dtype), (other * cosine + one * sine).to(dtype)
    if TILE:
        parts, places = (turned, partner, tl.where(is_rest, plain, 0.0).to(dtype)), (pair, HALF + pair, rest)
        store_key(parts, places, (is_pair, is_pair, is_rest), pool, slot, WIDTH, PAGE_ROWS)
    else:
        target = pool + slot * slot_stride
        tl.store(target + pair, turned, mask=is_pair)
        tl.store(target + HALF + pair, partner, mask=is_pair)
        tl.store(target + rest, plain.to(dtype), mask=is_rest)


@triton.jit
def _rotate_first(  # type: ignore[no-untyped-def]
    x, cos, sin,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program rotates some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_PAIRS)
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    place = x + (token * NUM_HEADS + head[:, None]) * WIDTH + pair[None, :]
    angle = token * (2 * HALF) + HALF + pair
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    cosine = tl.load(cos + angle, mask=pair < HALF, other=0.0)[None, :]
    sine = tl.load(sin + angle, mask=pair < HALF, other=0.0)[None, :]
    one = tl.load(place, mask=mask, other=0.0).to(cos.dtype.element_ty)
    other = tl.load(place + HALF, mask=mask, other=0.0).to(cos.dtype.element_ty)
    tl.store(place, (one * cosine - other * sine).to(x.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (other * cosine + one * sine).to(x.dtype.element_ty), mask=mask)
