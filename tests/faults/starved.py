"""A real worker that may take no more memory from some step on: ``tests.faults.starved STEP MIB ENDPOINT``.

From that step on its address space may grow by so many MiB, and no further: what asks for more is refused by the kernel.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from hiserve.engine.service import serve
from hiserve.engine.worker import build

KIB, MIB = 1 << 10, 1 << 20


def address_space_bytes() -> int:
    """What this process has mapped now."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:"))
    return int(line.split()[1]) * KIB


class Starved:
    """An engine whose process is held to what it has, and a little, before one of its steps.

    Args:
        engine: A real one.
        step: Counted from 1.
        spare_bytes: The little.
    """

    def __init__(self, engine: Any, step: int, spare_bytes: int) -> None:
        self._engine = engine
        self._left = step
        self._spare_bytes = spare_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._left -= 1
        if not self._left:
            most = address_space_bytes() + self._spare_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        return self._engine.step()


def main(step: str, spare_mib: str, endpoint: str) -> int:
    return serve(endpoint, lambda *settings: Starved(build(*settings), int(step), int(spare_mib) * MIB))  # type: ignore[arg-type,return-value]
