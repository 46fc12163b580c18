"""Several residual streams, mixed around each block, in Triton; ``kernels.streams_reference`` is the twin.

The weights of a mix are few outputs of a product that reads all streams of a token: it is split into parts of its sum, which
the launch behind it adds up, before it iterates on each token's matrix and sums the streams. The streams behind a block are
made where the product of the next mix reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels import streams_reference
from hiserve.kernels.launch import await_previous, early_launch, num_processors, start_next
from hiserve.kernels.streams_reference import MixWeights

_BLOCK_MERGED = 1024  # columns of a program that merges
_MIN_OUTPUTS = 16
_PRECISION = tl.constexpr("tf32x3")  # of float32 on tensor cores: as exact, but for a few last digits


class _Blocks(NamedTuple):
    """What programs of a mix hold at once; all but warps are powers of 2."""

    tokens: int  # of a product, 16 at least
    columns: int  # of a product, at once
    num_warps: int
    max_parts: int  # of a product's sum
    hidden: int  # columns of a sum of streams
    num_sum_warps: int


_DECODE = _Blocks(tokens=16, columns=64, num_warps=4, max_parts=64, hidden=1024, num_sum_warps=4)
_PROMPT = _Blocks(tokens=64, columns=32, num_warps=8, max_parts=4, hidden=4096, num_sum_warps=8)


class _Shape(NamedTuple):
    """Compile-time constants."""

    num_streams: int  # a power of 2
    hidden_size: int
    num_outputs: int  # of the product
    block_outputs: int  # a power of 2, above ``num_outputs``: one more column has the sum of squares


class _Passed(NamedTuple):
    """What the streams behind a block are made of, and their memory."""

    out: Tensor
    post: Tensor
    matrix: Tensor
    made: Tensor


def mix_streams(
    streams: Tensor, weights: MixWeights, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Like ``streams_reference.mix_streams``; float64, and numbers of streams that are no power of 2, use the twin."""
    if not _fits(streams, weights):
        return streams_reference.mix_streams(streams, weights, iterations=iterations, eps=eps, norm_eps=norm_eps)
    outs = _new_outs(streams)
    _mix(streams, None, weights, outs, iterations, eps, norm_eps)
    return outs


