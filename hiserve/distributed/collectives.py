"""Exchanges by torch's collectives: gloo between CPUs, NCCL between GPUs; sums of few rows also by writes into each other's memory.

The rendezvous is a file, so that the group opens no port but those of the library, on loopback; nothing is pickled.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.devices import prepare_nccl
from hiserve.distributed.exchange import Exchanged
from hiserve.distributed.shard import Shard
from hiserve.kernels.ops import Ops, ops_for

if TYPE_CHECKING:
    from hiserve.distributed.push import Push

JOIN_S = 600.0  # an exchange waits so long at most; ranks load weights between two
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class Collectives:
    """The exchanges of one rank; see ``Exchange``.

    Args:
        shard: This rank's.
        device: Of all tensors.
        rendezvous: A file that all ranks name, in a folder that no other user can enter; it need not exist.
        may_push: Few rows are summed by ``distributed/push.py`` where the GPUs of all ranks map each other's memory.
    """

    def __init__(self, shard: Shard, device: torch.device, rendezvous: Path, *, may_push: bool = False) -> None:
        self.shard = shard
        self._device = device
        self._ops: Ops = ops_for(device)
        store = dist.FileStore(str(rendezvous), shard.size)  # type: ignore[attr-defined]
        self._group: Any = _open(shard, device, store)
        self._push: Push | None = None
        self._is_paused = False
        self._left: deque[Exchanged] | None = None  # what is expected, if it is known
        self._recorded: list[Exchanged] | None = None  # while a graph is captured
        # On the current stream, so that a graph can hold them.
        self._reduce = dist.AllreduceOptions()
        self._gather = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        self._reduce.asyncOp = self._gather.asyncOp = False
        self.sum(torch.zeros(1, device=device))  # NCCL connects with the first exchange, which no graph can hold
        if may_push and device.type == "cuda" and shard.size > 1:
            self._push = _open_push(shard, device, store)

    def reduce_add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._push is not None and not self._is_paused and delta.numel() and self._push.takes(delta):
            out = torch.empty_like(residual)  # no memory may run out from here on
            self._note(_sum_of(delta))
            self._push.add_norm(delta, residual, weight, eps, out)
            return out
        return self._ops.add_rms_norm(self.sum(delta), residual, weight, eps)

    def sum(self, x: Tensor) -> Tensor:
        if x.numel() and not self._is_paused:
            self._note(_sum_of(x))
            if self._push is not None and self._push.takes(x):
                self._push.sum(x)
            else:
                self._all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if self._is_paused or not x.numel():
            return x.expand(self.shard.size, -1, -1).contiguous()
        x, parts = x.contiguous(), x.new_empty((self.shard.size * x.shape[0], x.shape[1]))
        self._note(Exchanged("gather", x.shape[0], x.shape[1], x.dtype))  # no memory may run out from here on
        self._all_gather(parts, x)
        return parts.view(self.shard.size, *x.shape)

    def gather_columns(self, x: Tensor, size: int) -> Tensor:
        share = self.shard.token_share(size)
        if x.shape[1] < share:
            x = F.pad(x, (0, share - x.shape[1]), value=-torch.inf)
        return self.gather(x).transpose(0, 1).reshape(x.shape[0], self.shard.size * share)[:, :size]

    def expect(self, exchanges: Sequence[Exchanged] | None) -> None:
        assert not self._left, f"{len(self._left)} exchanges were not issued, first {self._left[0]}"
        self._left = None if exchanges is None else deque(each for each in exchanges if each.rows)

    def finish(self) -> None:
        while self._left:
            kind, rows, columns, dtype = self._left[0]
            zeros = torch.zeros((rows, columns), dtype=dtype, device=self._device)
            if kind == "sum":
                self.sum(zeros)
            else:
                self.gather(zeros)

    def begin_graph(self) -> None:
        self._recorded = []

    def end_graph(self) -> tuple[Exchanged, ...]:
        recorded, self._recorded = self._recorded, None
        return tuple(recorded or ())

    def replayed(self, exchanges: Sequence[Exchanged]) -> None:
        for exchanged in exchanges:
            self._note(exchanged)

    def _note(self, exchanged: Exchanged) -> None:
        """Checks that an exchange is the one that all ranks expect."""
        if self._recorded is not None:
            self._recorded.append(exchanged)
        elif self._left is not None:
            assert self._left and self._left[0] == exchanged, (
                f"{exchanged} in place of {next(iter(self._left), 'none')}"
            )
            self._left.popleft()

    def _all_reduce(self, x: Tensor) -> None:
        _finish(self._group.allreduce([x], self._reduce))

    def _all_gather(self, parts: Tensor, x: Tensor) -> None:
        _finish(self._group._allgather_base(parts, x, self._gather))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def abort(self) -> None:
        # Connections of gloo end with the process at their other end; kernels wait for it.
        push, group = self._push, self._group  # another thread may close them meanwhile
        if push is not None:
            push.abort()
        if self._device.type == "cuda" and group is not None:
            group.abort()

    def close(self) -> None:
        self._group = None
        if self._push is not None:
            self._push.close()
            self._push = None


def _sum_of(x: Tensor) -> Exchanged:
    return Exchanged("sum", x.shape[0], x.shape[-1], x.dtype)


def _finish(work: Any) -> None:
    """Waits for a collective of gloo; one that NCCL has put on the current stream is None."""
    if work is not None:
        work.wait()


def _open(shard: Shard, device: torch.device, store: Any) -> Any:
    timeout = timedelta(seconds=JOIN_S)
    if device.type == "cuda":
        prepare_nccl()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _open_push(shard: Shard, device: torch.device, store: Any) -> Push | None:
    # By name: triton is not installed everywhere.
    push: Push | str = importlib.import_module("hiserve.distributed.push").open_push(store, shard, device)
    if isinstance(push, str):
        logger.info("NCCL sums few rows too, as devices do not map each other's memory: %s", push)
        return None
    return push
