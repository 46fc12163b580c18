"""The worker's loop between the scheduler's channel and an engine: receive, step, report."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

from hiserve.config.settings import Settings
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.core.step_faults import fault_of
from hiserve.engine.loop import Engine
from hiserve.errors import EngineError, HiserveError
from hiserve.ipc.channel import Link, PeerGoneError, PollingChannel
from hiserve.ipc.child import connect_to_parent, log_to_stderr
from hiserve.ipc.codec import Frames, MalformedError, MessageDecoder, Received, encode
from hiserve.ipc.lifecycle import CrashSnapshot
from hiserve.ipc.messages import (
    Abort,
    Admit,
    CacheFlushed,
    CacheInspected,
    Configure,
    EngineWatched,
    Flush,
    Inspect,
    Ready,
    StepReport,
    Stop,
    ToWorker,
    Watch,
    WorkerFailed,
    WorkerStats,
)
from hiserve.ipc.updates import MergedUpdates, RequestUpdates

logger = logging.getLogger(__name__)

EXIT_FAILED = 1  # while it started, or because the scheduler is gone
EXIT_STEP = 70  # a step failed
EXIT_DEVICE = 71  # a step failed, and the device with it: nothing may be computed there any more
LINGER_MS = 500
MAX_REPORT_S = 4.0  # a full pipe or a broken device may delay the end of this process
HEARTBEAT_S = 1.0  # reports are sent this often at least, unless a step takes longer
IDLE_S = 1.0  # an idle worker checks this often on its threads: host memory made ready, a store emptied

# Parts of the messages of torch, its libraries and Triton when a device or a kernel has failed.
_DEVICE_ERRORS = (
    "CUDA error",
    "CUDA driver error",
    "Triton Error [CUDA]",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "device-side",
)


class ReportSender:
    """Sends reports while the scheduler takes them, and merges them while it does not; never blocks."""

    def __init__(self, channel: PollingChannel, incarnation: int) -> None:
        self._channel = channel
        self._incarnation = incarnation
        self._answers: deque[Frames] = deque()
        self._late = MergedUpdates()
        self._late_stats: WorkerStats | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a message waits for the scheduler."""
        return bool(self._answers) or self._late_stats is not None

    def answer(self, message: Ready | CacheFlushed | CacheInspected | EngineWatched) -> None:
        """Sends a message, which is never merged with others."""
        self._answers.append(encode(message))
        self.flush()

    def report(self, updates: RequestUpdates, stats: WorkerStats) -> None:
        """Sends a report, or merges it with those that wait."""
        if not self.is_pending and self._channel.is_writable:
            self._send(updates, stats)
            return
        self._late.merge(updates)
        self._late_stats = stats

    def flush(self) -> None:
        """Sends waiting messages while the scheduler takes them."""
        while self._answers and self._channel.try_send(self._answers[0]):
            self._answers.popleft()
        if self._late_stats is not None and not self._answers and self._channel.is_writable:
            self._send(self._late.take(), self._late_stats)
            self._late_stats = None

    def _send(self, updates: RequestUpdates, stats: WorkerStats) -> None:
        # It was writable a moment ago; if it is not now, the scheduler is gone, and the next receive raises.
        self._channel.try_send(encode(StepReport(self._incarnation, updates, stats)))


