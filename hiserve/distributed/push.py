"""Sums of few rows by ranks that write into each other's memory (``kernels/push_sum.py``)."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from hiserve.distributed.peer_memory import CudaDriver, PeerMemory, Store, map_memory
from hiserve.distributed.shard import Shard
from hiserve.kernels.push_sum import MAX_ROWS, Inboxes, inbox_bytes, push_add_norm, push_sum, takes


class Push:
    """The sums of one rank; all ranks issue the same ones in the same order, each on one stream.

    Args:
        memory: The inboxes of all ranks.
        rank: This one.
        device: Of all tensors, with CUDA.
    """

    def __init__(self, memory: PeerMemory, rank: int, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        counts = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._inboxes = Inboxes(addresses, counts, torch.zeros(1, dtype=torch.int32).pin_memory(), rank)

    def takes(self, x: Tensor) -> bool:
        """Whether this sums ``[T, n]``, T at least 1; the same on all ranks."""
        return takes(x)

    def sum(self, x: Tensor) -> None:
        """Replaces ``x`` by the sum of all ranks'."""
        push_sum(x, self._inboxes)

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Adds the sum of all ranks' ``delta`` to ``residual`` in place, and writes the norm to ``out``."""
        push_add_norm(delta, residual, weight, eps, out, self._inboxes)

    def abort(self) -> None:
        """Ends sums that wait for a rank that has ended, with undefined results; from any thread. None follows."""
        self._inboxes.is_ended.fill_(1)

    def close(self) -> None:
        """Ends the use of the memory; of the first rank after all others have ended. No sum follows."""
        with suppress(RuntimeError), torch.cuda.device(self._device):  # a device that failed ends with the process
            _enter_device()
            self._memory.close()


def open_push(store: Store, shard: Shard, device: torch.device) -> Push | str:
    """Returns the sums of this rank, or why the ranks cannot have them; the same on all ranks, each of which calls this."""
    with torch.cuda.device(device):
        _enter_device()
        memory = map_memory(CudaDriver(), store, shard, inbox_bytes(shard.size))
    return memory if isinstance(memory, str) else Push(memory, shard.rank, device)


def _enter_device() -> None:
    """Makes the context of the current device that of this thread, which calls of the driver take."""
    torch.cuda.current_stream().synchronize()
