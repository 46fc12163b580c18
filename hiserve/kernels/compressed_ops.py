"""The operations of compressed attention and of several streams (DeepSeek-V4), and the module that has them on each device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.compress_reference import CarriedInputs, Compression, StepTokens
from hiserve.kernels.pairs import PairFrequencies
from hiserve.kernels.streams_reference import MixWeights
from hiserve.kernels.union_rows import RangeRows, RowSource

# Imported by name: triton, which CUDA kernels need, is not installed everywhere.
_MODULES = {"cpu": "hiserve.kernels.compressed_reference", "cuda": "hiserve.kernels.compressed_fused"}


class CompressedOps(Protocol):
    """The operations; the modules that ``kernels.compressed_reference`` names document each.

    None waits for the device, and shapes depend on shapes and on bounds that the host knows: a CUDA graph can record them.
    """

    def pair_angles(self, positions: Tensor, kinds: PairFrequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of positions, for each kind of layers."""

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the last elements of each head, every one paired with its neighbour."""

    def store_rows(
        self,
        heads: Tensor,
        row: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
        slots: Tensor,
        packed: PackedPages | None = None,
    ) -> Tensor:
        """Norms and rotates the heads of queries, and a row of each token, which it stores; returns the queries."""

    def attend(
        self,
        q: Tensor,
        sources: Sequence[RowSource],
        sink: Tensor | None,
        scale: float,
        turns: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attends by one softmax over all rows of all sources and a sink; returns values, turned back, and logarithms."""

    def slots_behind_first(self, source: RangeRows, kv_lens: Tensor, qo_indptr: Tensor) -> Tensor:
        """Returns the slots of a window without row 0, which may never have been written."""

    def choose_rows(self, q: Tensor, weights: Tensor, keys: RangeRows, most: int, scale: float) -> Tensor:
        """Returns the slots of the best rows of each token, in the order of rows."""

    def compress(
        self,
        values: Tensor,
        scores: Tensor,
        how: Compression,
        carried: CarriedInputs,
        tokens: StepTokens,
        target: RangeRows,
        turns: tuple[Tensor, Tensor],
    ) -> None:
        """Writes the rows that end with tokens of the step, and keeps the tokens' inputs."""

    def mix_streams(
        self, streams: Tensor, weights: MixWeights, *, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the input of a block, and the weights of its output and of the streams."""

    def merge_streams(self, streams: Tensor, out: Tensor, post: Tensor, matrix: Tensor) -> Tensor:
        """Returns the streams behind a block."""

    def pass_streams(
        self,
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
        """Merges, then mixes for the next block."""

    def join_streams(self, streams: Tensor, weights: MixWeights, *, eps: float, norm_eps: float) -> Tensor:
        """Returns the sum of the streams behind the last layer."""

    def route_by_root(
        self,
        logits: Tensor,
        num_per_token: int,
        scale: float,
        *,
        bias: Tensor | None = None,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns shares and numbers of the best experts, or shares of given ones."""


def compressed_ops_for(device: torch.device) -> CompressedOps:
    """Returns the operations of a device."""
    return cast(CompressedOps, importlib.import_module(_MODULES[device.type]))
