"""A real worker in which something breaks: ``python -m tests.faults.worker NAME=VALUE,... ENDPOINT``.

``fatal=LOW:HIGH``: a step between these raises what a dead device raises. ``lying=SHARE``, ``failing=SHARE``,
``stall_s=SECONDS``: of the store's calls. ``lives=N``: only the first N workers break; those after them are sound.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiserve.cache.pools import stores
from hiserve.config import Cache, Config
from hiserve.worker import build
from hiserve.worker.loop import Engine
from hiserve.worker.process import build as build_worker
from hiserve.worker.service import serve


class BrokenStore:
    """A store of which some calls fail, lie or take their time."""

    def __init__(self, store: Any, wanted: dict[str, float], rng: np.random.Generator) -> None:
        self._store = store
        self._wanted = wanted
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _breaks(self, how: str) -> bool:
        return bool(self._rng.random() < self._wanted.get(how, 0))

    def exists(self, keys: Sequence[bytes]) -> int:
        time.sleep(self._wanted.get("stall_s", 0))
        return len(keys) if self._breaks("lying") else self._store.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        time.sleep(self._wanted.get("stall_s", 0))
        if self._breaks("failing"):
            raise OSError("the disk is on fire")
        num_read = self._store.get(keys, buffers)
        if self._breaks("lying"):
            for buffer in buffers:
                buffer[:8] = b"garbage!"
            return len(keys)
        return int(num_read)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        time.sleep(self._wanted.get("stall_s", 0))
        if self._breaks("failing"):
            raise OSError("the disk is on fire")
        return len(keys) if self._breaks("lying") else int(self._store.put(keys, buffers))


class Breaking:
    """An engine of which one step is its last."""

    def __init__(self, engine: Engine, last_step: int) -> None:
        self._engine = engine
        self._left = last_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._left -= 1
        if not self._left:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._engine.step()


def main(wanted: dict[str, str], endpoint: str) -> int:
    seed = int.from_bytes(os.urandom(4))
    print(f"worker {os.getpid()}: seed {seed}, {wanted}", file=sys.stderr, flush=True)
    rng = np.random.default_rng(seed)
    broken = {name: float(wanted[name]) for name in ("lying", "failing", "stall_s") if name in wanted}

    def open_store(cache: Cache) -> Any:
        store = stores.open_store(cache)
        return store if store is None or not broken else BrokenStore(store, broken, rng)

    def build_broken(config: Config, host_fd: int, replica: int) -> Any:
        engine = build_worker(config, host_fd, replica)
        if "fatal" not in wanted:
            return engine
        low, high = map(int, wanted["fatal"].split(":"))
        return Breaking(engine, int(rng.integers(low, high + 1)))

    build.open_store = open_store  # type: ignore[attr-defined]
    return serve(endpoint, build_broken)


def is_sound(wanted: dict[str, str]) -> bool:
    """Counts the lives in a file beside what is temporary, which the server of a test has of its own."""
    if "lives" not in wanted:
        return False
    path = Path(os.environ["TMPDIR"]) / "lives"
    num_lives = len(path.read_bytes()) if path.exists() else 0
    path.write_bytes(b"." * (num_lives + 1))
    return num_lives >= int(wanted["lives"])


if __name__ == "__main__":
    given = dict(pair.split("=") for pair in sys.argv[1].split(","))
    sys.exit(main({} if is_sound(given) else given, sys.argv[2]))