class WorkerService:
    """Serves one scheduler with one engine."""

    def __init__(self, engine: Engine, channel: PollingChannel, incarnation: int) -> None:
        self._engine = engine
        self._channel = channel
        self._incarnation = incarnation
        self._sender = ReportSender(channel, incarnation)
        self._decoder = MessageDecoder[ToWorker](ToWorker)
        self._stop_at_s = math.inf
        self._reported: WorkerStats | None = None
        self._reported_s = 0.0

    def run(self) -> None:
        """Serves until the scheduler sends ``Stop``.

        Raises:
            PeerGoneError: The scheduler is gone.
            MalformedError: A message is malformed.
        """
        facts = self._engine.facts
        ready = Ready(
            incarnation=self._incarnation,
            pid=os.getpid(),
            max_running=facts.max_running,
            max_len=facts.max_len,
            num_pages=facts.num_pages,
            page_size=facts.page_size,
            namespace=facts.namespace,
            startup_s=facts.startup_s,
            measurements=facts.measurements,
        )
        self._sender.answer(ready)
        self._send_report(None)
        while not self._is_over():
            self._turn()

    def _is_over(self) -> bool:
        """Whether the scheduler sent ``Stop``, and no page is left to copy, or no time for it."""
        if self._stop_at_s == math.inf or (self._engine.is_copying and time.monotonic() < self._stop_at_s):
            return False
        if self._engine.has_unsaved_pages:
            logger.warning("pages on their way to the host or the store are lost: there is no time or no room for them")
        return True

    def _turn(self) -> None:
        """Handles the received messages, does one step, and reports it."""
        is_idle = not self._engine.has_work
        is_pending = self._sender.is_pending
        for frames in self._channel.receive(is_idle=is_idle, until_writable=is_pending, timeout_s=IDLE_S):
            self._handle(self._decoder.decode(frames))
        self._send_report(self._engine.step())
        self._sender.flush()

    def _send_report(self, updates: RequestUpdates | None) -> None:
        """Reports a step. A step without updates reports its stats, if no step follows or the last report is old.

        Without reports the scheduler may assume a long step, or a process that hangs.
        """
        is_due = time.monotonic() - self._reported_s >= HEARTBEAT_S
        if updates is None and self._engine.has_work and not is_due:
            return
        stats = self._engine.stats()
        if updates is not None or stats != self._reported or is_due:
            self._sender.report(updates or RequestUpdates(), stats)
            self._reported, self._reported_s = stats, time.monotonic()

    def _handle(self, received: Received[ToWorker]) -> None:
        match received.message:
            case Admit() as admit:
                self._engine.add(admit, received.tokens)
            case Abort(uids):
                self._engine.abort(uids)
            case Flush(ticket, tiers):
                pages = self._engine.flush(tiers)
                self._sender.answer(CacheFlushed(incarnation=self._incarnation, ticket=ticket, pages=pages))
            case Inspect(ticket, depth):
                nodes = self._engine.inspect(depth)
                self._sender.answer(CacheInspected(incarnation=self._incarnation, ticket=ticket, nodes=nodes))
            case Watch(ticket, subject, since_s):
                until_s, rows, steps = self._engine.watch(subject, since_s)
                self._sender.answer(EngineWatched(self._incarnation, ticket, until_s, rows, steps))
            case Stop(copy_s):
                self._stop_at_s = time.monotonic() + copy_s
            case Configure() as configure:
                raise MalformedError(f"a second Configure, for incarnation {configure.incarnation}")


def serve(endpoint: str, build: Callable[[Settings, int, int, StartupMeasurements], Engine]) -> int:
    """Connects to the scheduler, builds the engine and serves; returns the exit code.

    After a fatal error the process ends here and at once: a destructor could wait for a broken device without end.

    Args:
        endpoint: Where the scheduler listens.
        build: Makes the engine from settings, the descriptor of the host segment (-1 without one), the replica and
            the measurements of the worker before it.
    """
    link, frames = connect_to_parent(endpoint, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)  # from a supervisor, if this process hangs
    configure = MessageDecoder[Configure](Configure).decode(frames).message
    log_to_stderr(configure.settings)
    try:
        engine = build(configure.settings, configure.host_fd, configure.replica, configure.measurements)
    except Exception as error:  # noqa: BLE001 - the scheduler gets a report, and the process ends
        exit_with_error(link, configure.incarnation, error)
    try:
        WorkerService(engine, PollingChannel(link), configure.incarnation).run()
    except PeerGoneError:
        logger.warning("the scheduler is gone; worker %d ends", configure.replica)
        os._exit(EXIT_FAILED)
    except Exception as error:  # noqa: BLE001 - likewise
        snapshot = _crash_snapshot_of(engine, configure.replica)
        exit_with_error(link, configure.incarnation, error, exit_code=exit_code_of(error), snapshot=snapshot)
    engine.close()
    link.close()
    return 0


def _crash_snapshot_of(engine: Engine, replica: int) -> CrashSnapshot | None:
    """Returns the steps and copies in flight of a failed engine, if it still can."""
    try:
        return engine.crash_snapshot()
    except Exception:
        logger.exception("worker %d cannot report its steps in flight", replica)
        return None


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
    """Reports the exception being handled, and ends the process; no destructor runs."""
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
    """Yields an error and those that it came from."""
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
