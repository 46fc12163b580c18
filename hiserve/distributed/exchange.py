"""Exchanges between the ranks of a group: what they compute in parts becomes whole, with the same bits everywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from hiserve.distributed.shard import Shard


class Exchange(Protocol):
    """The exchanges of one rank. All ranks issue the same ones in the same order; none waits for the host.

    A model that runs alone has none.
    """

    shard: Shard

    def reduce_add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum of all ranks' ``delta`` to ``residual`` in place, both ``[T, n]``, and returns the norm; ``delta`` is overwritten."""

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' ``x``, which is overwritten."""

    def gather_columns(self, x: Tensor, size: int) -> Tensor:
        """Returns ``[T, size]`` of all ranks' columns ``[T, n]``: the rank's tokens of a vocabulary of ``size``, as ``Shard.tokens`` says."""

    def paused(self) -> AbstractContextManager[None]:
        """Within, nothing is exchanged, and results are undefined: for steps that not all ranks run, as they only compile kernels."""

    def close(self) -> None:
        """Leaves the group. No exchange follows."""
