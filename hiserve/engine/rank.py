"""A rank of a group but the first: it executes the plans that the first one orders, and plans nothing itself.

Started by ``engine/ranks.py`` through ``ipc/launcher.py``, with its end of a pair of sockets.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.host_segment import open_segment
from hiserve.cache.storage.segment import Segment
from hiserve.config.serving import MAX_INT32
from hiserve.core.machine import free_cuda_bytes
from hiserve.core.plan import BatchPlan, MaskPlan, StepFault, StepResult
from hiserve.core.transfers import CopyAck
from hiserve.distributed.collectives import Collectives
from hiserve.distributed.exchange import Exchange
from hiserve.distributed.shard import Shard
from hiserve.engine.draft_costs import measure_drafts
from hiserve.engine.executing_half import load_half
from hiserve.engine.executor import Executor
from hiserve.engine.group_facts import facts_of
from hiserve.engine.host_adoption import hold_pages, keep_pages
from hiserve.engine.rank_messages import (
    Acked,
    Adopt,
    DrawOrder,
    Farewell,
    FromRank,
    Order,
    Ran,
    RankLoaded,
    RankReady,
    Setup,
    StopRank,
    ToRank,
    decode_to_rank,
    encode,
)
from hiserve.engine.runner_factory import open_proposer, prepare_runners
from hiserve.engine.startup import await_memory
from hiserve.engine.step_exchanges import StepExchanges
from hiserve.engine.step_group import checksum_of
from hiserve.engine.tier_transfers import TierTransfers, linger_s, make_host_pool, make_transfers, open_beyond
from hiserve.errors import EngineError, HiserveError
from hiserve.ipc.child import die_with_parent, log_to_stderr
from hiserve.ipc.frames import FrameSocket
from hiserve.runners.gate import Action, Decision

EXIT_FAILED = 1
FORMER_S = 30.0  # for the rank of a former group to end, which has the segment of the host cache until then
COPY_POLL_S, READY_POLL_S = 0.001, 0.05  # between two looks at copies that run, and at memory that is made ready


class Follower:
    """Executes orders; for its executor it is the ``StepGroup`` in which the first rank decides."""

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._order: Order | None = None
        self._number = 0
        self._latest: Future[StepResult] | None = None
        self._num_copies = 0  # that have not ended
        self._num_ready_pages = 0  # that the first rank knows of
        self._checksums: dict[int, int] = {}  # of steps that ended here, by step
        self._reported: deque[tuple[int, int]] = deque()  # steps that ended there, and their checksums

    def settle(self, plan: BatchPlan, decide: Callable[[], Decision | None]) -> Decision | None:
        """As the protocol: the verdict of the first rank."""
        assert self._order is not None and self._order.plan is plan, f"step {plan.step_id} was not ordered"
        decision = self._order.decision
        # A load that has ended there may not have ended here.
        return (
            None
            if decision is None
            else replace(decision, loads=plan.waits if decision.action is not Action.DEFER else ())
        )

    def draw(self, step_id: int, masks: MaskPlan | None) -> None:
        """As the protocol: the first rank orders it on the others."""

    def take_result(self, result: StepResult) -> None:
        """As the protocol: the first rank undoes the plan, by later plans. Keeps what is compared with its own result."""
        self._checksums[result.step_id] = checksum_of(result)

    def void(self, step_id: int) -> None:
        """As the protocol: the first rank reports no checksum of such a step."""

    def join_acks(self, acks: list[CopyAck]) -> list[CopyAck]:
        """As the protocol: this rank reports each to the first one, which joins those of all."""
        self._num_copies -= len(acks)
        return acks

    @property
    def num_ready_host_pages(self) -> int:
        """As the protocol: the first rank compares."""
        return MAX_INT32

    def report(self, executor: Executor) -> None:
        """Tells the first rank which copies have ended, and how many host pages are ready."""
        acks, num_ready = executor.take_acks(), executor.num_ready_host_pages
        if acks or num_ready != self._num_ready_pages:
            self._num_ready_pages = num_ready
            self.say(Acked(acks, num_ready))

    def patience_s(self, num_host_pages: int) -> float | None:
        """Returns how long it may wait for an order before it reports; None is without end."""
        if self._num_copies:
            return COPY_POLL_S
        return READY_POLL_S if self._num_ready_pages < num_host_pages else None

    def close(self) -> None:
        """As the protocol: this rank ends nobody."""

    def check(self) -> None:
        """As the protocol: this process ends with the first rank."""

    def execute(self, order: Order, executor: Executor) -> None:
        """Launches a step, and says that it did, or that it found no memory; any other error is raised."""
        assert order.number == self._number + 1, f"order {order.number} after {self._number}"
        self._number, self._order = order.number, order
        self._num_copies += len(order.plan.copies)
        self._check_latest()
        self._compare(order.ended)
        self._latest = executor.submit(order.plan)
        if not order.plan.awaits_masks:
            self._report_launch(order)

    def execute_draw(self, order: DrawOrder, executor: Executor) -> None:
        """Launches the second half of the step ordered last."""
        assert self._order is not None and self._order.plan.step_id == order.step_id, (
            f"no step {order.step_id} awaits masks"
        )
        masks = None
        if order.entries is not None and order.masks is not None:
            entries, words = executor.lend_masks(order.entries.size, len(order.masks))
            entries[:], words[:] = order.entries, order.masks
            masks = MaskPlan(order.step_id, entries, words)
        executor.draw(masks)
        self._report_launch(self._order)

    def say(self, message: FromRank) -> None:
        """Sends a message to the first rank."""
        self._socket.send(encode(message))

    def _report_launch(self, order: Order) -> None:
        """Reports that a step was launched, or that it found no memory; of a deferred one nothing."""
        decision = order.decision
        if decision is None or decision.action is Action.DEFER:
            return
        fault: StepFault | None = None
        assert self._latest is not None
        if self._latest.done():
            fault = self._latest.result().fault
        self.say(Ran(order.plan.step_id, fault))

    def _compare(self, ended: list[tuple[int, int]]) -> None:
        """Compares steps that ended on the first rank with the same ones here, which may end later (S5).

        Raises:
            EngineError: A step gave its rows something else here.
        """
        self._reported.extend(ended)
        while self._reported and self._reported[0][0] in self._checksums:
            step_id, checksum = self._reported.popleft()
            if self._checksums[step_id] != checksum:
                raise EngineError(f"the tokens of step {step_id} are not those of the first rank.")
            # Also of steps before it, of which nothing is reported, as they failed. Another thread adds some meanwhile.
            for step in [each for each in list(self._checksums) if each <= step_id]:
                del self._checksums[step]

    def _check_latest(self) -> None:
        """Raises the error of the step before, which on CUDA is known only when it has run."""
        if self._latest is not None and self._latest.done():
            self._latest.result()


def main(descriptor: str) -> int:
    """Executes orders until the first rank says stop, or ends; returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    socket = FrameSocket.inherited(int(descriptor))
    frame = socket.receive()
    if frame is None:
        return EXIT_FAILED
    setup = decode_to_rank(frame)
    assert isinstance(setup, Setup), f"a {type(setup).__name__} before Setup"
    log_to_stderr(setup.settings)
    leave = partial(os._exit, EXIT_FAILED)  # no destructor: it could wait for a broken device, or for an exchange
    if not follow(setup, socket, leave):
        leave()
    return 0


