"""Start, restart and end of the engine, from the side of the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hiserve.errors import HiserveError, UnavailableError
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import Status
from hiserve.scheduler.client import EngineClient

RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0)
MAX_FAILURES = 8
ANSWER_TIMEOUT_S = 10.0
SETTLED_S = 60.0  # an engine that runs for this time resets the count of failed starts

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineHandle:
    """Starts and stops the engine, and restarts it after its death. Used in one event loop.

    Args:
        start: Starts the engine.

    Attributes:
        startup_s: Duration of the start in seconds; 0 before its end.
        last_status: The last status of the engine; None before the first.
        last_status_s: Its time by ``time.monotonic``.
    """

    def __init__(self, start: Callable[[], Awaitable[EngineClient]]) -> None:
        self._start = start
        self._is_begun = asyncio.Event()
        self._opening: asyncio.Task[EngineClient] | None = None
        self._engine: EngineClient | None = None
        self._stopping: EngineClient | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_draining = False
        self._loss = ""  # the reason why the last engine ended
        self._num_restarts = 0  # of engines that ended, and of their workers
        self._num_slow_readers = 0  # of engines that ended
        self._crash: Crash | None = None  # of these
        self.last_status: Status | None = None
        self.last_status_s = 0.0
        self.startup_s = 0.0

    @property
    def engine(self) -> EngineClient | None:
        """The engine, ready or not; None before it has started and after it was stopped."""
        return self._engine

    @property
    def state(self) -> str | None:
        """``reason`` without the message of an error."""
        return None if self.reason is None else self.reason.partition(":")[0]

    @property
    def reason(self) -> str | None:
        """The reason to refuse requests now; None without one."""
        if self._is_draining:
            return "the server is shutting down"
        if self._opening is None or not self._opening.done():
            return "the model is loading"
        if self._engine is None:
            return "the engine failed to start"
        if self._loss:
            return self._loss
        return None if self._engine.is_ready else self._engine.trouble or "the engine is not running"

    @property
    def num_restarts(self) -> int:
        """Workers that were started again after a worker or the scheduler died; never falls."""
        return self._num_restarts + (0 if self._engine is None else self._engine.num_restarts)

    @property
    def num_slow_readers(self) -> int:
        """Streams ended because too much of them was not read, in all engines; never falls."""
        return self._num_slow_readers + (0 if self._engine is None else self._engine.num_slow_readers)

    @property
    def crash(self) -> Crash | None:
        """The latest death of a worker, also of an earlier engine."""
        return None if self._engine is None else self._engine.crash or self._crash

    def require(self) -> EngineClient:
        """Returns the engine for one request.

        Raises:
            UnavailableError: The engine is starting, draining or has ended.
        """
        reason = self.reason
        if reason is not None or self._engine is None:
            raise _unavailable(reason)
        return self._engine

    async def status(self, timeout_s: float) -> Status:
        """Asks the engine for its state.

        Raises:
            UnavailableError: There is no engine, or it did not answer in time.
        """
        if self._engine is None:
            raise _unavailable(self.reason)
        try:
            async with asyncio.timeout(timeout_s):
                self.last_status = await self._engine.status()
        except TimeoutError:
            raise UnavailableError(f"the engine did not answer within {timeout_s:g} s.") from None
        self.last_status_s = time.monotonic()
        return self.last_status

    async def ask(self, question: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Returns the answer of all workers to a question.

        Raises:
            UnavailableError: The engine is starting, draining or has ended, or a worker did not answer in time.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await question(self.require())
        except TimeoutError:
            raise UnavailableError(f"a worker did not answer within {ANSWER_TIMEOUT_S:g} s.") from None

    def open(self) -> None:
        """Starts the engine; does not wait for it."""
        self._opening = asyncio.create_task(self._open())
        self._is_begun.set()

    async def wait_open(self) -> None:
        """Returns once the engine has started.

        Raises:
            Exception: The error that ended the start.
        """
        await self._is_begun.wait()
        assert self._opening is not None, "begun, but without a task"
        await asyncio.shield(self._opening)

    def drain(self) -> None:
        """Refuses new requests; running ones continue."""
        self._is_draining = True

    async def close(self, copy_s: float = 0.0) -> None:
        """Stops the engine and aborts running requests. May be called again, also after it was cancelled.

        Args:
            copy_s: Seconds for copies of cached pages to the host and the store.
        """
        self.drain()
        tasks = [task for task in (self._keeping, self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            self._stopping, self._engine = self._engine, None
        if self._stopping is not None:
            await self._stopping.stop(copy_s=copy_s)
            self._stopping = None

    async def _open(self) -> EngineClient:
        begin = time.monotonic()
        self._engine = await self._start()
        self.startup_s = time.monotonic() - begin
        self._keeping = asyncio.create_task(self._keep(self._engine))
        return self._engine

    async def _keep(self, first: EngineClient) -> None:
        """Restarts the engine after each death, until ``MAX_FAILURES`` in a row."""
        engine: EngineClient | None = first
        why, num_failures = "", 0
        while True:
            if engine is not None:
                begin = time.monotonic()
                why = await engine.ended()
                if self._is_draining:
                    return
                if time.monotonic() - begin > SETTLED_S:
                    num_failures = 0
                logger.error("the engine is gone: %s", why)
                self._loss = f"the engine is started again: {why}"
            if num_failures == MAX_FAILURES:
                break
            await asyncio.sleep(RESTART_DELAYS_S[min(num_failures, len(RESTART_DELAYS_S) - 1)])
            num_failures += 1
            engine = await self._try_start()
            if engine is not None:
                self._take_over(engine)
        self._loss = f"the engine died, or did not start, {num_failures} times in a row: {why}"
        logger.error("%s", self._loss)

    def _take_over(self, engine: EngineClient) -> None:
        """Replaces the engine that died."""
        assert self._engine is not None, "no engine to replace"
        self._num_restarts += self._engine.num_restarts + len(engine.started.workers)
        self._num_slow_readers += self._engine.num_slow_readers
        self._crash = self.crash
        self._engine, self._loss = engine, ""

    async def _try_start(self) -> EngineClient | None:
        """Starts an engine; returns None if it cannot start."""
        try:
            return await self._start()
        except (HiserveError, OSError) as error:
            logger.warning("the engine cannot start: %s", error)
            return None


def _unavailable(reason: str | None) -> UnavailableError:
    """Returns the refusal for a reason, which may end like a sentence."""
    return UnavailableError(f"{str(reason).rstrip('.')}; try again later.")
