"""Attention of rows with many new tokens over paged keys and values: prefill, chunks after a prefix, trees.

A program computes some new tokens of a row for all query heads that share one KV head. It first masks the few blocks of
keys that only some of its queries see, then adds the others without a mask. Where rows are too few to fill the device,
their keys are split among programs, and a second kernel joins the parts (the split-KV of FlashDecoding).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hiserve.core.forward import LayerKV
from hiserve.core.plan import Int32Array
from hiserve.kernels.attention_blocks import close, fit_half, fold, fold_all_seen, gather, load_scales

_LOG2_E = tl.constexpr(math.log2(math.e))
_MIN_QUERIES = 16
_MAX_QUERIES = 128
_MAX_PARTS = 16
_BLOCKS_TO_START = 3  # fixed cost of a program, in blocks
_BLOCKS_TO_JOIN = 4
_JOINED = 16


class ExtendTile(NamedTuple):
    """Tile of a program.

    Attributes:
        num_queries: Query vectors per program, tokens times heads; a power of two from 16.
        num_keys: Keys per step; a power of two from 16.
        num_warps: Warps per program.
        num_stages: Steps whose loads are in flight at once.
    """

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


class _Results(NamedTuple):
    """Output tensors and the sinks."""

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None


class _Shape(NamedTuple):
    """Compile-time constants besides types."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_dim: int
    page_size: int
    num_queries: int
    num_keys: int
    hides_first: bool
    is_fresh: bool
    is_part: bool


def tile_for(max_q_len: int, group: int, head_dim: int, dtype: torch.dtype) -> ExtendTile:
    """Returns the tile that was fastest on one H200.

    ``max_q_len`` bounds a row's new tokens; ``group`` is the number of query heads of one KV head.
    """
    assert group <= _MAX_QUERIES, f"{group} query heads of one KV head"  # a program computes whole tokens
    num_queries = min(max(_MIN_QUERIES, triton.next_power_of_2(max_q_len * group)), _MAX_QUERIES)
    if dtype.itemsize > 2:  # products without tensor cores
        return ExtendTile(min(num_queries, max(32, triton.next_power_of_2(group))), 32, 4, 1)
    if num_queries < _MAX_QUERIES:
        return ExtendTile(num_queries, 64, 4, 3)
    return ExtendTile(_MAX_QUERIES, 128, 8, 3) if head_dim <= 128 else ExtendTile(_MAX_QUERIES, 64, 8, 2)


