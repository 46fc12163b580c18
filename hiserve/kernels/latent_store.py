"""The rows that latent attention stores, and the rotation of its queries, in one launch of Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.latent_rows import page_rows_of, store_latent, store_turned
from hiserve.kernels.launch import await_previous, early_launch, start_next

_BLOCK_HEADS = 8
_ELEMENTS_PER_WARP = 128
_MAX_WARPS = 4


def store_latents(
    q: Tensor,
    row: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> tuple[Tensor, Tensor]:
    """Like ``reference.store_latents``: queries are rotated in place."""
    (num_tokens, num_heads, _), (rank, rope_dim) = q.shape, (weight.shape[0], cos.shape[2])
    assert q.stride(2) == row.stride(1) == kv.k.stride(2) == 1, (q.stride(), row.stride(), kv.k.stride())
    page_rows = page_rows_of(packed, kv.k, rank, rope_dim)
    assert row.shape[1] == rank + rope_dim and (page_rows or kv.k.shape[2] == row.shape[1]), (row.shape, kv.k.shape)
    rows = torch.empty((num_tokens, 1, rank + rope_dim), dtype=row.dtype, device=row.device)
    num_blocks = 1 + triton.cdiv(num_heads, _BLOCK_HEADS)  # of a token: its row, then its queries
    _store_latents[(num_tokens * num_blocks,)](
        q, row, weight, cos, sin, slots, rows, kv.k, eps, q.stride(0), q.stride(1), row.stride(0), kv.k.stride(0),
        NUM_HEADS=num_heads, PLAIN=q.shape[2] - rope_dim, RANK=rank, HALF=rope_dim // 2, PAGE_ROWS=page_rows,
        BLOCK_HEADS=_BLOCK_HEADS, BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_PAIRS=triton.next_power_of_2(rope_dim // 2),
        num_warps=min(_MAX_WARPS, max(1, rank // _ELEMENTS_PER_WARP)), **early_launch(q.device),
    )  # fmt: skip
    return q, rows


@triton.jit(do_not_specialize=["eps"])
def _store_latents(  # type: ignore[no-untyped-def]
    q, row, weight, cos, sin, slots, rows, pool, eps, token_stride, head_stride, row_stride, slot_stride,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    PAGE_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program handles one token: its row, or some of its query heads."""
    wide: tl.constexpr = cos.dtype.element_ty
    dtype: tl.constexpr = rows.dtype.element_ty
    num_blocks: tl.constexpr = 1 + (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    block, token = tl.program_id(0) % num_blocks, (tl.program_id(0) // num_blocks).to(tl.int64)
    pair = tl.arange(0, BLOCK_PAIRS)
    angle = token * (2 * HALF) + HALF + pair  # the second half, whose sines have their own sign
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    cosine = tl.load(cos + angle, mask=pair < HALF, other=0.0)
    sine = tl.load(sin + angle, mask=pair < HALF, other=0.0)
    if block == 0:
        column = tl.arange(0, BLOCK_RANK)
        source, slot = row + token * row_stride, tl.load(slots + token)
        target = rows + token * (RANK + 2 * HALF)
        latent = tl.load(source + column, mask=column < RANK, other=0.0).to(wide)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        weights = tl.load(weight + column, mask=column < RANK, other=0.0).to(wide)
        normed = ((latent * scale).to(weight.dtype.element_ty).to(wide) * weights).to(dtype)
        normed, stored = store_latent(normed, pool, slot, slot_stride, RANK, 2 * HALF, PAGE_ROWS)
        tl.store(target + column, normed, mask=column < RANK)
        one = tl.load(source + RANK + pair, mask=pair < HALF, other=0.0).to(wide)
        other = tl.load(source + RANK + HALF + pair, mask=pair < HALF, other=0.0).to(wide)
        turned, partner = (one * cosine - other * sine).to(dtype), (other * cosine + one * sine).to(dtype)
        turned = store_turned(turned, stored + pair, pair < HALF, PAGE_ROWS)
        partner = store_turned(partner, stored + HALF + pair, pair < HALF, PAGE_ROWS)
        tl.store(target + RANK + pair, turned, mask=pair < HALF)
        tl.store(target + RANK + HALF + pair, partner, mask=pair < HALF)
    else:
        head = (block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        place = q + token * token_stride + head[:, None] * head_stride + PLAIN + pair[None, :]
        ones = tl.load(place, mask=mask, other=0.0).to(wide)
        others = tl.load(place + HALF, mask=mask, other=0.0).to(wide)
        tl.store(place, (ones * cosine[None, :] - others * sine[None, :]).to(dtype), mask=mask)
        tl.store(place + HALF, (others * cosine[None, :] + ones * sine[None, :]).to(dtype), mask=mask)
