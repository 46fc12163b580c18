"""The loop of ``kernels.latent_decode`` over packed latents, half by half, and what it shares with the one over plain ones."""

from __future__ import annotations

import triton
import triton.language as tl

from hiserve.kernels.latent_rows import load_latents


@triton.jit
def find_keys(first, high, table, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the keys from ``first`` on, their slots, and which there are, below ``high``."""
    key = first + tl.arange(0, SHAPE.num_keys)
    is_key = key < high
    if SHAPE.hides_first:
        is_key = is_key & (key > 0)
    page = tl.load(table + key // SHAPE.page_size, mask=is_key, other=0)
    return key, page.to(tl.int64) * SHAPE.page_size + key % SHAPE.page_size, is_key


@triton.jit
def add_scores(scores, best, total):  # type: ignore[no-untyped-def]
    """Adds scores, -inf where a query does not see a key, to a softmax.

    Returns:
        Its largest score and its sum; the shares of these keys, and the factor of what was summed before.
    """
    better = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(better == -float("inf"), 0.0, better)
    shares, kept = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
    return better, total * kept + tl.sum(shares, 1), shares, kept


@triton.jit
def attend_packed(mine, is_query, last, pool, table, keys, scale, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """As ``latent_decode._attend_plain``; the sum of values comes in halves."""
    half: tl.constexpr = SHAPE.rank // 2
    low, high = keys
    column, mask = mine + tl.arange(0, half)[None, :], is_query[:, None]
    q_one, q_two = tl.load(column, mask=mask, other=0.0), tl.load(column + half, mask=mask, other=0.0)
    rotated = tl.load(mine + SHAPE.rank + tl.arange(0, SHAPE.rope_dim)[None, :], mask=mask, other=0.0)
    best = tl.full((SHAPE.num_queries,), -float("inf"), tl.float32)
    total = tl.full((SHAPE.num_queries,), 0.0, tl.float32)
    one = tl.full((SHAPE.num_queries, half), 0.0, tl.float32)
    two = tl.full((SHAPE.num_queries, half), 0.0, tl.float32)
    dtype: tl.constexpr = q_one.dtype
    for start in range(low, high, SHAPE.num_keys):
        key, slot, is_key = find_keys(start, high, table, SHAPE)
        k_one, k_two, turns = load_latents(
            pool, slot, is_key, dtype, SHAPE.rank, SHAPE.rope_dim, SHAPE.packed_rows, SHAPE.has_instructions
        )
        scores = tl.dot(q_one, tl.trans(k_one), input_precision="ieee")
        scores = tl.dot(q_two, tl.trans(k_two), scores, input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(turns), scores, input_precision="ieee") * scale
        scores = tl.where(is_key[None, :] & (key[None, :] <= last[:, None]), scores, -float("inf"))
        best, total, shares, kept = add_scores(scores, best, total)
        one = tl.dot(shares.to(dtype), k_one, one * kept[:, None], input_precision="ieee")
        two = tl.dot(shares.to(dtype), k_two, two * kept[:, None], input_precision="ieee")
    return best, total, one, two
