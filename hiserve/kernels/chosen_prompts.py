"""Attention of prompts to chosen ones of expanded keys, in Triton; ``chosen_reference.attend_expanded`` is the twin.

A choice is a mask of bits: all keys that a token may see are multiplied, chosen or not, which pays while they are not many times as
many as are chosen (``attention.chosen_prompts``). The softmax is the online one of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hiserve.kernels import chosen_reference
from hiserve.kernels.chosen_bits import BLOCK_KEYS, WORD_KEYS, ExpandedRows

_WORD = tl.constexpr(WORD_KEYS)
_MIN_DIM = 16  # of a product
_ALIGNMENT = 16  # bytes, of heads that the copy engine reads


class Tile(NamedTuple):
    """What a program holds at once."""

    num_queries: int  # tokens, of one head
    num_keys: int  # those of a word, or half of them
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread, so that two programs fit a multiprocessor


_TILE = Tile(128, 32, 8, 3, 128)  # one of the four fastest of twelve, by a run on an H200 whose record is not kept
_MAX_ELEMENTS = 320  # of a key and a value in such a tile
_LARGE_TILE = Tile(128, 64, 8, 2)  # of larger heads; chosen by registers alone
_WIDE_TILE = Tile(16, 64, 4, 1)  # of float32, whose products take no tensor cores


class _Shape(NamedTuple):
    """Compile-time constants."""

    num_heads: int
    num_queries: int
    num_keys: int
    key_dim: int
    wide_dim: int  # the largest power of 2 up to that
    rest_dim: int  # of what is left, a power of 2 too; 0 is nothing
    value_dim: int
    block_values: int
    words: int  # of a token


def can_attend_expanded(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether heads of so many elements are multiples of the bytes that the copy engine needs."""
    return key_dim >= _MIN_DIM and not any(dim * dtype.itemsize % _ALIGNMENT for dim in (key_dim, value_dim))


