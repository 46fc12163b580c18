"""A real worker whose device reads and writes where nothing is: ``tests.gpu.wild_worker LOW:HIGH ENDPOINT``.

A kernel of Triton's, launched before a step between these on the stream of the steps, is off by terabytes. The first worker
of a server does that; those after it are sound.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hiserve.engine.service import serve
from hiserve.engine.worker import build
from tests.faults.worker import is_sound

FAR = 1 << 41  # elements of four bytes


@triton.jit
def copy_kernel(data, offset, num: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Copies the first ``num`` elements of ``data`` to those that lie ``offset`` elements behind, and back."""
    near = tl.arange(0, num)
    far = near.to(tl.int64) + offset
    tl.store(data + far, tl.load(data + near))
    tl.store(data + near, tl.load(data + far))


class Wild:
    """An engine before one of whose steps the kernel runs.

    Args:
        engine: A real one.
        step: Counted from 1.
    """

    def __init__(self, engine: Any, step: int) -> None:
        self._engine = engine
        self._left = step
        self._stream = engine._executor._stream
        self._data = torch.arange(256, dtype=torch.int32, device="cuda")
        self._launch(128)  # compiled, and right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._left -= 1
        if not self._left:
            self._launch(FAR)
        return self._engine.step()

    def _launch(self, offset: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy_kernel[(1,)](self._data, offset, 128)


def main(steps: str, endpoint: str) -> int:
    if is_sound({"lives": "1"}):
        return serve(endpoint, build)
    step = int(np.random.default_rng(int.from_bytes(os.urandom(4))).integers(*map(int, steps.split(":"))))
    print(f"worker {os.getpid()}: its device goes wild before step {step}", file=sys.stderr, flush=True)
    return serve(endpoint, lambda *settings: Wild(build(*settings), step))  # type: ignore[arg-type,return-value]