def follow(setup: Setup, socket: FrameSocket, on_gone: Callable[[], None]) -> bool:
    """Executes the orders of the first rank, until it says stop, or an error, which is reported to it.

    Args:
        setup: The first message.
        socket: For all others.
        on_gone: Called in another thread if the first rank ends, whatever this one waits for then.

    Returns:
        Whether it said stop.
    """
    follower = Follower(socket)
    try:
        _execute_all(setup, follower, _received(socket, on_gone))
    except Exception as error:  # noqa: BLE001 - the first rank gets a report
        message, code = f"{type(error).__name__}: {error}", EngineError.code
        if isinstance(error, HiserveError):
            message, code = error.message, error.code
        with suppress(OSError):  # it is gone
            follower.say(Farewell(message, code, traceback.format_exc()))
        return False
    return True


def _execute_all(setup: Setup, follower: Follower, orders: queue.SimpleQueue[ToRank]) -> None:
    device = torch.device(setup.settings.model.device)
    parallel = setup.settings.parallel
    exchange = Collectives(
        Shard(setup.rank, parallel.tp), device, Path(setup.rendezvous), may_push=parallel.exchange == "auto"
    )
    segment = open_segment(setup.settings, setup.replica, rank=setup.rank, patience_s=FORMER_S)
    with nullcontext() if segment is None else closing(segment):
        executor, num_host_pages = _build(setup, segment, exchange, follower, orders)
        while True:
            follower.report(executor)
            try:
                order = orders.get(timeout=follower.patience_s(num_host_pages))
            except queue.Empty:
                continue
            match order:
                case StopRank():
                    break
                case Order():
                    follower.execute(order, executor)
                case DrawOrder():
                    follower.execute_draw(order, executor)
                case Setup() | Adopt():
                    raise AssertionError(f"{type(order).__name__} after the start")
        executor.close()
    exchange.close()