def attend_expanded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bits: Tensor,
    rows: ExpandedRows,
    scale: float,
    out: Tensor,
    tile: Tile | None = None,
) -> None:
    """Like ``chosen_reference.attend_expanded``; float64 uses the twin. ``tile`` overrides the one of the type."""
    if q.dtype == torch.float64:
        return chosen_reference.attend_expanded(q, keys, values, bits, rows, scale, out)
    (num_heads, key_dim), value_dim = q.shape[1:], values.shape[2]
    assert q.stride()[1:] == (key_dim, 1) and out.is_contiguous() and bits.is_contiguous(), (q.stride(), bits.stride())
    assert can_attend_expanded(key_dim, value_dim, q.dtype), f"heads of {key_dim} and {value_dim} elements"
    assert keys.shape[0] % BLOCK_KEYS == 0, f"{keys.shape[0]} keys"
    cut = tile or _tile_for(key_dim, value_dim, q.dtype)
    assert cut.num_keys in (WORD_KEYS // 2, WORD_KEYS), cut
    wide_dim = 1 << (key_dim.bit_length() - 1)
    shape = _Shape(
        num_heads=num_heads,
        num_queries=cut.num_queries,
        num_keys=cut.num_keys,
        key_dim=key_dim,
        wide_dim=wide_dim,
        rest_dim=0 if key_dim == wide_dim else max(_MIN_DIM, triton.next_power_of_2(key_dim - wide_dim)),
        value_dim=value_dim,
        block_values=max(_MIN_DIM, triton.next_power_of_2(value_dim)),
        words=bits.shape[1],
    )
    # Programs that follow each other share a head's keys, and those with the most come first.
    grid = (triton.cdiv(rows.max_new, cut.num_queries), num_heads, rows.columns.shape[0])
    _attend[grid](
        q, bits, rows.columns, _blocks(keys, cut.num_keys, wide_dim), _blocks(keys, cut.num_keys, shape.rest_dim or wide_dim),
        _blocks(values, cut.num_keys, shape.block_values), out, q.stride(0), scale * math.log2(math.e), shape,
        num_warps=cut.num_warps, num_stages=cut.num_stages, maxnreg=cut.max_registers,
    )  # fmt: skip
    return None


def _tile_for(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    if dtype.itemsize > 2:
        return _WIDE_TILE
    return _TILE if key_dim + value_dim <= _MAX_ELEMENTS else _LARGE_TILE


def _blocks(x: Tensor, num_keys: int, dim: int) -> TensorDescriptor:
    """Describes ``[num_keys, num_heads, n]`` as blocks of one head for the copy engine; elements outside are 0."""
    return TensorDescriptor.from_tensor(x, [num_keys, 1, dim])


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["bits", "rows"])
def _attend(  # type: ignore[no-untyped-def]
    q, bits, rows, wide_blocks, rest_blocks, value_blocks, out, q_stride, scale, shape: tl.constexpr
):  # fmt: skip
    """One program: some tokens of a row, for one head."""
    num_queries: tl.constexpr = shape.num_queries
    num_keys: tl.constexpr = shape.num_keys
    block_values: tl.constexpr = shape.block_values
    head, row = tl.program_id(1), rows + tl.program_id(2) * 5
    count, key_start, prefix = tl.load(row + 1), tl.load(row + 3), tl.load(row + 4)
    first = (tl.cdiv(count, num_queries) - 1 - tl.program_id(0)) * num_queries
    if first < 0:
        return
    token = first + tl.arange(0, num_queries)
    mine = tl.minimum(token, count - 1).to(tl.int64)  # a token that is not there is computed as the last one
    wide, rest = _load_queries(q + (tl.load(row) + mine) * q_stride + head * shape.key_dim, shape)
    words = bits + (tl.load(row + 2) + mine) * shape.words
    top = tl.full([num_queries], -float("inf"), tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    mixed = tl.zeros([num_queries, block_values], tl.float32)
    num_blocks = tl.cdiv(prefix + tl.minimum(first + num_queries, count), num_keys)
    chosen = _load_word(words, 0, num_keys)
    for block in range(num_blocks):
        place = key_start + block * num_keys
        keys = wide_blocks.load([place, head, 0]).reshape(num_keys, shape.wide_dim)
        scores = tl.dot(wide, keys.T, input_precision="ieee")
        if shape.rest_dim:
            keys = rest_blocks.load([place, head, shape.wide_dim]).reshape(num_keys, shape.rest_dim)
            scores = tl.dot(rest, keys.T, scores, input_precision="ieee")
        scores = tl.where(_sees(chosen, num_keys), scores, -float("inf"))
        # The next one comes while this block is added.
        chosen = _load_word(words, tl.minimum(block + 1, num_blocks - 1), num_keys)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a token that has chosen no key yet
        weights, decay = tl.exp2(scores * scale - base[:, None]), tl.exp2(top - base)
        values = value_blocks.load([place, head, 0]).reshape(num_keys, block_values)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
        top, total = new_top, total * decay + tl.sum(weights, 1)
    column = tl.arange(0, block_values)
    target = out + ((tl.load(row) + mine) * shape.num_heads + head)[:, None] * shape.value_dim + column[None, :]
    is_element = (token < count)[:, None] & (column < shape.value_dim)[None, :]
    tl.store(target, (mixed * (1.0 / total)[:, None]).to(out.dtype.element_ty), mask=is_element)


@triton.jit
def _load_queries(at, shape: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first elements of queries, and the others."""
    wide = tl.load(at[:, None] + tl.arange(0, shape.wide_dim)[None, :])
    rest = wide
    if shape.rest_dim:
        column = shape.wide_dim + tl.arange(0, shape.rest_dim)
        rest = tl.load(at[:, None] + column[None, :], mask=(column < shape.key_dim)[None, :], other=0.0)
    return wide, rest


@triton.jit
def _load_word(words, block, num_keys: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the word of a block, whose first bit is that of its first key."""
    word = tl.load(words + block * num_keys // _WORD)
    if num_keys < _WORD:
        word >>= block * num_keys % 64
    return word


@triton.jit
def _sees(word, num_keys: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the bits of words, ``[num_queries, num_keys]``, from halves that a device has in one register.

    These are shifted by what a thread's first key is in a tile of a tensor core, 8 keys wide; its other bits are known to the compiler.
    """
    column = tl.arange(0, num_keys)[None, :]
    half = tl.where(column % _WORD < 32, word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
    return ((half >> (column & 6)) & (1 << (column & 25))) != 0
