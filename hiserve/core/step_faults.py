"""Tells errors that cost a step from those that cost the process: memory that ran out leaves a device as it was."""

from __future__ import annotations

from collections.abc import Callable

OUT_OF_MEMORY = "out_of_memory"
OUT_OF_RESOURCES = "out_of_resources"  # of a multiprocessor, for a kernel of this shape

# What allocators say, of torch on CUDA and CPU, of CUDA and its libraries, FlashInfer's workspace, oneDNN and C++; and CUDA
# and Triton of a kernel.
_SAYINGS = {
    "out of memory": OUT_OF_MEMORY,
    "can't allocate memory": OUT_OF_MEMORY,
    "_STATUS_ALLOC_FAILED": OUT_OF_MEMORY,
    "in AlignedAllocator": OUT_OF_MEMORY,
    "could not create a": OUT_OF_MEMORY,  # memory object, or primitive
    "could not execute a primitive": OUT_OF_MEMORY,
    "bad_alloc": OUT_OF_MEMORY,
    "too many resources requested for launch": OUT_OF_RESOURCES,
    "out of resource": OUT_OF_RESOURCES,
}
_TRITON_ERROR = "OutOfResources"  # of no class that others have, too


def fault_of(error: Exception) -> str:
    """Returns what ran out, ``OUT_OF_MEMORY`` or ``OUT_OF_RESOURCES``; empty if that is not what happened.

    Nothing that CUDA reports of a kernel that ran is among these: such errors stay with the context.
    """
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if not (isinstance(error, RuntimeError) or type(error).__name__ == _TRITON_ERROR):
        return ""
    message = str(error)
    return next((kind for saying, kind in _SAYINGS.items() if saying in message), "")


def attempt(work: Callable[[], str]) -> str:
    """Works, and returns what the work does; what ran out, if that is why it failed."""
    try:
        return work()
    except Exception as error:
        kind = fault_of(error)
        if not kind:
            raise
        return kind


def first_line(error: Exception) -> str:
    """Returns what an error says, without the pages that torch adds."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
