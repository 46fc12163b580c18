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
LINGER_MS = 500
MAX_REPORT_S = 4.0  # a full pipe or a broken device may delay the end of this process

logger = logging.getLogger(__name__)

# Parts of the messages of torch, its libraries and Triton when a device or a kernel has failed.
_DEVICE_ERRORS = (
    "CUDA error",
    "CUDA driver error",
    "Triton Error [CUDA]",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "device-side",
)


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
        snapshot: The steps and copies in flight.
    """
    fault_s = time.monotonic()
    deadline = threading.Timer(MAX_REPORT_S, os._exit, (exit_code,))
    deadline.daemon = True
    deadline.start()
    trace = traceback.format_exc()
    message, code = f"{type(error).__name__}: {error}", EngineError.code
    if isinstance(error, HiserveError):
        message, code = error.message, error.code
    link.try_send(encode(WorkerFailed(incarnation, message, code, trace, fault_s, snapshot)))
    if not isinstance(error, HiserveError):
        logger.error("incarnation %d ends with exit code %d\n%s", incarnation, exit_code, trace)
    link.close(linger_ms=LINGER_MS)
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
    return type(error).__name__ == "AcceleratorError" or any(part in message for part in _DEVICE_ERRORS)
