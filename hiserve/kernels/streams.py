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
from hiserve.kernels.stream_sums import StreamsShape, SumBlocks, weigh
from hiserve.kernels.streams_reference import MixWeights

_BLOCK_MERGED = 1024  # columns of a program that merges
_MIN_OUTPUTS = 16
_TOGETHER = tl.constexpr(8)  # columns of a load of 16-bit elements, all in one thread
_PRECISION = tl.constexpr("tf32x3")  # of float32 on tensor cores: as exact, but for a few last digits


class _Blocks(NamedTuple):
    """What a program of a product holds at once; all but warps are powers of 2."""

    tokens: int  # of a product, 16 at least
    columns: int  # of a product, at once
    num_warps: int
    num_stages: int  # blocks of columns in flight, and one
    sums: SumBlocks


_DECODE = _Blocks(tokens=16, columns=64, num_warps=4, num_stages=3, sums=SumBlocks(64, 1, 1024, 4))
_PROMPT = _Blocks(tokens=64, columns=32, num_warps=4, num_stages=3, sums=SumBlocks(4, 32, 2048, 4))


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
        streams, out, post, matrix, made, streams.stride(0), streams.stride(1), out.stride(0),
        COUNT=count, HIDDEN=hidden, BLOCK=min(_BLOCK_MERGED, triton.next_power_of_2(hidden)), num_warps=4,
        **early_launch(streams.device),
    )  # fmt: skip
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
    shape = StreamsShape(count, hidden, num_outputs, max(_MIN_OUTPUTS, triton.next_power_of_2(num_outputs + 1)))
    blocks = _DECODE if num_tokens <= _DECODE.tokens * num_processors(streams.device) else _PROMPT
    sums = _project_parts(streams, passed, weights.weight, shape, blocks)
    if passed is not None:
        streams = passed.made
    weigh(streams, sums, weights, outs, (iterations, eps, norm_eps), shape, blocks.sums)


def _project_parts(
    streams: Tensor, passed: _Passed | None, weight: Tensor, shape: StreamsShape, blocks: _Blocks
) -> Tensor:
    """Returns the product of the streams with a weight in parts of its sum, float32 ``[parts, T, shape.block_outputs]``."""
    num_tokens, device = streams.shape[0], streams.device
    num_blocks = triton.cdiv(num_tokens, blocks.tokens)
    most = min(blocks.sums.max_parts, triton.cdiv(shape.hidden_size, blocks.columns))
    num_parts = max(1, min(most, 2 * num_processors(device) // num_blocks))
    sums = torch.empty((num_parts, num_tokens, shape.block_outputs), dtype=torch.float32, device=device)
    _project[(num_blocks, num_parts)](
        streams, *((None,) * 4 if passed is None else passed), weight, sums, num_tokens, streams.stride(0),
        streams.stride(1), 0 if passed is None else passed.out.stride(0), shape,
        COUNT=shape.num_streams, TOKENS=blocks.tokens, BLOCK=blocks.columns, num_warps=blocks.num_warps,
        num_stages=blocks.num_stages, **early_launch(device),
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _project(  # type: ignore[no-untyped-def]
    streams, out, post, matrix, made, weight, sums, num_tokens, token_stride, stream_stride, out_stride,
    SHAPE: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program computes one part of the sums of some tokens: outputs, and squares in the column behind them.

    With the output of a block it first makes the streams behind the block, and stores them.
    """
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    hidden: tl.constexpr = SHAPE.hidden_size
    span = tl.cdiv(tl.cdiv(hidden, BLOCK), tl.num_programs(1)) * BLOCK
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = token < num_tokens
    output, each = tl.arange(0, SHAPE.block_outputs), tl.arange(0, COUNT)
    if out is not None:
        gates, factors = _shares(post, matrix, token, is_token, COUNT)
    total = tl.full((TOKENS, SHAPE.block_outputs), 0.0, tl.float32)
    squares = tl.full((TOKENS, BLOCK // _TOGETHER), 0.0, tl.float32)
    low = tl.program_id(1) * span
    for first in range(low, tl.minimum(low + span, hidden), BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < hidden
        mask = is_token[:, None] & is_column[None, :]
        source = streams + token[:, None] * token_stride + column[None, :]
        if out is not None:
            every = source[:, None, :] + (each * stream_stride)[None, :, None]
            old = tl.load(every, mask=mask[:, None, :], other=0.0).to(tl.float32)
            new = tl.load(out + token[:, None] * out_stride + column[None, :], mask=mask, other=0.0)
            new = tl.where((each == 0)[None, :, None], new.to(tl.float32)[:, None, :], 0.0)
        for stream in tl.static_range(COUNT):
            if out is None:
                value = tl.load(source + stream * stream_stride, mask=mask, other=0.0)
            else:
                merged = tl.sum(gates[stream][:, None, None] * new + factors[stream][:, :, None] * old, 1)
                value = merged.to(made.dtype.element_ty)
                target = made + (token[:, None] * COUNT + stream) * hidden + column[None, :]
                tl.store(target, value, mask=mask)
            row = weight + output[None, :] * (COUNT * hidden) + (stream * hidden + column)[:, None]
            line = tl.load(row, mask=(output < SHAPE.num_outputs)[None, :] & is_column[:, None], other=0.0)
            total = _product(value, line, total)
            square = value.to(tl.float32) * value.to(tl.float32)
            squares += tl.sum(tl.reshape(square, [TOKENS, BLOCK // _TOGETHER, _TOGETHER]), 2)
    total = tl.where(output[None, :] == SHAPE.num_outputs, tl.sum(squares, 1)[:, None], total)
    target = sums + (tl.program_id(1) * num_tokens + token)[:, None] * SHAPE.block_outputs + output[None, :]
    tl.store(target, total, mask=is_token[:, None])


@triton.jit
def _shares(post, matrix, token, is_token, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns of each new stream what it takes of the output, ``[tokens]``, and of the old streams, ``[tokens, COUNT]``."""
    gates, factors, other = (), (), tl.arange(0, COUNT)
    for stream in tl.static_range(COUNT):
        gates += (tl.load(post + token * COUNT + stream, mask=is_token, other=0.0),)  # type: ignore[assignment]
        share = (token[:, None] * COUNT + other[None, :]) * COUNT + stream
        factors += (tl.load(matrix + share, mask=is_token[:, None], other=0.0),)  # type: ignore[assignment]
    return gates, factors


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


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    streams, out, post, matrix, made, token_stride, stream_stride, out_stride,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
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