def choose_num_parts(
    q_lens: Int32Array, max_kv_len: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, *, num_sms: int
) -> int:
    """Returns the number of parts per row into which keys are split, so that the programs fill the multiprocessors.

    Args:
        q_lens: int32 ``[B]``. New tokens of each row.
        max_kv_len: Upper bound of the tokens a row attends over.
        heads: Query heads; KV heads.
        head_dim: Elements per head.
        dtype: Of queries, keys and values.
        num_sms: Multiprocessors of the device.
    """
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    cut = tile_for(int(q_lens.max()), group, head_dim, dtype)
    num_programs = int((-(-q_lens // (cut.num_queries // group))).sum()) * num_kv_heads
    num_blocks = -(-max_kv_len // cut.num_keys)
    if num_programs >= 2 * num_sms:
        return 1

    def cost(num_parts: int) -> int:
        num_waves = -(-num_programs * num_parts // num_sms)
        return num_waves * (-(-num_blocks // num_parts) + _BLOCKS_TO_START) + (num_parts > 1) * _BLOCKS_TO_JOIN

    return min(range(1, _MAX_PARTS + 1), key=cost)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: LayerKV,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    *,
    max_q_len: int,
    page_size: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    hides_first: bool = False,
    tree_mask: Tensor | None = None,
    has_fresh: bool = False,
    has_prefixed: bool = True,
    num_parts: int = 1,
    tile: ExtendTile | None = None,
) -> None:
    """Attends for the tokens of some rows; tokens of other rows are not written. Does not wait for the device.

    Args:
        q: ``[T, num_heads, head_dim]``, heads adjacent. Like ``k`` and ``v`` 16-byte aligned.
        k: ``[T, num_kv_heads, head_dim]``. This step's keys, which are already in their slots.
        v: Like ``k``.
        kv: The layer's pool. If it is packed, ``k`` and ``v`` are rounded likewise: what a token gives does not depend on the
            step in which it was computed.
        qo_indptr: int32 ``[B + 1]``, of these rows; may start above 0.
        kv_lens: int32 or int64 ``[B]``. Tokens each row attends over, its new ones included.
        page_table: int32 ``[B, W]``. Entries of keys that no token sees are not read.
        max_q_len: Upper bound of the new tokens of a row.
        page_size: Tokens per page.
        scale: Factor of the scores.
        out: ``[T, num_heads, head_dim]``, contiguous. Written; zeros where a token sees no key.
        lse: float32 ``[T, num_heads]``, contiguous. Written: natural logarithm of the sum of exponentials, sinks
            included.
        window: A token at position p sees positions above p - window.
        sinks: float32 ``[num_heads]``. Scores that take part in the softmax without a value.
        hides_first: No token sees position 0.
        tree_mask: int64 ``[T]``. Bit j of a token: it sees the j-th of its row's new tokens, besides all before these; 0 is causal.
        has_fresh: There may be rows without a prefix, and these read ``k`` and ``v``.
        has_prefixed: There may be rows with a prefix; or without, if ``has_fresh`` is false.
        num_parts: Parts the keys of each row are split into.
        tile: Overrides ``tile_for``.
    """
    for x in (q, k, v, kv.k, kv.v):
        assert x.stride()[1:] == (q.shape[2], 1), f"elements {x.stride()} apart"
    assert kv.k.stride(0) == kv.v.stride(0) and k.stride(0) == v.stride(0), (kv.k.stride(), k.stride())
    assert page_table.stride(1) == 1 and out.is_contiguous() and (lse is None or lse.is_contiguous())
    cut = tile or tile_for(max_q_len, q.shape[1] // k.shape[1], q.shape[2], q.dtype)
    shape = _shape(q, k, page_size, hides_first, num_parts > 1, cut)
    results = _Results(out, lse, sinks)
    parts = _parts(q, num_parts) if num_parts > 1 else results
    grid = (shape.num_kv_heads * num_parts, triton.cdiv(max_q_len, cut.num_queries // shape.group), kv_lens.shape[0])
    for is_fresh in [is_fresh for is_fresh, is_wanted in ((True, has_fresh), (False, has_prefixed)) if is_wanted]:
        keys, values = (k, v) if is_fresh else (kv.k, kv.v)
        _extend[grid](
            q, keys, values, head_blocks(keys, shape.num_keys, shape.block_dim),
            head_blocks(values, shape.num_keys, shape.block_dim), None if is_fresh else kv.scales, qo_indptr, kv_lens,
            page_table, tree_mask, parts, q.stride(0), keys.stride(0), page_table.stride(0), q.shape[0], window,
            scale * math.log2(math.e), int(has_fresh and not is_fresh), shape._replace(is_fresh=is_fresh),
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    if num_parts > 1:
        _join_all(parts, results, qo_indptr, num_rows=kv_lens.shape[0], shape=shape)


def _join_all(parts: _Results, results: _Results, qo_indptr: Tensor, *, num_rows: int, shape: _Shape) -> None:
    num_parts, num_tokens, num_heads = parts.out.shape[:3]
    num_cells = num_tokens * num_heads
    _join[(triton.cdiv(num_cells, _JOINED),)](parts, results, qo_indptr, num_rows, num_parts, num_cells, _JOINED, shape)


def _shape(q: Tensor, k: Tensor, page_size: int, hides_first: bool, is_part: bool, cut: ExtendTile) -> _Shape:
    num_kv_heads, head_dim = k.shape[1:]
    return _Shape(
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        head_dim=head_dim,
        block_dim=max(16, triton.next_power_of_2(head_dim)),
        page_size=page_size,
        num_queries=cut.num_queries,
        num_keys=cut.num_keys,
        hides_first=hides_first,
        is_fresh=False,
        is_part=is_part,
    )


def _parts(q: Tensor, num_parts: int) -> _Results:
    out = torch.empty((num_parts, *q.shape), dtype=torch.float32, device=q.device)
    return _Results(out, torch.empty(out.shape[:-1], dtype=torch.float32, device=q.device), None)


def head_blocks(x: Tensor, num_keys: int, block_dim: int) -> TensorDescriptor | None:
    """Describes ``[T, num_kv_heads, head_dim]`` as blocks of one head for the copy engine; reads outside give 0.

    None if heads are no multiple of the 16 bytes that it needs.
    """
    if x.shape[2] * x.itemsize % 16:
        return None
    return TensorDescriptor.from_tensor(x, [num_keys, 1, block_dim])


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens", "window", "scale", "leaves_fresh"],
    do_not_specialize_on_alignment=["qo_indptr", "kv_lens", "page_table", "tree_mask"],
)
def _extend(  # type: ignore[no-untyped-def]
    q, k, v, k_blocks, v_blocks, scales, qo_indptr, kv_lens, page_table, tree_mask, results,
    q_stride, kv_stride, table_stride, num_tokens, window, scale, leaves_fresh, shape: tl.constexpr
):  # fmt: skip
    """One program: some new tokens of a row, one KV head, one part of the keys. Those with the most keys come first."""
    num_queries: tl.constexpr = shape.num_queries
    block_dim: tl.constexpr = shape.block_dim
    tokens: tl.constexpr = num_queries // shape.group
    row, kv_head, part = tl.program_id(2), tl.program_id(0) % shape.num_kv_heads, tl.program_id(0) // shape.num_kv_heads
    start = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - start
    prefix = tl.load(kv_lens + row).to(tl.int32) - q_len
    first = (tl.cdiv(q_len, tokens) - 1 - tl.program_id(1)) * tokens
    if first < 0 or (shape.is_fresh and prefix > 0) or (leaves_fresh != 0 and prefix == 0):
        return

    lane = tl.arange(0, num_queries)
    token, head = first + lane // shape.group, kv_head * shape.group + lane % shape.group
    is_query = (lane < tokens * shape.group) & (token < q_len)
    queries = _load_queries(q, start + token, head, is_query, q_stride, shape)
    seen = None
    if tree_mask is not None:
        seen = tl.load(tree_mask + start + token, is_query, other=0)
    begin, end, low, low_all, high_all, high = _span(prefix, q_len, first, tokens, window, seen, shape)
    if shape.is_part:
        low, low_all, high_all, high = _share(low, low_all, high_all, high, part, shape)
    if k_blocks is None:
        low_all, high_all = low, low

    top = tl.full([num_queries], -float("inf"), tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    mixed = tl.zeros([num_queries, block_dim], tl.float32)
    pages = page_table + row.to(tl.int64) * table_stride
    k, v = k + kv_head * shape.head_dim, v + kv_head * shape.head_dim
    if scales is not None:
        queries, units = fit_half(queries)
        scale *= units
    for number in tl.range(0, low_all - low + high - high_all, num_stages=2):
        block = low + number + tl.where(low + number < low_all, 0, high_all - low_all)
        key = block * shape.num_keys + tl.arange(0, shape.num_keys)
        is_key = (key >= begin) & (key < end)
        place = _places(key, is_key, start, pages, shape)
        keys, values = gather(k, place, is_key, kv_stride, shape), gather(v, place, is_key, kv_stride, shape)
        sees = _sees(key, is_key, prefix, prefix + token, window, seen, shape)
        words = load_scales(scales, place, kv_head, is_key, shape)
        top, total, mixed = fold(queries, keys, values, words, kv_head, sees, scale, top, total, mixed)
    if k_blocks is not None:
        top, total, mixed = fold_all_seen(
            queries, k, v, k_blocks, v_blocks, scales, kv_head, pages, start, low_all, high_all, kv_stride, scale, top, total, mixed, shape
        )  # fmt: skip
    cell = (part * num_tokens + start + token) * (shape.num_kv_heads * shape.group) + head
    close(mixed, top, total, cell, head, is_query, results, shape)


@triton.jit
def _span(prefix, q_len, first, tokens, window, seen, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys that any of the tokens sees, ``[begin, end)``, and their blocks; each token sees ``[low_all, high_all)``."""
    first_position, last = prefix + first, tl.minimum(first + tokens, q_len) - 1 + prefix
    end_all, end = first_position + 1, last + 1
    if seen is not None:
        has_nodes = tl.max(seen, 0) > 0
        first_position, end_all = tl.where(has_nodes, prefix, first_position), tl.where(has_nodes, prefix, end_all)
        end = tl.where(has_nodes, prefix + q_len, end)
    begin, begin_all = 0, 0
    if window is not None:
        begin, begin_all = tl.maximum(first_position - window + 1, 0), tl.maximum(last - window + 1, 0)
    if shape.hides_first:
        begin, begin_all = tl.maximum(begin, 1), tl.maximum(begin_all, 1)
    low, low_all = begin // shape.num_keys, tl.cdiv(begin_all, shape.num_keys)
    high_all, high = tl.maximum(end_all // shape.num_keys, low_all), tl.cdiv(end, shape.num_keys)
    return begin, end, low, low_all, high_all, high


@triton.jit
def _share(low, low_all, high_all, high, part, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks of a part."""
    share = tl.cdiv(high - low, tl.num_programs(0) // shape.num_kv_heads)
    low = tl.minimum(low + part * share, high)
    high = tl.minimum(low + share, high)
    low_all = tl.minimum(tl.maximum(low_all, low), high)
    return low, low_all, tl.minimum(tl.maximum(high_all, low_all), high), high


@triton.jit
def _load_queries(q, token, head, is_query, q_stride, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads query vectors, ``[num_queries, block_dim]``; zeros where there is no query."""
    dim = tl.arange(0, shape.block_dim)
    is_element = is_query[:, None] & (dim < shape.head_dim)[None, :]
    at = token.to(tl.int64) * q_stride + head * shape.head_dim
    return tl.load(q + at[:, None] + dim[None, :], is_element, other=0)


@triton.jit
def _places(key, is_key, start, pages, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Indices of keys among the new ones or in the pool; arbitrary where ``is_key`` is false."""
    if shape.is_fresh:
        place = start + key
    else:
        page = tl.load(pages + key // shape.page_size, is_key, other=0)
        place = page * shape.page_size + key % shape.page_size
    return place


@triton.jit
def _sees(key, is_key, prefix, position, window, seen, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Visibility mask of queries and keys."""
    if seen is None:
        sees = key[None, :] <= position[:, None]
    else:
        bit = tl.minimum(tl.maximum(key - prefix, 0), 63)
        is_seen = (key < prefix)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
        sees = tl.where((seen == 0)[:, None], key[None, :] <= position[:, None], is_seen)
        ones = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1).to(tl.int32)
        position = tl.where(seen == 0, position, prefix - 1 + ones)  # a token's depth is its number of ancestors
    if window is not None:
        sees &= key[None, :] > position[:, None] - window
    if seen is not None or shape.hides_first:  # else these conditions imply it
        sees &= is_key[None, :]
    return sees


@triton.jit(do_not_specialize=["num_rows", "num_parts", "num_cells"], do_not_specialize_on_alignment=["qo_indptr"])
def _join(parts, results, qo_indptr, num_rows, num_parts, num_cells, NUM_JOINED: tl.constexpr, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: some heads of the rows' tokens, from all parts."""
    num_heads: tl.constexpr = shape.num_kv_heads * shape.group
    block_dim: tl.constexpr = shape.block_dim
    cell = tl.program_id(0) * NUM_JOINED + tl.arange(0, NUM_JOINED)
    token = cell // num_heads
    is_cell = (token >= tl.load(qo_indptr)) & (token < tl.load(qo_indptr + num_rows))
    dim = tl.arange(0, shape.block_dim)
    is_element = is_cell[:, None] & (dim < shape.head_dim)[None, :]
    top = tl.full([NUM_JOINED], -float("inf"), tl.float32)
    total = tl.zeros([NUM_JOINED], tl.float32)
    mixed = tl.zeros([NUM_JOINED, block_dim], tl.float32)
    at = cell.to(tl.int64)
    for _ in range(num_parts):
        logs = tl.load(parts.lse + at, is_cell, other=-float("inf")) * _LOG2_E
        values = tl.load(parts.out + at[:, None] * shape.head_dim + dim[None, :], is_element, other=0)
        new_top = tl.maximum(top, logs)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights, decay = tl.exp2(logs - base), tl.exp2(top - base)
        mixed, total, top = mixed * decay[:, None] + values * weights[:, None], total * decay + weights, new_top
        at += num_cells
    close(mixed, top, total, cell, cell % num_heads, is_cell, results, shape)
