"""Where an offline batch runs: an engine of this process, or a scheduler process with its workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import uvloop

from hiserve.cache.storage.host_segment import open_segment
from hiserve.config.settings import Settings
from hiserve.core.plan import Int32Array
from hiserve.core.request import Grammar, SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.engine.build import build_engine
from hiserve.engine.loop import Engine
from hiserve.engine.runner_factory import MakeProposer, open_proposer
from hiserve.errors import EngineError, HiserveError, UnavailableError
from hiserve.grammar.vet import Vetting
from hiserve.ipc.cache_stats import TierName
from hiserve.ipc.messages import Admit
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.scheduler.client import EngineClient

CLEAN_UP_S = 20.0  # after Ctrl-C


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request for the engine: one choice of one prompt.

    Attributes:
        request: The caller's own record.
        tokens: int32 ``[n]``. The prompt.
        sampling: With a seed.
        choice: Index among the prompt's choices.
        take: Called with each delta; returns True when the job needs no more tokens.
        fail: Called with the error that ended the job instead; other jobs go on.
    """

    request: Any
    tokens: Int32Array
    sampling: SamplingParams
    choice: int
    take: Callable[[TokenDelta], bool]
    fail: Callable[[HiserveError], None]


class OfflineBackend(Protocol):
    """Runs jobs to their ends.

    Attributes:
        draft_costs: The costs of drafts, if measured in this process.
    """

    @property
    def draft_costs(self) -> StepCosts | None:
        """As the attribute says."""

    def run(self, jobs: Iterator[Job]) -> Generator[Job, None, None]:
        """Yields each job when it has ended.

        Jobs are taken from the iterator when there is room for them. Closing the generator aborts running jobs.

        Raises:
            Exception: Of the iterator.
            UnavailableError: The engine has died.
        """

    def flush(self, tiers: tuple[TierName, ...]) -> int:
        """Empties tiers of the prefix cache while no job runs; returns the pages emptied."""

    def close(self) -> None:
        """Ends processes or threads, and frees the memory."""


def room_for_jobs(settings: Settings) -> int:
    """Returns how many jobs keep the engine busy: those that run, and as many that wait."""
    return 2 * settings.scheduler.max_running_requests * settings.parallel.replicas


def _follow(
    ended: SimpleQueue[Job | None], driving: Future[None], stop: Callable[[], object]
) -> Generator[Job, None, None]:
    """Yields jobs as another thread ends them, until it puts None; stops that thread when left early."""
    try:
        while (job := ended.get()) is not None:
            yield job
        driving.result()
    finally:
        stop()
        wait([driving])


class InProcess:
    """Steps an engine of this process, in a thread, so that Ctrl-C falls between two steps and never into one."""

    def __init__(self, settings: Settings, make_proposer: MakeProposer = open_proposer) -> None:
        with ExitStack() as undo:
            segment = open_segment(settings, 0)
            if segment is not None:
                undo.callback(segment.close)
            self.engine: Engine = build_engine(settings, segment, make_proposer=make_proposer)
            undo.callback(self.engine.close)
            self._undo = undo.pop_all()
        self._room = room_for_jobs(settings)
        self._copy_s = settings.server.drain_timeout_s
        self._last_uid = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-llm")

    def run(self, jobs: Iterator[Job]) -> Generator[Job, None, None]:
        """Yields each job when it has ended."""
        ended: SimpleQueue[Job | None] = SimpleQueue()
        stop = threading.Event()
        yield from _follow(ended, self._thread.submit(self._drive, jobs, ended, stop), stop.set)

    def _drive(self, jobs: Iterator[Job], ended: SimpleQueue[Job | None], stop: threading.Event) -> None:
        live: dict[int, Job] = {}
        try:
            self._feed(jobs, live)
            while live and not stop.is_set():
                updates = self.engine.step()
                if updates is not None:
                    for job in self._take(updates, live):
                        ended.put(job)
                self._feed(jobs, live)
        finally:
            try:
                self.engine.abort(list(live))
                while self.engine.has_work:
                    self.engine.step()
            finally:
                ended.put(None)

    def _feed(self, jobs: Iterator[Job], live: dict[int, Job]) -> None:
        while len(live) < self._room and (job := next(jobs, None)) is not None:
            self._last_uid += 1
            live[self._last_uid] = job
            self.engine.add(Admit(self._last_uid, job.tokens.size, job.sampling, b"", job.choice), job.tokens)

    def _take(self, updates: RequestUpdates, live: dict[int, Job]) -> Iterator[Job]:
        """Passes updates to their jobs; yields the jobs that have ended."""
        for uid, _, message in updates.failed:
            if uid in live:
                job = live.pop(uid)
                job.fail(EngineError(f"the request failed: {message}"))
                yield job
        for delta in updates:
            running = live.get(delta.uid)
            if running is None:  # it was aborted, and this is the last delta
                continue
            has_enough = running.take(delta)
            if delta.finish or has_enough:
                del live[delta.uid]
                yield running
            if has_enough and not delta.finish:
                self.engine.abort([delta.uid])

    @property
    def draft_costs(self) -> StepCosts | None:
        """As the engine measured them."""
        return self.engine.facts.measurements.draft_costs

    def flush(self, tiers: tuple[TierName, ...]) -> int:
        """Empties tiers of the prefix cache."""
        return self._thread.submit(self.engine.flush, tiers).result()

    def close(self) -> None:
        """Ends the thread, lets cached pages reach slower tiers, and frees the engine; raises an error of the copies."""
        copying = self._thread.submit(self.engine.finish_copies, self._copy_s)
        self._thread.shutdown()
        self._undo.close()
        copying.result()