def _received(socket: FrameSocket, on_gone: Callable[[], None]) -> queue.SimpleQueue[ToRank]:
    """Returns a queue of the orders, which a thread fills."""
    orders: queue.SimpleQueue[ToRank] = queue.SimpleQueue()

    def receive() -> None:
        while (frame := socket.receive()) is not None:
            order = decode_to_rank(frame)
            orders.put(order)
            if isinstance(order, StopRank):
                return
        on_gone()

    threading.Thread(target=receive, name="hiserve-orders", daemon=True).start()
    return orders


def _build(
    setup: Setup,
    segment: Segment | None,
    exchange: Exchange,
    follower: Follower,
    orders: queue.SimpleQueue[ToRank],
) -> tuple[Executor, int]:
    """Loads the share, and runs the same steps as the first rank does before it serves; returns also the number of host pages."""
    settings = setup.settings
    if settings.model.device == "cuda":
        await_memory(setup.measurements.free_bytes, free_cuda_bytes)
    half = load_half(settings, {}, exchange)
    follower.say(RankLoaded(facts_of(settings, half)))
    host = None if segment is None else make_host_pool(settings, segment, half.groups)
    if host is not None:
        _adopt(host, follower, orders)
    proposer = open_proposer(settings, half.draft, half.head, half.pool, half.rows)
    runners = prepare_runners(settings, half, proposer, None)
    if setup.measurements.draft_costs is None and len(settings.spec.tiers) > 1:
        measure_drafts(settings, runners, half)
    tiers = None
    if host is not None:
        transfers = make_transfers(settings.model.device, half.pool, host)
        beyond = open_beyond(settings, host, transfers, setup.rank)
        tiers = TierTransfers(transfers, host, beyond, linger_s=linger_s(settings))
    assert half.rows.shares is not None, f"rank {setup.rank} has the logits of all tokens"
    exchanges = StepExchanges(half.rows.shares, half.model, half.head, runners)
    executor = Executor(runners, half.rows, tier_transfers=tiers, group=follower, exchanges=exchanges)
    follower.say(RankReady(runners.coverage))
    return executor, 0 if host is None else host.num_pages


def _adopt(host: HostPool, follower: Follower, orders: queue.SimpleQueue[ToRank]) -> None:
    """Keeps the host pages of a former group that all ranks have.

    Raises:
        EngineError: The first rank could not start.
    """
    held = hold_pages(host)
    follower.say(held)
    order = orders.get()
    if isinstance(order, StopRank):
        raise EngineError("the first rank has ended before it served.")
    assert isinstance(order, Adopt), f"{type(order).__name__} after HeldPages"
    keep_pages(host, held, order.pages)
    host.recover()  # without those whose history is not everywhere
