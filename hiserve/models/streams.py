"""A residual stream of several, mixed around each block (manifold-constrained hyper-connections, DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hiserve.distributed.exchange import Exchange
from hiserve.kernels.compressed_ops import CompressedOps, compressed_ops_for
from hiserve.kernels.streams_reference import MixWeights
from hiserve.models.compressed_config import StreamsConfig


class Mixed(NamedTuple):
    """Streams before a block, ``[T, n, hidden_size]``, its input, ``[T, hidden_size]``, and weights as of ``mix_streams``."""

    streams: Tensor
    x: Tensor
    post: Tensor
    matrix: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Takes the input of a block from streams, and adds its output to them.

    Attributes:
        weights: Of the mix.
        config: Number of streams, and constants of their matrix.
        norm_eps: Of the norm of all streams.
        ops: Of its device.
        exchange: Of a rank that computes a part of each block's output; None computes them whole.
    """

    weights: MixWeights
    config: StreamsConfig
    norm_eps: float
    ops: CompressedOps
    exchange: Exchange | None = None

    def split(self, streams: Tensor) -> Mixed:
        """Mixes the streams before a block."""
        config = self.config
        found = self.ops.mix_streams(
            streams, self.weights, iterations=config.iterations, eps=config.eps, norm_eps=self.norm_eps
        )
        return Mixed(streams, *found)

    def merge(self, mixed: Mixed, out: Tensor) -> Tensor:
        """Returns the streams behind a block, from its output, which may be overwritten."""
        return self.ops.merge_streams(mixed.streams, self._whole(out), mixed.post, mixed.matrix)

    def pass_on(self, mixed: Mixed, out: Tensor) -> Mixed:
        """Mixes the streams behind a block, which another one mixed before it; its output may be overwritten."""
        config, weights = self.config, self.weights
        found = self.ops.pass_streams(
            mixed.streams,
            self._whole(out),
            mixed.post,
            mixed.matrix,
            weights,
            iterations=config.iterations,
            eps=config.eps,
            norm_eps=self.norm_eps,
        )
        return Mixed(*found)

    def join(self, streams: Tensor) -> Tensor:
        """Joins the streams behind the last layer, ``[T, hidden_size]``; its weights are those of the input alone."""
        return self.ops.join_streams(streams, self.weights, eps=self.config.eps, norm_eps=self.norm_eps)

    def _whole(self, out: Tensor) -> Tensor:
        return out if self.exchange is None else self.exchange.sum(out)


def make_mix(
    parameters: dict[str, Tensor],
    name: str,
    config: StreamsConfig,
    norm_eps: float,
    exchange: Exchange | None = None,
) -> Mix:
    """Removes the parameters of a mix from a decoder's, and makes it; ``exchange`` as for ``Mix``."""
    weights = MixWeights(*(parameters.pop(name + end) for end in ("", "_base", "_scale")))
    return Mix(weights, config, norm_eps, compressed_ops_for(weights.weight.device), exchange)
