"""One of two processes that write into each other's memory on one GPU, without NCCL, which refuses that: what ``test_push_alone.py`` starts.

Usage: ``python -m tests.gpu.push_peer RANK RENDEZVOUS``. The first one then waits for a word of the second, which has ended.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from hiserve.distributed.push import Push, open_push
from hiserve.distributed.shard import Shard

ROWS = (1, 128, 3, 128, 1, 1, 8)
ABORT_S = 5.0


def main(rank: int, rendezvous: str) -> None:
    """Exits with 0 if all sums are right."""
    store, device = dist.FileStore(rendezvous, 2), torch.device("cuda", 0)  # type: ignore[attr-defined]
    push = open_push(store, Shard(rank, 2), device)
    assert isinstance(push, Push), push
    torch.manual_seed(1)
    for rows in ROWS:
        parts = torch.randn((2, rows, 4096), device=device).bfloat16()
        x = parts[rank].clone()
        push.sum(x)
        assert torch.equal(x, (parts[0].float() + parts[1].float()).bfloat16()), rows
    if rank == 0:
        time.sleep(1.0)  # the other one is gone
        push.sum(x)
        time.sleep(0.2)
        stream = torch.cuda.current_stream()
        assert not stream.query(), "a sum of one rank alone has ended"
        begin = time.perf_counter()
        push.abort()
        while not stream.query():
            assert time.perf_counter() < begin + ABORT_S, "it waits after the end"
            time.sleep(0.001)
        push.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
