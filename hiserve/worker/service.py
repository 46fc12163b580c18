"""The worker's loop between the scheduler's channel and an engine: obey, step, report."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from hiserve.config import Config
from hiserve.core.plan import Int32Array
from hiserve.errors import EngineError, HiserveError
from hiserve.messages.cache import NodeFacts, TierName
from hiserve.messages.channels import Link, PeerGoneError, PollingChannel
from hiserve.messages.child import log_to_stderr, meet_parent
from hiserve.messages.codec import Decoder, Received, encode
from hiserve.messages.types import (
    Admit,
    CacheFlushed,
    CacheInspected,
    Configure,
    Drop,
    FlushCache,
    InspectCache,
    Ready,
    Stop,
    ToWorker,
    WorkerFailed,
    WorkerStats,
)
from hiserve.worker.loop import EngineFacts
from hiserve.worker.outbox import Outbox
from hiserve.worker.report import Report

logger = logging.getLogger(__name__)

LAST_WORDS_MS = 500
IDLE_S = 1.0  # an idle worker looks this often at what threads do meanwhile: host memory made ready, a store emptied


class Engine(Protocol):
    """What the service needs of ``loop.Engine``."""

    @property
    def facts(self) -> EngineFacts:
        """What it tells the scheduler when it is ready."""

    def add(self, admit: Admit, tokens: Int32Array) -> None:
        """Takes a request; tokens int32 ``[n]`` are its prompt, then what it generated before."""

    def abort(self, uids: list[int]) -> None:
        """Ends requests; each is reported once, unless its end has been reported."""

    def flush(self, tiers: tuple[TierName, ...]) -> int:
        """Empties tiers of the prefix cache; returns the pages emptied."""

    def inspect(self, depth: int) -> list[NodeFacts]:
        """Returns the radix tree from its roots to ``depth`` levels below them."""

    def step(self) -> Report | None:
        """Does what can be done now; None when there is nothing to report."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` should be called again without waiting for a message."""

    def stats(self) -> WorkerStats:
        """Returns gauges and counters after the last step."""

    def close(self) -> None:
        """Gives everything back."""


class Service:
    """Serves one scheduler with one engine.

    Args:
        engine: Runs the requests.
        channel: To the scheduler.
        incarnation: Stamped on every message.
    """

    def __init__(self, engine: Engine, channel: PollingChannel, incarnation: int) -> None:
        self._engine = engine
        self._channel = channel
        self._incarnation = incarnation
        self._outbox = Outbox(channel, incarnation)
        self._decoder = Decoder[ToWorker](ToWorker)
        self._is_stopped = False
        self._told: WorkerStats | None = None

    def run(self) -> None:
        """Serves until the scheduler says stop.

        Raises:
            PeerGoneError: The scheduler is gone.
            MalformedError: The scheduler sent something no scheduler of ours would send.
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
        )
        self._outbox.answer(ready)
        self._tell(None)
        while not self._is_stopped:
            self._turn()

    def _turn(self) -> None:
        """Handles all that has come, does one step, and says what it changed."""
        is_idle = not self._engine.has_work
        is_pending = self._outbox.is_pending
        for frames in self._channel.receive(is_idle=is_idle, until_writable=is_pending, timeout_s=IDLE_S):
            self._obey(self._decoder.decode(frames))
        self._tell(self._engine.step())
        self._outbox.flush()

    def _tell(self, report: Report | None) -> None:
        """Reports a step; of one without news of any request, the stats, if they changed and nothing will follow."""
        if report is None and self._engine.has_work:
            return
        stats = self._engine.stats()
        if report is not None or stats != self._told:
            self._outbox.report(report or Report(), stats)
            self._told = stats

    def _obey(self, received: Received[ToWorker]) -> None:
        match received.message:
            case Admit() as admit:
                self._engine.add(admit, received.tokens)
            case Drop(uids):
                self._engine.abort(uids)
            case FlushCache(ticket, tiers):
                pages = self._engine.flush(tiers)
                self._outbox.answer(CacheFlushed(incarnation=self._incarnation, ticket=ticket, pages=pages))
            case InspectCache(ticket, depth):
                nodes = self._engine.inspect(depth)
                self._outbox.answer(CacheInspected(incarnation=self._incarnation, ticket=ticket, nodes=nodes))
            case Stop() | Configure():
                self._is_stopped = True


def serve(endpoint: str, build: Callable[[Config, int, int], Engine]) -> int:
    """Meets the scheduler, builds the engine and serves; returns the exit code.

    After a fatal error the process ends here and at once: no destructor of a broken device may hold it.

    Args:
        endpoint: Where the scheduler listens.
        build: Makes the engine, of a configuration, the descriptor of the host segment (-1 without one) and the replica.
    """
    link, frames = meet_parent(endpoint, signal.SIGKILL)
    configure = Decoder[Configure](Configure).decode(frames).message
    log_to_stderr(configure.config)
    try:
        engine = build(configure.config, configure.host_fd, configure.replica)
        Service(engine, PollingChannel(link), configure.incarnation).run()
    except PeerGoneError:
        logger.warning("the scheduler is gone; worker %d ends", configure.replica)
        os._exit(1)
    except HiserveError as error:
        _say_farewell(link, configure.incarnation, error.message, error.code)
    except Exception as error:
        logger.exception("worker %d (incarnation %d) ends", configure.replica, configure.incarnation)
        _say_farewell(link, configure.incarnation, f"{type(error).__name__}: {error}", EngineError.code)
    engine.close()
    link.close()
    return 0


def _say_farewell(link: Link, incarnation: int, message: str, code: str) -> NoReturn:
    """Reports the exception being handled, and ends the process."""
    link.try_send(
        encode(WorkerFailed(incarnation=incarnation, message=message, code=code, trace=traceback.format_exc()))
    )
    link.close(linger_ms=LAST_WORDS_MS)
    os._exit(1)