async def _end_others() -> None:
    """Returns when no other task of the event loop is left.

    One that Ctrl-C has cancelled has time to stop the processes that it began to start; tasks that hang are cancelled.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    _, pending = await asyncio.wait(others, timeout=CLEAN_UP_S) if others else (set(), set())
    for task in pending:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Processes:
    """Talks to a scheduler process from an event loop in a thread."""

    def __init__(self, settings: Settings) -> None:
        self._room = room_for_jobs(settings)
        self._copy_s = settings.server.drain_timeout_s
        self._loop = uvloop.new_event_loop()  # takes a fifth less of the time per token here than asyncio's own
        self._thread = threading.Thread(target=self._loop.run_forever, name="hiserve-llm", daemon=True)
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._end_loop)
            self._client: EngineClient = self._wait(EngineClient.start(settings))
            undo.pop_all()

    def run(self, jobs: Iterator[Job]) -> Generator[Job, None, None]:
        """Yields each job when it has ended."""
        ended: SimpleQueue[Job | None] = SimpleQueue()
        driving = asyncio.run_coroutine_threadsafe(self._drive(jobs, ended), self._loop)
        yield from _follow(ended, driving, driving.cancel)

    async def _drive(self, jobs: Iterator[Job], ended: SimpleQueue[Job | None]) -> None:
        room = asyncio.Semaphore(self._room)
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    await room.acquire()
                    group.create_task(self._finish(job, room, ended))
                    await asyncio.sleep(0)  # it is sent before the next prompt is encoded
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            ended.put(None)

    async def _finish(self, job: Job, room: asyncio.Semaphore, ended: SimpleQueue[Job | None]) -> None:
        try:
            async with aclosing(self._client.generate(job.tokens, job.sampling, choice=job.choice)) as deltas:
                async for delta in deltas:
                    if job.take(delta):
                        break
        except UnavailableError:  # the engine, not the request
            raise
        except HiserveError as error:
            job.fail(error)
        room.release()
        ended.put(job)

    @property
    def draft_costs(self) -> None:
        """None: they are measured in the workers."""
        return None

    def flush(self, tiers: tuple[TierName, ...]) -> int:
        """Empties tiers of the workers' prefix caches."""
        num_pages: int = self._wait(self._client.flush(tiers))
        return num_pages

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # Ctrl-C while it waits

    def close(self) -> None:
        """Stops the processes, once cached pages have reached slower tiers, and the event loop."""
        self._wait(self._client.stop(copy_s=self._copy_s))
        self._end_loop()

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingVetting:
    """``grammar.vet.Vetting`` for callers without an event loop. It starts a thread and a process with the first grammar.

    Args:
        folder: As for ``Vetting``, like the others.
        vocab_size: Of the model.
        eos_token_ids: Its end tokens.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vetting = Vetting(folder, vocab_size, eos_token_ids)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._callers = count()  # each call is a caller of its own: none waits for the grammars of another

    def check(self, grammar: Grammar, param: str, mark: str = "") -> list[str]:
        """Returns a warning for each constraint that the grammar does not express.

        Args:
            grammar: The grammar.
            param: Its name in errors.
            mark: As of ``grammar.vet.Trial``.

        Raises:
            RequestError: As ``Vetting.check``.
            UnavailableError: As ``Vetting.check``.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="hiserve-vet", daemon=True)
            self._thread.start()
        checking = self._vetting.check(grammar, param, mark=mark, caller=next(self._callers))
        _, warnings = asyncio.run_coroutine_threadsafe(checking, self._loop).result()
        return warnings

    def close(self) -> None:
        """Ends the process and the thread."""
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._vetting.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