def pass_streams(
    streams: Tensor,
    out: Tensor,
    post: Tensor,
    matrix: Tensor,
    weights: MixWeights,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like ``streams_reference.pass_streams``; as ``mix_streams``."""
    if not _fits(streams, weights):
        return streams_reference.pass_streams(
            streams, out, post, matrix, weights, iterations=iterations, eps=eps, norm_eps=norm_eps
        )
    made, outs = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device), _new_outs(streams)
    _mix(streams, _Passed(out, post, matrix, made), weights, outs, iterations, eps, norm_eps)
    return made, *outs


def _new_outs(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory of what ``mix_streams`` returns."""
    num_tokens, count, hidden = streams.shape
    post, matrix = (
        streams.new_empty((num_tokens, *shape), dtype=torch.float32) for shape in ((count,), (count, count))
    )
    return streams.new_empty((num_tokens, hidden)), post, matrix


def join_streams(streams: Tensor, weights: MixWeights, *, eps: float, norm_eps: float) -> Tensor:
    """Like ``streams_reference.join_streams``; as ``mix_streams``."""
    if not _fits(streams, weights):
        return streams_reference.join_streams(streams, weights, eps=eps, norm_eps=norm_eps)
    x = streams.new_empty((streams.shape[0], streams.shape[2]))
    _mix(streams, None, weights, (x, None, None), 0, eps, norm_eps)
    return x


def merge_streams(streams: Tensor, out: Tensor, post: Tensor, matrix: Tensor) -> Tensor:
    """Like ``streams_reference.merge_streams``; as ``mix_streams``."""
    num_tokens, count, hidden = streams.shape
    if post.dtype == torch.float64 or count & (count - 1):
        return streams_reference.merge_streams(streams, out, post, matrix)
    assert streams.stride(2) == out.stride(1) == 1 and post.is_contiguous() and matrix.is_contiguous(), streams.stride()
    made = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    _merge[(num_tokens, triton.cdiv(hidden, _BLOCK_MERGED))](
        streams,
        out,
        post,
        matrix,
        made,
        streams.stride(0),
        streams.stride(1),
        out.stride(0),
        COUNT=count,
        HIDDEN=hidden,
        BLOCK=min(_BLOCK_MERGED, triton.next_power_of_2(hidden)),
        num_warps=4,
        **early_launch(streams.device),
    )
    return made


def _fits(streams: Tensor, weights: MixWeights) -> bool:
    return weights.weight.dtype == torch.float32 and not streams.shape[1] & (streams.shape[1] - 1)


def _mix(
    streams: Tensor,
    passed: _Passed | None,
    weights: MixWeights,
    outs: tuple[Tensor, Tensor | None, Tensor | None],
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    """Fills the outputs of a mix, without the last two those of a join; first makes the streams behind a block, if one passed."""
    (num_tokens, count, hidden), num_outputs = streams.shape, weights.weight.shape[0]
    if not num_tokens:  # of a step whose rows draw no token
        return
    assert streams.stride(2) == 1 and all(each.is_contiguous() for each in weights), streams.stride()
    if passed is not None:
        is_dense = passed.post.is_contiguous() and passed.matrix.is_contiguous()
        assert passed.out.stride(1) == 1 and is_dense, passed.out.stride()
    shape = _Shape(count, hidden, num_outputs, max(_MIN_OUTPUTS, triton.next_power_of_2(num_outputs + 1)))
    blocks = _DECODE if num_tokens <= _DECODE.tokens * num_processors(streams.device) else _PROMPT
    sums = _project_parts(streams, passed, weights.weight, shape, blocks)
    if passed is not None:
        streams = passed.made
    block = min(blocks.hidden, triton.next_power_of_2(hidden))
    _weigh[(num_tokens, triton.cdiv(hidden, block) + 1)](
        streams,
        sums,
        weights.base,
        weights.scale,
        *outs,
        num_tokens,
        sums.shape[0],
        streams.stride(0),
        streams.stride(1),
        iterations,
        eps,
        norm_eps,
        shape,
        BLOCK=block,
        PARTS=blocks.max_parts,
        num_warps=blocks.num_sum_warps,
        **early_launch(streams.device),
    )


def _project_parts(streams: Tensor, passed: _Passed | None, weight: Tensor, shape: _Shape, blocks: _Blocks) -> Tensor:
    """Returns the product of the streams with a weight in parts of its sum, float32 ``[parts, T, shape.block_outputs]``."""
    num_tokens, device = streams.shape[0], streams.device
    num_blocks = triton.cdiv(num_tokens, blocks.tokens)
    most = min(blocks.max_parts, triton.cdiv(shape.hidden_size, blocks.columns))
    num_parts = max(1, min(most, 2 * num_processors(device) // num_blocks))
    sums = torch.empty((num_parts, num_tokens, shape.block_outputs), dtype=torch.float32, device=device)
    _project[(num_blocks, num_parts)](
        streams,
        *((None,) * 4 if passed is None else passed),
        weight,
        sums,
        num_tokens,
        streams.stride(0),
        streams.stride(1),
        0 if passed is None else passed.out.stride(0),
        shape,
        COUNT=shape.num_streams,
        TOKENS=blocks.tokens,
        BLOCK=blocks.columns,
        num_warps=blocks.num_warps,
        num_stages=3,
        **early_launch(device),
    )
    return sums


@triton.jit(do_not_specialize=["num_tokens", "token_stride", "out_stride"])  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    streams,
    out,
    post,
    matrix,
    made,
    weight,
    sums,
    num_tokens,
    token_stride,
    stream_stride,
    out_stride,
    SHAPE: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes one part of the sums of some tokens: outputs, and squares in the column behind them.

    With the output of a block it first makes the streams behind the block, and stores them.
    """
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    hidden: tl.constexpr = SHAPE.hidden_size
    span = tl.cdiv(tl.cdiv(hidden, BLOCK), tl.num_programs(1)) * BLOCK
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = tl.arange(0, SHAPE.block_outputs)
    is_token, is_output = token < num_tokens, output < SHAPE.num_outputs
    total = tl.full((TOKENS, SHAPE.block_outputs), 0.0, tl.float32)
    squares = tl.full((TOKENS,), 0.0, tl.float32)
    low = tl.program_id(1) * span
    for first in range(low, tl.minimum(low + span, hidden), BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = is_token[:, None] & (column < hidden)[None, :]
        source = streams + token[:, None] * token_stride + column[None, :]
        if out is not None:
            each = tl.arange(0, COUNT)
            every = source[:, None, :] + (each * stream_stride)[None, :, None]
            old = tl.load(every, mask=mask[:, None, :], other=0.0).to(tl.float32)
            new = tl.load(out + token[:, None] * out_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        for stream in tl.static_range(COUNT):
            if out is None:
                value = tl.load(source + stream * stream_stride, mask=mask, other=0.0)
            else:
                share = (token[:, None] * COUNT + each[None, :]) * COUNT + stream
                factor = tl.load(matrix + share, mask=is_token[:, None], other=0.0)
                gate = tl.load(post + token * COUNT + stream, mask=is_token, other=0.0)
                merged = gate[:, None] * new + tl.sum(factor[:, :, None] * old, 1)
                value = merged.to(made.dtype.element_ty)
                tl.store(made + (token[:, None] * COUNT + stream) * hidden + column[None, :], value, mask=mask)
            row = weight + output[None, :] * (COUNT * hidden) + (stream * hidden + column)[:, None]
            line = tl.load(row, mask=is_output[None, :] & (column < hidden)[:, None], other=0.0)
            total = _product(value, line, total)
            squares += tl.sum(value.to(tl.float32) * value.to(tl.float32), 1)
    total = tl.where(output[None, :] == SHAPE.num_outputs, squares[:, None], total)
    target = sums + (tl.program_id(1) * num_tokens + token)[:, None] * SHAPE.block_outputs + output[None, :]
    tl.store(target, total, mask=is_token[:, None])


@triton.jit
def _product(value, factor, total):  # type: ignore[no-untyped-def]
    """Adds a product with float32 factors to a sum."""
    if value.dtype == tl.bfloat16:  # in three parts of 8 bits a factor is whole
        high = factor.to(tl.bfloat16)
        factor -= high.to(tl.float32)
        middle = factor.to(tl.bfloat16)
        total = tl.dot(value, (factor - middle.to(tl.float32)).to(tl.bfloat16), total)
        total = tl.dot(value, high, tl.dot(value, middle, total))
    else:
        total = tl.dot(value.to(tl.float32), factor, total, input_precision=_PRECISION)
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "token_stride", "eps", "norm_eps"])  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    streams,
    sums,
    base,
    scale,
    x,
    post,
    matrix,
    num_tokens,
    num_parts,
    token_stride,
    stream_stride,
    iterations,
    eps,
    norm_eps,
    SHAPE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """The first program of a token makes the weights of the output and of the streams; each other sums some columns."""
    count: tl.constexpr = SHAPE.num_streams
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stream, part = tl.arange(0, count), tl.arange(0, PARTS)
    mine, is_part = sums + (part * num_tokens + token) * SHAPE.block_outputs, part < num_parts
    squares = tl.sum(tl.load(mine + SHAPE.num_outputs, mask=is_part, other=0.0), 0)
    normed = tl.rsqrt(squares / (count * SHAPE.hidden_size) + norm_eps)
    if number > 0:
        gate = _total(mine, is_part, stream) * normed * tl.load(scale) + tl.load(base + stream)
        pre = 1.0 / (1.0 + tl.exp(-gate)) + eps
        column = (number - 1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < SHAPE.hidden_size
        source = streams + token * token_stride + stream[:, None] * stream_stride + column[None, :]
        value = tl.load(source, mask=mask[None, :], other=0.0).to(tl.float32)
        total = tl.sum(value * pre[:, None], 0).to(x.dtype.element_ty)
        tl.store(x + token * SHAPE.hidden_size + column, total, mask=mask)
    elif matrix is not None:
        gate = _total(mine, is_part, count + stream) * normed * tl.load(scale + 1) + tl.load(base + count + stream)
        tl.store(post + token * count + stream, 2.0 / (1.0 + tl.exp(-gate)))
        flat = tl.arange(0, count * count)
        square = _total(mine, is_part, 2 * count + flat) * normed * tl.load(scale + 2) + tl.load(
            base + 2 * count + flat
        )
        square = tl.reshape(square, [count, count])
        square = tl.exp(square - tl.max(square, 1)[:, None])
        square = square / tl.sum(square, 1)[:, None] + eps
        square = square / (tl.sum(square, 0)[None, :] + eps)
        for _ in range(iterations - 1):
            square = square / (tl.sum(square, 1)[:, None] + eps)
            square = square / (tl.sum(square, 0)[None, :] + eps)
        tl.store(matrix + token * (count * count) + flat, tl.reshape(square, [count * count]))


@triton.jit
def _total(parts, is_part, output):  # type: ignore[no-untyped-def]
    """Returns the sum of some outputs over all parts."""
    return tl.sum(tl.load(parts[:, None] + output[None, :], mask=is_part[:, None], other=0.0), 0)


@triton.jit(do_not_specialize=["token_stride", "out_stride"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    streams,
    out,
    post,
    matrix,
    made,
    token_stride,
    stream_stride,
    out_stride,
    COUNT: tl.constexpr,  # noqa: N803
    HIDDEN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program computes some columns of a token's new streams."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream, mask = tl.arange(0, COUNT), column < HIDDEN
    value = tl.load(out + token * out_stride + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(post + token * COUNT + stream)[:, None] * value[None, :]
    for other in tl.static_range(COUNT):
        source = streams + token * token_stride + other * stream_stride + column
        before = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(matrix + (token * COUNT + other) * COUNT + stream)[:, None] * before[None, :]
    target = made + (token * COUNT + stream[:, None]) * HIDDEN + column[None, :]
    tl.store(target, total.to(made.dtype.element_ty), mask=mask[None, :])
