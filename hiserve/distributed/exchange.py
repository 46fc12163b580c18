"""Exchanges between the ranks of a group: what they compute in parts becomes whole, with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hiserve.distributed.shard import Shard


class Exchanged(NamedTuple):
    """One exchange; of no rows there is none."""

    kind: Literal["sum", "gather"]
    rows: int
    columns: int  # of each rank's part
    dtype: torch.dtype


class Exchange(Protocol):
    """The exchanges of one rank. All ranks issue the same ones in the same order; none waits for the host.

    A model that runs alone has none.
    """

    shard: Shard

    def reduce_add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum of all ranks' ``delta`` to ``residual`` in place, both ``[T, n]``, and returns the norm; ``delta`` is overwritten."""

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' ``x``, which is overwritten."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' ``x``, ``[T, n]``, in their order: ``[size, T, n]``."""

    def gather_columns(self, x: Tensor, size: int) -> Tensor:
        """Returns ``[T, size]`` of all ranks' columns ``[T, n]``: the rank's tokens of a vocabulary of ``size``, as ``Shard.tokens`` says."""

    def expect(self, exchanges: Sequence[Exchanged] | None) -> None:
        """Says which exchanges come next, and no others; None is not known. Those that were expected before have come."""

    def finish(self) -> None:
        """Issues the expected exchanges that are left, of zeros: their results are undefined on every rank."""

    def paused(self) -> AbstractContextManager[None]:
        """Within, nothing is exchanged, and results are undefined, but such as this rank alone might have: for steps that not all ranks run, as they only compile kernels."""

    def begin_graph(self) -> None:
        """Begins to note exchanges: a graph is captured, which holds them."""

    def end_graph(self) -> tuple[Exchanged, ...]:
        """Ends that; returns what was noted since."""

    def replayed(self, exchanges: Sequence[Exchanged]) -> None:
        """Says that a graph that holds these was launched."""

    def abort(self) -> None:
        """Ends exchanges that wait for a rank that has ended, with undefined results; from any thread. None follows."""

    def close(self) -> None:
        """Leaves the group. No exchange follows."""
