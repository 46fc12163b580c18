"""A residual stream of several, mixed around each block (manifold-constrained hyper-connections), in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.kernels.pairs import norm_plain


class MixWeights(NamedTuple):
    """Weights of one mix, float32, or float64 for float64.

    Attributes:
        weight: ``[m, n * hidden_size]``. ``m`` is ``(2 + n) * n``: rows of the input's weights, of the output's, and of the
            streams' among each other; or ``n``, those of the input alone.
        base: ``[m]``.
        scale: ``[3]``, of the three; or ``[1]``.
    """

    weight: Tensor
    base: Tensor
    scale: Tensor


def mix_streams(
    streams: Tensor, weights: MixWeights, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the input of a block, and the weights by which its output and the streams are mixed.

    Args:
        streams: ``[T, n, hidden_size]``.
        weights: Of all three.
        iterations: Of Sinkhorn and Knopp's algorithm, at least 1.
        eps: Added to weights and to the sums that divide them.
        norm_eps: Of the norm of all streams.

    Returns:
        The input, ``[T, hidden_size]``; weights of the output, ``[T, n]``; and of streams, ``[T, n, n]``: that of stream j
        in the new stream k at ``[j, k]``. Weights are of the type of ``weights``.
    """
    count = streams.shape[1]
    mixed = F.linear(norm_plain(streams.flatten(1).to(weights.weight.dtype), norm_eps), weights.weight)
    into, out, among = mixed.split_with_sizes((count, count, count * count), 1)
    base_into, base_out, base_among = weights.base.split_with_sizes((count, count, count * count))
    pre = (into * weights.scale[0] + base_into).sigmoid() + eps
    post = 2 * (out * weights.scale[1] + base_out).sigmoid()
    matrix = (among * weights.scale[2] + base_among).view(-1, count, count).softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return (pre[..., None] * streams).sum(1).to(streams.dtype), post, matrix


def merge_streams(streams: Tensor, out: Tensor, post: Tensor, matrix: Tensor) -> Tensor:
    """Returns the streams behind a block, from those before it, its output ``[T, hidden_size]``, and ``mix_streams``.

    Sums are of the type of the weights.
    """
    wide = post.dtype
    mixed = torch.einsum("tjk,tjn->tkn", matrix, streams.to(wide))
    return mixed.addcmul_(post[..., None], out[:, None].to(wide)).to(streams.dtype)


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
    """Returns the streams behind a block, as ``merge_streams``, and what ``mix_streams`` makes of them with ``weights``."""
    made = merge_streams(streams, out, post, matrix)
    return made, *mix_streams(made, weights, iterations=iterations, eps=eps, norm_eps=norm_eps)


def join_streams(streams: Tensor, weights: MixWeights, *, eps: float, norm_eps: float) -> Tensor:
    """Returns the sum of streams behind the last layer, ``[T, hidden_size]``; ``weights`` are the input's alone."""
    mixed = F.linear(norm_plain(streams.flatten(1).to(weights.weight.dtype), norm_eps), weights.weight)
    pre = (mixed * weights.scale + weights.base).sigmoid() + eps
    return (pre[..., None] * streams).sum(1).to(streams.dtype)
