"""Starts and stops worker processes and their successors, finds workers that died or hang, and owns the host segments."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from hiserve.cache.storage.host_segment import open_segment
from hiserve.cache.storage.segment import Segment
from hiserve.config.settings import Settings
from hiserve.core.devices import environment_of
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.errors import EngineError, HiserveError, ResourceError, to_error
from hiserve.ipc.child import ChildProcess, wait_for_event
from hiserve.ipc.codec import Frames, MalformedError, MessageDecoder, Received, encode
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import Configure, FromWorker, Ready, StepReport, Stop, WorkerFacts, WorkerFailed
from hiserve.scheduler.worker_process import CpuUsage, RecoveryTimes, WorkerProcess, usage_of

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "hiserve.ipc.launcher", "hiserve.engine.worker")
RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0)
# Consecutive workers without output of the requests they had; isolating one culprit of 1,000 requests takes 12.
MAX_USELESS = 16
STOP_GRACE_S = 2.0
EXIT_GRACE_S = 5.0  # for a worker that reported a failure
WATCH_INTERVAL_S = 0.25
MAX_LIMIT_FACTOR = 16  # of the configured limit, after workers that were slow and did not hang
STACK_S = 0.5  # for a hanging worker to write its stack
IDLE_S = 0.5  # after ``Ready`` without requests, a worker gets none of its predecessor's


@dataclass(frozen=True, slots=True)
class _WorkerRun:
    """An ended incarnation of a worker."""

    error: HiserveError
    end: str = "not started"  # exit code or signal
    worker: WorkerProcess | None = None  # the worker; None if no process could be started

    @property
    def was_ready(self) -> bool:
        """Whether it ever took requests."""
        return self.worker is not None and self.worker.ready is not None

    def was_useful(self, uids: list[int]) -> bool:
        """Whether it was ready, and had output or no requests."""
        return self.worker is not None and self.worker.ready is not None and (self.worker.has_output or not uids)


class WorkerEvents(Protocol):
    """Receives what workers do: ``process.SchedulerService``, which imports this file. Called from the event loop."""

    def worker_ready(self, replica: int, ready: Ready) -> None:
        """A worker can take requests."""

    def worker_sent(self, replica: int, received: Received[FromWorker]) -> None:
        """A ready worker sent a report or an answer.

        Raises:
            MalformedError: It contradicts the ledger; the worker is replaced.
        """

    def worker_idle(self) -> None:
        """A batch of messages has been handled."""

    def worker_lost(self, replica: int) -> list[int]:
        """A worker, or a successor that was never ready, has died; returns the requests it held."""

    def worker_reaped(self, crash: Crash) -> None:
        """The report of that death is complete."""

    def worker_abandoned(self, replica: int, error: HiserveError) -> None:
        """A worker died too often to be started again."""


class Supervisor:
    """Keeps one process per replica alive from ``run`` to ``stop``.

    Args:
        settings: Of all workers; part of the first message to every worker.
        command: Command line of a worker, without its endpoint.
        events: Receives every event.
        usage: Returns the CPU usage of a process.

    Attributes:
        started: Done when every replica was ready once; fails with the ``HiserveError`` of the worker that could not
            start, with its trace as a note.
        num_stale: Messages ignored because they were of another incarnation.
        num_malformed: Messages for which a worker was replaced.
        crash: The latest death of a worker.
        recovery_times: Of the recoveries after deaths.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        events: WorkerEvents,
        usage: Callable[[int], CpuUsage | None] = usage_of,
    ) -> None:
        self._settings = settings
        self._command = command
        self._events = events
        self._usage = usage
        self._limit_factors: dict[int, int] = {}  # by replica, of the configured limit
        self._decoder = MessageDecoder[FromWorker](FromWorker)
        self._workers: dict[int, WorkerProcess] = {}
        self._measurements: dict[int, StartupMeasurements] = {}
        self._segments: list[Segment | None] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_stale = 0
        self.num_malformed = 0
        self.crash: Crash | None = None
        self.recovery_times = RecoveryTimes()

    async def run(self) -> None:
        """Returns when every worker has been stopped or abandoned."""
        replicas = range(self._settings.parallel.replicas)
        try:
            self._segments += [open_segment(self._settings, replica) for replica in replicas]
            async with asyncio.TaskGroup() as group:
                for replica in replicas:
                    group.create_task(self._supervise(replica))
        except OSError as error:
            self.started.set_exception(ResourceError(f"the host cache cannot be made: {error}."))
        except HiserveError as error:
            self.started.set_exception(error)
        finally:
            for segment in self._segments:
                if segment is not None:
                    segment.close()
            self._ended.set()

    async def stop(self, copy_s: float = 0.0) -> None:
        """Ends all workers: ready ones within ``STOP_GRACE_S``, the others at once.

        Args:
            copy_s: Further seconds for copies of pages to slower tiers.
        """
        self._stopping.set()
        for worker in self._workers.values():
            if worker.ready is None:
                worker.process.kill()
            else:
                worker.process.send(encode(Stop(copy_s)))
        if not await wait_for_event(self._ended, STOP_GRACE_S + copy_s):
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Ends all workers at once; ``stop`` is under way."""
        for worker in self._workers.values():
            worker.process.kill()

    def send(self, replica: int, frames: Frames) -> None:
        """Sends a message to the living incarnation of a replica, if there is one."""
        if replica in self._workers:
            self._workers[replica].process.send(frames)

    def ready_replicas(self) -> list[int]:
        """Returns the replicas that serve now."""
        return [worker.replica for worker in self._workers.values() if worker.ready is not None]

    def facts(self) -> list[WorkerFacts]:
        """Returns the facts of each living worker, by replica."""
        return [self._workers[replica].facts() for replica in sorted(self._workers)]

    async def _supervise(self, replica: int) -> None:
        num_failed = num_useless = 0
        for number in itertools.count(1):
            run = await self._run_worker(replica, number)
            if self._stopping.is_set():
                return
            if not self.started.done():
                self.started.set_exception(run.error)
                return
            logger.error("worker %d (incarnation %d) is gone: %s", replica, number, run.error, exc_info=run.error)
            uids = self._events.worker_lost(replica)
            self._record(replica, number, run, uids)
            num_failed = 0 if run.was_ready else num_failed + 1
            num_useless = 0 if run.was_useful(uids) else num_useless + 1
            if num_failed == len(RESTART_DELAYS_S) or num_useless == MAX_USELESS:
                self._events.worker_abandoned(replica, run.error)
                return
            await wait_for_event(self._stopping, RESTART_DELAYS_S[min(num_useless, len(RESTART_DELAYS_S) - 1)])

    async def _run_worker(self, replica: int, number: int) -> _WorkerRun:
        """Runs one incarnation until it ends.

        All incarnations of a replica use its host segment. Each is reaped before the next is started, so that no two write
        to it at once.
        """
        segment = self._segments[replica]
        host_fd = -1 if segment is None else segment.fd
        try:
            process = await ChildProcess.start(
                self._command,
                partial(self._receive, replica),
                pass_fds=() if segment is None else (host_fd,),
                environment=environment_of(self._settings, replica),
            )
        except ResourceError as error:  # a later start may succeed, for example after a lack of processes
            return _WorkerRun(ResourceError(f"worker {replica} could not be started: {error.message}"))
        worker = self._workers[replica] = WorkerProcess(replica, number, process)
        watch = asyncio.create_task(self._watch(worker))
        try:
            measurements = self._measurements.get(replica, NO_MEASUREMENTS)
            process.send(encode(Configure(self._settings, replica, number, host_fd, measurements)))
            if self._stopping.is_set():
                process.kill()
            end = await process.wait()
        finally:
            watch.cancel()
            process.kill()
            del self._workers[replica]
            with suppress(asyncio.CancelledError):
                await watch
        when = "" if worker.ready else "while it started "
        worker.mark_failed(EngineError(f"worker {replica} died {when}({end})."), fault_s=worker.last_message_s)
        assert worker.failure is not None, f"worker {replica} ended ({end}) without a reason"
        return _WorkerRun(worker.failure, end, worker)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Ends a worker that hangs. Time in which this process was stopped does not count."""
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = time.monotonic()
            worker.progress.extend_deadline(max(0.0, now_s - before_s - 2 * WATCH_INTERVAL_S))
            before_s = now_s
            worker.progress.sample(
                now_s, self._usage(worker.process.pid) if worker.no_progress_s(now_s) > WATCH_INTERVAL_S else None
            )
            limit_s = self._settings.scheduler.step_timeout_s * self._limit_factors.get(worker.replica, 1)
            if how := worker.stuck(now_s, limit_s):
                is_computing = worker.progress.is_computing
                failure = EngineError(f"worker {worker.replica} {how}: it hangs, and is replaced.")
                worker.mark_failed(failure, fault_s=worker.progress.since_s)
                self._adjust_limit(worker.replica, is_computing=is_computing)
                worker.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(STACK_S)
                worker.process.kill()
                return

    def _adjust_limit(self, replica: int, *, is_computing: bool) -> None:
        """Doubles the next worker's time limit if this one was slow and did not hang."""
        factor = min(MAX_LIMIT_FACTOR, 2 * self._limit_factors.get(replica, 1)) if is_computing else 1
        self._limit_factors[replica] = factor
        if is_computing:
            limit_s = self._settings.scheduler.step_timeout_s
            logger.warning(
                "worker %d was computing: --step-timeout-s %g is short for its steps on this machine; the next one gets %g s",
                replica,
                limit_s,
                factor * limit_s,
            )

    def _record(self, replica: int, number: int, run: _WorkerRun, uids: list[int]) -> None:
        """Records a death, logs it and reports it."""
        worker = run.worker
        self.crash = Crash(
            replica=replica,
            incarnation=number,
            pid=0 if worker is None else worker.process.pid,
            end=run.end,
            error=run.error.message,
            code=run.error.code,
            unix_s=round(time.time(), 3),
            num_steps=0 if worker is None else worker.stats.steps,
            uids=uids,
            snapshot=None if worker is None else worker.snapshot,
        )
        logger.error("crash report: %s", msgspec.json.encode(self.crash).decode())
        self._events.worker_reaped(self.crash)
        if worker is not None:
            self.recovery_times.begin(worker, len(uids))

    def _receive(self, replica: int, batch: list[Frames]) -> None:
        worker = self._workers[replica]
        worker.on_message(time.monotonic())
        for frames in batch:
            if worker.failure is not None:
                return
            try:
                self._on_message(worker, self._decoder.decode(frames))
            except MalformedError as error:
                self.num_malformed += 1
                failure = EngineError(f"worker {replica} sent a malformed message: {error}")
                worker.mark_failed(failure, fault_s=worker.last_message_s)
                worker.process.kill()
        self._events.worker_idle()

    def _on_message(self, worker: WorkerProcess, received: Received[FromWorker]) -> None:
        message = received.message
        if message.incarnation != worker.number:
            self.num_stale += 1
        elif isinstance(message, WorkerFailed):
            failure = to_error(message.code, message.message, message.trace)
            worker.mark_failed(failure, fault_s=message.fault_s, snapshot=message.snapshot)
            # Time to exit by itself: its exit code is part of the report.
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, worker.process.kill)
        elif isinstance(message, Ready):
            self._mark_ready(worker, message)
        elif worker.ready is None:
            raise MalformedError(f"{type(message).__name__} before Ready")
        else:
            self._events.worker_sent(worker.replica, received)
            if isinstance(message, StepReport):
                self._on_stats(worker, message)

    def _on_stats(self, worker: WorkerProcess, report: StepReport) -> None:
        """Records a worker's stats and output, and the end of a recovery."""
        worker.on_stats(report.stats, worker.last_message_s)
        if report.updates.uids:
            worker.has_output = True
            self.recovery_times.first_output(worker)
        elif not report.stats.running + report.stats.waiting and worker.last_message_s - worker.ready_s > IDLE_S:
            self.recovery_times.on_idle(worker.replica)

    def _mark_ready(self, worker: WorkerProcess, ready: Ready) -> None:
        if worker.ready is not None:
            raise MalformedError("Ready twice")
        now_s = time.monotonic()
        total_s = now_s - worker.born_s
        phases = {"start process": round(total_s - sum(ready.startup_s.values()), 3), **ready.startup_s}
        worker.mark_ready(msgspec.structs.replace(ready, startup_s=phases), now_s)
        self._measurements.setdefault(worker.replica, ready.measurements)
        logger.info(
            "worker %d (pid %d, incarnation %d) is ready after %.2f s: %d pages of %d tokens, %d rows",
            worker.replica,
            worker.process.pid,
            worker.number,
            total_s,
            ready.num_pages,
            ready.page_size,
            ready.max_running,
        )
        self._events.worker_ready(worker.replica, ready)
        if not self.started.done() and len(self.ready_replicas()) == self._settings.parallel.replicas:
            self.started.set_result(None)
