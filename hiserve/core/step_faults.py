"""Classifies errors: exhausted memory or kernel resources fail a step, other errors the process."""

from __future__ import annotations

from collections.abc import Callable

OUT_OF_MEMORY = "out_of_memory"
OUT_OF_RESOURCES = "out_of_resources"  # of a multiprocessor, for a kernel of this shape

# In messages of torch on CUDA and CPU, CUDA and its libraries, FlashInfer's workspace, oneDNN and C++; of a kernel, of CUDA and
# Triton.
_MESSAGES = {
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
_TRITON_ERROR = "OutOfResources"  # by name: triton may be absent


def fault_of(error: Exception) -> str:
    """Returns ``OUT_OF_MEMORY`` or ``OUT_OF_RESOURCES``; empty for any other error.

    Errors that CUDA reports of a kernel that ran are others: they persist in the context.
    """
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if not (isinstance(error, RuntimeError) or type(error).__name__ == _TRITON_ERROR):
        return ""
    message = str(error)
    return next((kind for text, kind in _MESSAGES.items() if text in message), "")


def attempt(work: Callable[[], str]) -> str:
    """Returns the result of ``work``, or its ``fault_of`` if it failed so; other errors are raised."""
    try:
        return work()
    except Exception as error:
        kind = fault_of(error)
        if not kind:
            raise
        return kind


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without the traces that torch adds."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
