"""The ranks of a group but the first, as the first one sees them: started with it, sent every plan, and heard after each step."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from hiserve.cache.storage.host import HostPool
from hiserve.config.settings import Settings
from hiserve.core.devices import environment_with
from hiserve.core.plan import BatchPlan, MaskPlan, StepFault, StepResult
from hiserve.core.startup_measurements import StartupMeasurements
from hiserve.core.transfers import CopyAck
from hiserve.distributed.collectives import Collectives
from hiserve.distributed.exchange import Exchange
from hiserve.distributed.shard import Shard
from hiserve.engine.executor import MAX_IN_FLIGHT
from hiserve.engine.host_adoption import common_pages, hold_pages, keep_pages
from hiserve.engine.joined_acks import JoinedAcks
from hiserve.engine.rank_messages import (
    Acked,
    Adopt,
    DrawOrder,
    Farewell,
    FromRank,
    HeldPages,
    Order,
    Ran,
    RankLoaded,
    RankReady,
    Setup,
    StopRank,
    ToRank,
    decode_from_rank,
    encode,
)
from hiserve.engine.step_group import checksum_of
from hiserve.errors import ConfigError, EngineError, HiserveError, ResourceError, to_error
from hiserve.ipc.frames import FrameSocket
from hiserve.runners.gate import Action, Coverage, Decision, common_coverage

RANK_COMMAND = (sys.executable, "-m", "hiserve.ipc.launcher", "hiserve.engine.rank")
STOP_S = 5.0  # for a rank to end by itself
NOTICE_S = 2.0  # from an exchange that failed to the news of the rank that ended

EXIT_S = 3.0  # for this process to report that a rank has ended
EXIT_FAILED = 70  # as of a step that failed

logger = logging.getLogger(__name__)


def end_process() -> None:
    """Ends this process some seconds after a rank, if it has not ended itself: it may wait for an exchange that does not come."""
    time.sleep(EXIT_S)
    logger.error("a rank of the group has ended, and with it this process")
    os._exit(EXIT_FAILED)


class RankProcess:
    """A rank's process, and what it has said."""

    def __init__(self, setup: Setup) -> None:
        self.number = setup.rank
        self.socket, theirs = FrameSocket.pair()
        environment = environment_with((setup.rank,)) if setup.settings.model.device == "cuda" else None
        with theirs, contextlib.ExitStack() as if_it_cannot_start:
            if_it_cannot_start.callback(self.socket.close)
            self._process = subprocess.Popen(
                (*RANK_COMMAND, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
            if_it_cannot_start.pop_all()
        with contextlib.suppress(ConnectionError):  # it has ended: who reads its messages says how
            self.socket.send(encode(setup))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def how_it_ended(self) -> str:
        """Returns exit code or signal; its end of the socket is closed."""
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return "it has closed its socket"
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"

    def close(self) -> None:
        """Ends it, after the orders that it has."""
        try:
            self.socket.send(encode(StopRank()))
            self._process.wait(STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self.socket.close()


class Ranks:
    """Ranks 1 to N - 1 of a group; see ``StepGroup``. Made in the thread that outlives them: they end with it.

    Args:
        settings: Of the worker.
        measurements: As in ``Setup``.
        on_lost: Called, in a thread, when a rank has ended by itself.
        replica: Of the worker.

    Raises:
        ResourceError: A process cannot be started.
    """

    def __init__(
        self, settings: Settings, measurements: StartupMeasurements, on_lost: Callable[[], None], replica: int = 0
    ) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._folder = Path(tempfile.mkdtemp(prefix="hiserve-ranks-"))
        self._ranks: list[RankProcess] = []
        self._heard = threading.Condition()
        self._facts: dict[int, dict[str, str]] = {}
        self._held: list[HeldPages] = []
        self._coverages: list[Coverage] = []
        self._ran: dict[int, list[StepFault | None]] = defaultdict(list)  # by step
        self._acks = JoinedAcks(settings.parallel.tp)
        self._num_ready_pages = dict.fromkeys(range(1, settings.parallel.tp), 0)
        self._lost: HiserveError | None = None
        self._is_closing = False
        self._number = 0
        self._ended: list[tuple[int, int]] = []  # as in ``Order``
        self._last_void = 0  # results up to this step are not compared
        self.exchange: Exchange | None = None
        rendezvous = str(self._folder / "rendezvous")
        try:
            for number in range(1, settings.parallel.tp):
                self._ranks.append(RankProcess(Setup(settings, number, rendezvous, replica, measurements)))
        except OSError as error:
            self.close()
            raise ResourceError(f"rank {len(self._ranks) + 1} cannot be started: {error}. Free memory.") from error
        self._threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self._ranks]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Their process ids, from rank 1 on."""
        return [rank.pid for rank in self._ranks]

    def join(self, device: torch.device) -> Exchange:
        """Meets the other ranks, and returns the exchange with them.

        Raises:
            HiserveError: A rank has ended, for this reason.
        """
        joining: Future[Exchange] = Future()
        parallel = self._settings.parallel

        def join() -> None:
            try:
                may_push = parallel.exchange == "auto"
                joining.set_result(
                    Collectives(Shard(0, parallel.tp), device, self._folder / "rendezvous", may_push=may_push)
                )
            except Exception as error:  # noqa: BLE001 - ``result`` raises it
                joining.set_exception(error)
            with self._heard:
                self._heard.notify_all()

        # In a thread: it waits long for a rank that has ended.
        threading.Thread(target=join, name="hiserve-join", daemon=True).start()
        self._await(joining.done)
        try:
            self.exchange = joining.result()
        except RuntimeError:
            self.check()
            raise
        return self.exchange

    def agree(self, facts: dict[str, str]) -> None:
        """Waits until all ranks hold their shares, and compares their facts with those of this one.

        Raises:
            ConfigError: They differ.
            HiserveError: A rank has ended, for this reason.
        """
        self._await(lambda: len(self._facts) == len(self._ranks))
        for rank, theirs in sorted(self._facts.items()):
            for name, ours in facts.items():
                if theirs.get(name) != ours:
                    raise ConfigError(
                        f"rank {rank} of --tp {self._settings.parallel.tp} has {name} {theirs.get(name)}, and rank 0 has {ours}. Use "
                        "devices of one kind, and one installation.",
                        param="tp",
                    )

    def adopt(self, host: HostPool) -> None:
        """Keeps the host pages of a former group that all ranks have, and frees all others; ``host`` was just made.

        Raises:
            HiserveError: A rank has ended, for this reason.
        """
        held = hold_pages(host)
        self._await(lambda: len(self._held) == len(self._ranks))
        pages = common_pages([held, *self._held])
        self._held.clear()
        self._send(Adopt(pages))
        keep_pages(host, held, pages)

    def await_ready(self, coverage: Coverage) -> Coverage:
        """Waits until all ranks take orders; returns the graphs that all of them have, of those that this one has.

        Raises:
            HiserveError: A rank has ended, for this reason.
        """
        self._await(lambda: len(self._coverages) == len(self._ranks))
        return reduce(common_coverage, self._coverages, coverage)

    def settle(self, plan: BatchPlan, decide: Callable[[], Decision | None]) -> Decision | None:
        """As the protocol: decides, and sends the order."""
        decision = decide()
        self._number += 1
        with self._heard:
            ended, self._ended = self._ended, []
        # The first rank looks into the store for all of them.
        self._send(Order(self._number, replace(plan, lookups=()) if plan.lookups else plan, decision, ended))
        if decision is not None and decision.action is Action.DEFER:
            with self._heard:
                self._ran[plan.step_id] = [None] * len(self._ranks)
        return decision

    def draw(self, step_id: int, masks: MaskPlan | None) -> None:
        """As the protocol."""
        self._send(DrawOrder(step_id) if masks is None else DrawOrder(step_id, masks.entries, masks.masks))

    def take_result(self, result: StepResult) -> StepFault | None:
        """As the protocol."""
        step_id = result.step_id
        self._await(lambda: len(self._ran[step_id]) == len(self._ranks))
        with self._heard:
            faults = self._ran[step_id]
            for step in [
                step for step in self._ran if step <= step_id
            ]:  # also steps that failed here, which nobody asked for
                del self._ran[step]
            fault = next((fault for fault in faults if fault is not None), None)
            if fault is None and step_id > self._last_void:
                self._ended.append((step_id, checksum_of(result)))
        return fault

    def void(self, step_id: int) -> None:
        """As the protocol."""
        self._last_void = step_id + MAX_IN_FLIGHT

    def join_acks(self, acks: list[CopyAck]) -> list[CopyAck]:
        """As the protocol."""
        with self._heard:
            if self._lost is not None:
                raise self._lost
            self._acks.add(acks)
            return self._acks.take()

    @property
    def num_ready_host_pages(self) -> int:
        """As the protocol."""
        return min(self._num_ready_pages.values())

    def check(self) -> None:
        """As the protocol."""
        with self._heard:
            self._heard.wait_for(lambda: self._lost is not None, NOTICE_S)
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Ends all ranks."""
        if self._is_closing:
            return
        self._is_closing = True
        for rank in self._ranks:
            rank.close()
        if self.exchange is not None:
            self.exchange.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: ToRank) -> None:
        frame = encode(message)
        for rank in self._ranks:
            try:
                rank.socket.send(frame)
            except OSError:
                self.check()
                raise

    def _await(self, is_done: Callable[[], bool]) -> None:
        with self._heard:
            self._heard.wait_for(lambda: is_done() or self._lost is not None)
            if not is_done():
                assert self._lost is not None
                raise self._lost

    def _listen(self, rank: RankProcess) -> None:
        """Takes in the messages of a rank until it ends."""
        while (frame := rank.socket.receive()) is not None:
            with self._heard:
                self._take(rank, decode_from_rank(frame))
                self._heard.notify_all()
        if self._is_closing:
            return
        how = rank.how_it_ended()
        with self._heard:
            self._lose(EngineError(f"rank {rank.number} of the group has ended ({how})."))
            self._heard.notify_all()
        self._on_lost()
        if self.exchange is not None:
            self.exchange.abort()

    def _lose(self, error: HiserveError) -> None:
        """Records the first error that ends the group, and logs it: this process may end before any thread asks for it."""
        if self._lost is None:
            self._lost = error
            logger.error("%s", error.message)

    def _take(self, rank: RankProcess, message: FromRank) -> None:
        match message:
            case RankLoaded(facts):
                self._facts[rank.number] = facts
            case HeldPages():
                self._held.append(message)
            case RankReady(coverage):
                self._coverages.append(coverage)
            case Ran(step_id, fault):
                self._ran[step_id].append(fault)
            case Acked(acks, num_ready):
                self._acks.add(acks)
                self._num_ready_pages[rank.number] = num_ready
            case Farewell(text, code, trace):
                self._lose(to_error(code, f"rank {rank.number}: {text}", trace))
