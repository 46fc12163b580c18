"""The end of a worker that cannot go on: a report to the scheduler, and an exit code, before anything else can hang."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from hiserve.core.step_faults import fault_of
from hiserve.errors import EngineError, HiserveError
from hiserve.ipc.channel import Link
from hiserve.ipc.codec import encode
from hiserve.ipc.lifecycle import CrashSnapshot
from hiserve.ipc.messages import WorkerFailed

EXIT_FAILED = 1  # while it started, or because the scheduler is gone
EXIT_STEP = 70  # a step failed
EXIT_DEVICE = 71  # a step failed, and the device with it: nothing may be computed there any more
LAST_WORDS_MS = 500
MAX_FAREWELL_S = 4.0  # a full pipe or a broken device may hold this process up

logger = logging.getLogger(__name__)

# What torch, its libraries and Triton say of a device or a kernel that failed.
_SAYINGS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_", "device-side")


def exit_code_of(error: BaseException) -> int:
    """Returns ``EXIT_DEVICE`` for an error that stays with the device, ``EXIT_STEP`` for any other.

    Memory that ran out leaves a device as it was.
    """
    return EXIT_DEVICE if any(map(_is_of_device, _chain(error))) else EXIT_STEP


def exit_with_error(
    link: Link,
    incarnation: int,
    error: Exception,
    *,
    exit_code: int = EXIT_FAILED,
    snapshot: CrashSnapshot | None = None,
) -> NoReturn:
    """Reports the exception being handled, and ends the process; no destructor runs.

    Args:
        link: To the scheduler.
        incarnation: Of this worker.
        error: The exception.
        exit_code: Of the process.
        snapshot: What the engine was at.
    """
    fault_s = time.monotonic()
    deadline = threading.Timer(MAX_FAREWELL_S, os._exit, (exit_code,))
    deadline.daemon = True
    deadline.start()
    trace = traceback.format_exc()
    message, code = f"{type(error).__name__}: {error}", EngineError.code
    if isinstance(error, HiserveError):
        message, code = error.message, error.code
    link.try_send(encode(WorkerFailed(incarnation, message, code, trace, fault_s, snapshot)))
    if not isinstance(error, HiserveError):
        logger.error("incarnation %d ends with exit code %d\n%s", incarnation, exit_code, trace)
    link.close(linger_ms=LAST_WORDS_MS)
    os._exit(exit_code)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Walks an error and those it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_device(error: BaseException) -> bool:
    message = str(error)
    if isinstance(error, Exception) and fault_of(error):
        return False
    return type(error).__name__ == "AcceleratorError" or any(saying in message for saying in _SAYINGS)
