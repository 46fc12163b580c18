"""Which errors are taken for memory that ran out: those that allocators really raise, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.core.step_faults import OUT_OF_MEMORY, OUT_OF_RESOURCES, fault_of, first_line
from hiserve.errors import EngineError, InvariantError, ResourceError

TOO_MUCH = 1 << 55  # bytes; no machine has so many


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As Triton raises it."""


def test_an_allocation_of_torch_that_fails_is_memory_that_ran_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert fault_of(caught.value) == OUT_OF_MEMORY
    assert "\n" not in first_line(caught.value)


def test_an_allocation_of_numpy_that_fails_is_memory_that_ran_out() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(TOO_MUCH, dtype=np.uint8)
    assert fault_of(caught.value) == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OUT_OF_MEMORY),
        (
            RuntimeError(
                "Error in function 'aligned_alloc' at allocator.h:49: Buffer overflow when allocating memory for "
                "batch_prefill_tmp_v with size 9 and alignment 16 in AlignedAllocator"
            ),
            OUT_OF_MEMORY,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OUT_OF_MEMORY),
        (RuntimeError("could not create a primitive"), OUT_OF_MEMORY),
        (RuntimeError("could not execute a primitive"), OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: too many resources requested for launch"), OUT_OF_RESOURCES),
        (OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448."), OUT_OF_RESOURCES),
    ],
)
def test_what_drivers_and_libraries_say_of_it(error: Exception, kind: str) -> None:
    assert fault_of(error) == kind


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("copies of 3 pages are out of order"),
        AssertionError("out of memory"),
        InvariantError("out of memory"),
        EngineError("out of memory"),
        ResourceError("out of memory"),
        ValueError("bad_alloc"),
    ],
)
def test_nothing_else_is_contained(error: Exception) -> None:
    assert fault_of(error) == ""


def test_an_error_without_words_has_the_name_of_its_type() -> None:
    assert first_line(MemoryError()) == "MemoryError"
