"""The launch behind the product of a mix: it adds the product's parts up, makes weights of them, and sums streams."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.streams_reference import MixWeights


class StreamsShape(NamedTuple):
    """Compile-time constants."""

    num_streams: int  # a power of 2
    hidden_size: int
    num_outputs: int  # of the product
    block_outputs: int  # a power of 2, above ``num_outputs``: one more column has the sum of squares


class SumBlocks(NamedTuple):
    """What a program holds at once; all but warps are powers of 2."""

    max_parts: int  # of a product's sum
    tokens: int  # whose matrices it makes
    columns: int  # of a sum of streams
    num_warps: int


def weigh(
    streams: Tensor,
    sums: Tensor,
    weights: MixWeights,
    outs: tuple[Tensor, Tensor | None, Tensor | None],
    constants: tuple[int, float, float],
    shape: StreamsShape,
    blocks: SumBlocks,
) -> None:
    """Fills the outputs of a mix.

    Args:
        streams: ``[T, n, hidden_size]``.
        sums: float32 ``[parts, T, block_outputs]``, of the product; parts are at most ``blocks.max_parts``.
        weights: Of the mix.
        outs: What ``streams_reference.mix_streams`` returns; without the last two those of a join.
        constants: Iterations, what is added to weights, and that of the norm.
        shape: Of streams and product.
        blocks: Of a program.
    """
    num_tokens, hidden = streams.shape[0], streams.shape[2]
    block = min(blocks.columns, triton.next_power_of_2(hidden))
    _weigh[(blocks.tokens * triton.cdiv(hidden, block) + 1, triton.cdiv(num_tokens, blocks.tokens))](
        streams, sums, weights.base, weights.scale, *outs, num_tokens, sums.shape[0], streams.stride(0),
        streams.stride(1), *constants, shape,
        TOKENS=blocks.tokens, BLOCK=block, PARTS=blocks.max_parts, num_warps=blocks.num_warps,
        **early_launch(streams.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "eps", "norm_eps"])
def _weigh(  # type: ignore[no-untyped-def]
    streams, sums, base, scale, x, post, matrix, num_tokens, num_parts, token_stride, stream_stride, iterations, eps,
    norm_eps,
    SHAPE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """The first program of some tokens makes the weights of the output and of the streams; each other sums columns of a token."""
    count: tl.constexpr = SHAPE.num_streams
    num_blocks: tl.constexpr = (SHAPE.hidden_size + BLOCK - 1) // BLOCK
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    number, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * TOKENS
    given = sums, num_tokens, num_parts, base, scale, norm_eps
    stream = tl.arange(0, count)
    if number > 0:
        token = first + (number - 1) // num_blocks
        if token < num_tokens:
            column = (number - 1) % num_blocks * BLOCK + tl.arange(0, BLOCK)
            mask = column < SHAPE.hidden_size
            source = streams + token * token_stride + stream[:, None] * stream_stride + column[None, :]
            value = tl.load(source, mask=mask[None, :], other=0.0).to(tl.float32)  # while the parts are loaded
            pre = 1.0 / (1.0 + tl.exp(-_outputs(given, token, stream, 0, SHAPE, 1, PARTS))) + eps
            total = tl.sum(value * pre[:, None], 0).to(x.dtype.element_ty)
            tl.store(x + token * SHAPE.hidden_size + column, total, mask=mask)
    elif matrix is not None:
        flat = tl.arange(0, count * count)
        gates = 2.0 / (1.0 + tl.exp(-_outputs(given, first, count + stream, 1, SHAPE, TOKENS, PARTS)))
        square = _outputs(given, first, 2 * count + flat, 2, SHAPE, TOKENS, PARTS)
        if TOKENS == 1:
            square = _balanced(tl.reshape(square, [count, count]), iterations, eps)
            tl.store(post + first * count + stream, gates)
            tl.store(matrix + first * (count * count) + flat, tl.reshape(square, [count * count]))
        else:  # tokens are the innermost dimension: each thread has all of a token
            square = _balanced(tl.reshape(square, [count, count, TOKENS]), iterations, eps)
            each = (first + tl.arange(0, TOKENS))[None, :]
            tl.store(post + each * count + stream[:, None], gates, mask=each < num_tokens)
            target = matrix + each * (count * count) + flat[:, None]
            tl.store(target, tl.reshape(square, [count * count, TOKENS]), mask=each < num_tokens)


@triton.jit
def _outputs(given, first, output, group, SHAPE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns outputs of a group, of normed tokens, scaled and shifted: of one token ``[outputs]``, else ``[outputs, TOKENS]``."""
    sums, num_tokens, num_parts, base, scale, norm_eps = given
    part = tl.arange(0, PARTS)
    shift = tl.load(base + output)
    if TOKENS == 1:
        mine, is_part = sums + (part * num_tokens + first) * SHAPE.block_outputs, part < num_parts
        total = tl.sum(tl.load(mine[:, None] + output[None, :], mask=is_part[:, None], other=0.0), 0)
    else:
        token = first + tl.arange(0, TOKENS)
        mine = sums + (part[:, None] * num_tokens + token[None, :]) * SHAPE.block_outputs
        is_part = (part < num_parts)[:, None] & (token < num_tokens)[None, :]
        each = mine[:, None, :] + output[None, :, None]
        total = tl.sum(tl.load(each, mask=is_part[:, None, :], other=0.0), 0)
        shift = shift[:, None]
    squares = tl.sum(tl.load(mine + SHAPE.num_outputs, mask=is_part, other=0.0), 0)
    normed = tl.rsqrt(squares / (SHAPE.num_streams * SHAPE.hidden_size) + norm_eps)
    return total * normed * tl.load(scale + group) + shift


@triton.jit
def _balanced(square, iterations, eps):  # type: ignore[no-untyped-def]
    """Returns matrices, of the first two dimensions, after Sinkhorn and Knopp's algorithm."""
    square = tl.exp(square - tl.max(square, 1, keep_dims=True))
    square = square / tl.sum(square, 1, keep_dims=True) + eps
    square = square / (tl.sum(square, 0, keep_dims=True) + eps)
    for _ in range(iterations - 1):
        square = square / (tl.sum(square, 1, keep_dims=True) + eps)
        square = square / (tl.sum(square, 0, keep_dims=True) + eps)
    return square
