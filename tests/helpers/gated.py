"""Hands on a whole engine with graphs: what passed its gate, loads that take their time, what happens before a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan, TableWrites
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from hiserve.runners.gate import Decision
from tests.helpers import cuda
from tests.helpers.tiered import engine_of, rest, transfers_of
from tests.helpers.tiers import squeeze
from tests.helpers.transfers import hold_copies

CYCLES_PER_S = 2_000_000_000
MAX_WAIT_S = 0.01
NOTHING = np.empty(0, dtype=np.int32)


class Seen(NamedTuple):
    """A step that ran.

    Attributes:
        plan: As the engine made it.
        decision: The gate's.
        num_open: Loads that were under way.
    """

    plan: BatchPlan
    decision: Decision
    num_open: int


class Watched:
    """Runners that remember what they ran.

    Args:
        executor: Whose runners they are from now on.
    """

    def __init__(self, executor: Any) -> None:
        self._runners = executor._runners
        self._copier = executor._tier_transfers
        self.seen: list[Seen] = []
        executor._runners = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runners, name)

    def run(self, plan: BatchPlan, decision: Decision, *rest: Any) -> Any:
        self.seen.append(Seen(plan, decision, len(self._copier.loads.open)))
        return self._runners.run(plan, decision, *rest)


class Between:
    """Stands between an engine and its executor.

    Args:
        llm: Whose engine it is.
        act: Takes a plan and returns the one to launch instead.

    Attributes:
        executor: The engine's.
        acks: Are handed to the engine when it asks next.
    """

    def __init__(self, llm: LLM, act: Callable[[Between, BatchPlan], BatchPlan]) -> None:
        engine: Any = engine_of(llm)
        self.executor = engine._executor
        self.acks: list[CopyAck] = []
        self._act = act
        engine._executor = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def submit(self, plan: BatchPlan) -> Any:
        return self.executor.submit(self._act(self, plan))

    def submit_alone(self, plan: BatchPlan) -> None:
        """Launches a plan that the engine does not know of."""
        self.executor.submit(plan).result()

    def await_acks(self, ops: tuple[int, ...]) -> None:
        """Takes acks until these copies have ended; the engine is told when it asks."""
        while not {ack.op for ack in self.acks}.issuperset(ops):
            self.acks += self.executor.take_acks(MAX_WAIT_S)

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        held, self.acks = self.acks, []
        return held or self.executor.take_acks(wait_s)


def watch(llm: LLM) -> list[Seen]:
    """Returns the steps that run from now on."""
    return Watched(engine_of(llm)._executor).seen


def hold_loads(llm: LLM, seconds: float, reason: str = "") -> None:
    """Lets loads begin so much later on the device, or fail."""
    transfers = transfers_of(llm)

    def hold(copy: PageCopy) -> str:
        if copy.kind is CopyKind.LOAD and not reason:
            if cuda.DEVICE == "cpu":
                time.sleep(seconds)
            else:
                with torch.cuda.stream(transfers._streams[CopyKind.LOAD]._first):
                    torch.cuda._sleep(int(seconds * CYCLES_PER_S))
        return reason if copy.kind is CopyKind.LOAD else ""

    hold_copies(transfers, hold)


@contextmanager
def loads_open(llm: LLM) -> Iterator[None]:
    """Within, the engine hears of no load's end, however long its steps take; afterwards of all."""
    transfers, is_over = transfers_of(llm), threading.Event()
    tell = transfers.end

    def tell_later(copy: PageCopy, *how: Any) -> None:
        if copy.kind is CopyKind.LOAD:
            is_over.wait()
        tell(copy, *how)

    transfers.end = tell_later
    try:
        yield
    finally:
        is_over.set()
        del transfers.end


def send(engine: Engine, uid: int, tokens: list[int], sampling: SamplingParams) -> None:
    """Adds a request."""
    engine.add(Admit(uid, len(tokens), sampling, b"", 0), np.array(tokens, dtype=np.int32))


def run_until(engine: Engine, tokens: dict[int, list[int]], is_over: Callable[[], bool]) -> None:
    """Steps and appends what comes to the tokens of each request."""
    while not is_over():
        updates = engine.step()
        if updates is not None:
            assert not updates.failed
            parts = np.split(updates.tokens, np.cumsum(updates.counts, dtype=np.int64))[:-1]
            for uid, part in zip(updates.uids, parts, strict=True):
                tokens.setdefault(uid, []).extend(part.tolist())


def spoil_device(llm: LLM) -> None:
    """Evicts everything from the device and fills its pages with NaN: a read that is too early is found out."""
    rest(llm)
    squeeze(engine_of(llm)._planner._cache)
    for kv in engine_of(llm)._executor._runners._eager._layers:  # type: ignore[attr-defined]
        for plane in (kv.k, kv.v):
            plane.fill_(torch.nan)
    cuda.wait_for_stream()


def without_rows(plan: BatchPlan) -> BatchPlan:
    """The same plan, of which nothing is computed."""
    no_flags = np.empty(0, dtype=np.bool_)
    numbers = dict.fromkeys(("rows", "num_new", "num_draft", "num_scored", "max_len"), NOTHING)
    return replace(plan, samples=no_flags, waits=(), **numbers)


def rows_alone(plan: BatchPlan) -> BatchPlan:
    """The step of a plan whose writes and copies were begun before."""
    return replace(plan, release=NOTHING, admit=(), table=TableWrites(), host_release=NOTHING, copies=(), lookups=())
