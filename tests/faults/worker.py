"""A real worker in which something breaks: ``tests.faults.worker NAME=VALUE,... ENDPOINT``.

``fatal=LOW:HIGH``: a step between these raises what a dead device raises; ``hang=LOW:HIGH``: it never ends;
``starved=LOW:HIGH``: from it on the kernel refuses more memory. ``poison=TOKEN``: a request that begins with it is too much.
``lying=SHARE``, ``failing=SHARE``, ``stall_s=SECONDS``: of what the disk of a store does. ``lives=N``: only the first N
workers break; those after them are sound.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiserve.cache.storage import file_store
from hiserve.config.settings import Settings
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.engine.loop import Engine
from hiserve.engine.service import serve
from hiserve.engine.worker import build as build_worker
from tests.faults.starved import MIB, Starved

SPARE = 8 * MIB


class Disk:
    """What ``os`` does for a store, on a disk that fails, garbles what is read, or takes its time.

    Only files of pages are slow or fail: a start opens the marker alone, and so neither waits nor fails by chance.
    """

    def __init__(self, wanted: dict[str, float], rng: np.random.Generator) -> None:
        self._wanted = wanted
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _strikes(self, how: str) -> bool:
        return bool(self._rng.random() < self._wanted.get(how, 0))

    def open(self, path: Any, flags: int, *arguments: Any) -> int:
        if os.path.basename(path) == file_store.MARKER:
            return os.open(path, flags, *arguments)
        time.sleep(self._wanted.get("stall_s", 0))
        is_read = flags & os.O_ACCMODE == os.O_RDONLY  # a write that fails would be the last for long
        if is_read and self._strikes("failing"):
            raise OSError(errno.EIO, "the disk is on fire")
        return os.open(path, flags, *arguments)

    def readv(self, fd: int, buffers: Sequence[Any]) -> int:
        num_read = os.readv(fd, buffers)
        if self._strikes("lying"):
            memoryview(buffers[-1])[:8] = b"garbage!"
        return num_read


class Breaking:
    """An engine of which one step is its last."""

    def __init__(self, engine: Engine, last_step: int, how: str) -> None:
        self._engine = engine
        self._left = last_step
        self._how = how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._left -= 1
        if not self._left and self._how == "hang":
            time.sleep(3600)
        if not self._left:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._engine.step()


class Poisoned:
    """An engine that dies in the step after it got a request of a kind."""

    def __init__(self, engine: Any, poison: int) -> None:
        self._engine = engine
        self._poison = poison
        self._has_it = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, admit: Any, tokens: Any) -> None:
        self._has_it = self._has_it or tokens[0] == self._poison
        self._engine.add(admit, tokens)

    def step(self) -> Any:
        if self._has_it:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self._engine.step()


def main(faults: str, endpoint: str) -> int:
    given = dict(pair.split("=") for pair in faults.split(","))
    wanted = {} if is_sound(given) else given
    seed = int.from_bytes(os.urandom(4))
    print(f"worker {os.getpid()}: seed {seed}, {wanted}", file=sys.stderr, flush=True)
    rng = np.random.default_rng(seed)
    broken = {name: float(wanted[name]) for name in ("lying", "failing", "stall_s") if name in wanted}

    if broken:
        file_store.os = Disk(broken, rng)  # type: ignore[assignment]

    def build_broken(config: Settings, host_fd: int, replica: int, measurements: StartupMeasurements) -> Any:
        engine = build_worker(config, host_fd, replica, measurements)
        broken_engine: Any = engine
        for how in sorted(wanted.keys() & {"fatal", "hang", "starved"}):
            low, high = map(int, wanted[how].split(":"))
            step = int(rng.integers(low, high + 1))
            starved = how == "starved"
            broken_engine = Starved(broken_engine, step, SPARE) if starved else Breaking(broken_engine, step, how)
        return Poisoned(broken_engine, int(wanted["poison"])) if "poison" in wanted else broken_engine

    return serve(endpoint, build_broken)


def is_sound(wanted: dict[str, str]) -> bool:
    """Counts the lives in a file beside what is temporary, which the server of a test has of its own."""
    if "lives" not in wanted:
        return False
    path = Path(os.environ["TMPDIR"]) / "lives"
    num_lives = len(path.read_bytes()) if path.exists() else 0
    path.write_bytes(b"." * (num_lives + 1))
    return num_lives >= int(wanted["lives"])
