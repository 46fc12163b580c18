"""The ranks of a group in threads of the test's process, over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hiserve.distributed.collectives import Collectives
from hiserve.distributed.shard import Shard

T = TypeVar("T")
CPU = torch.device("cpu")


def together(folder: Path, size: int, work: Callable[[Collectives], T]) -> list[T]:
    """Does the same on each rank; returns what each has."""
    done: dict[int, T] = {}

    def run(rank: int) -> None:
        exchange = Collectives(Shard(rank, size), CPU, folder / "rendezvous")
        done[rank] = work(exchange)
        exchange.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [done[rank] for rank in range(size)]
