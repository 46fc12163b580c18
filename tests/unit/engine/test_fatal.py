"""The exit code tells whether a device is lost; a snapshot tells what an engine was at, whatever state it is in."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
import torch

from hiserve.core.request import SamplingParams
from hiserve.engine.service import EXIT_DEVICE, EXIT_STEP, exit_code_of
from hiserve.errors import EngineError
from hiserve.ipc.messages import Admit
from tests.helpers.engines import echo_engine


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("an illegal memory access was encountered"), EXIT_DEVICE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), EXIT_DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), EXIT_DEVICE),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), EXIT_DEVICE),
        (RuntimeError("CUDA error: device-side assert triggered"), EXIT_DEVICE),
        (RuntimeError("CUDA error: out of memory"), EXIT_STEP),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), EXIT_STEP),
        (RuntimeError("the size of tensor a must match"), EXIT_STEP),
        (AssertionError("row 3 is free"), EXIT_STEP),
    ],
)
def test_an_exit_code_tells_whether_the_device_is_lost(error: Exception, expected: int) -> None:
    assert exit_code_of(error) == expected


def test_the_error_that_another_came_from_counts_too() -> None:
    caught: list[Exception] = []
    try:
        try:
            raise RuntimeError("CUDA error: unspecified launch failure")
        except RuntimeError as first:
            raise EngineError("the step failed") from first
    except EngineError as second:
        caught.append(second)
    assert exit_code_of(caught[0]) == EXIT_DEVICE


@pytest.mark.parametrize("depth", [0, 1])
def test_the_snapshot_names_the_steps_in_flight_and_their_requests(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, executor, _ = echo_engine(num_pages=40, depth=depth)
    for uid in (4, 9):
        prompt = np.arange(10 * uid, 10 * uid + 5, dtype=np.int32)
        engine.add(Admit(uid, 5, SamplingParams(seed=1, max_tokens=9), b"", 0), prompt)
    for _ in range(1 + depth):
        engine.step()

    def fail(plan: object) -> NoReturn:
        raise RuntimeError("CUDA error: gone")

    monkeypatch.setattr(executor, "submit", fail)
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    snapshot = engine.crash_snapshot()
    assert [step.uids for step in snapshot.steps] == [[4, 9]] * (1 + depth)
    assert [step.num_tokens for step in snapshot.steps] == [2] * (1 + depth)
    assert [step.step for step in snapshot.steps] == list(range(2, 3 + depth))
