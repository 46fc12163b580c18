"""Faults at a rate, one after the other, and how long each was felt."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.options import Fault, SoakOptions
from hiserve.bench.soak.faults import FAILING, SIGNALS, inject
from hiserve.bench.soak.server_process import RunningServer
from hiserve.bench.soak.stream_oracle import Window
from hiserve.bench.soak.users import Users
from hiserve.config.options import Options
from hiserve.errors import UnavailableError

POLL_S = 0.02
ANSWER_S = 2.0


class FaultRecovery(msgspec.Struct, kw_only=True):
    """A fault and its recovery, on the clock of the samples.

    Attributes:
        what: What was done, in words.
        num_open: Requests in flight at that moment.
        struck_s: When.
        back_s: When all processes were there and ready again; None if they never were, or none was struck.
        token_s: When the first token came after that; None if none came, or no process was struck.
    """

    fault: Fault
    what: str
    num_open: int
    struck_s: float
    back_s: float | None = None
    token_s: float | None = None

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the fault to the first new token; None if the fault hit no process, or no token came."""
        return None if self.token_s is None else self.token_s - self.struck_s

    @property
    def is_lost(self) -> bool:
        """The server did not come back."""
        return self.fault in SIGNALS and self.token_s is None

    def window(self) -> Window:
        """Returns when it may be felt."""
        if self.fault not in SIGNALS:
            return Window(self.struck_s, self.struck_s, may_fail=False)
        return Window(self.struck_s, math.inf if self.token_s is None else self.token_s, self.fault in FAILING)


class FaultInjector:
    """Injects faults until it is stopped, never while the server still recovers; ``struck`` holds every fault so far."""

    def __init__(
        self, server: RunningServer, config: Options, pool: Pool, users: Users, soak: SoakOptions, faults: list[Fault]
    ) -> None:
        self._server = server
        self._config = config
        self._pool = pool
        self._users = users
        self._soak = soak
        self._faults = faults
        self._rng = np.random.default_rng(soak.seed + 1)
        self.struck: list[FaultRecovery] = []

    @property
    def has_lost(self) -> bool:
        """The server did not come back from the last fault."""
        return bool(self.struck) and self.struck[-1].is_lost

    async def run(self, seconds: float) -> None:
        """Strikes for so long, and returns when the last fault has been recovered from, or has not been in time."""
        end_s = time.perf_counter() + seconds
        turns: list[Fault] = []
        while True:
            pause_s = self._rng.exponential(self._soak.fault_every)
            if time.perf_counter() + pause_s >= end_s:
                return
            await asyncio.sleep(pause_s)
            # Each kind once, in any order, before the next round.
            turns = turns or [self._faults[index] for index in self._rng.permutation(len(self._faults))]
            await self._strike(turns.pop())
            if self.has_lost:
                return

    async def _strike(self, fault: Fault) -> None:
        """Strikes once, and waits until the server is there again, or should be."""
        struck_s, num_open = time.perf_counter(), self._users.num_open
        what, victim = inject(fault, self._config, self._server.processes(), self._rng)
        if not what:
            return
        struck = FaultRecovery(fault=fault, what=what, num_open=num_open, struck_s=struck_s)
        self.struck.append(struck)
        if victim:
            await self._recover(struck, victim)

    async def _recover(self, struck: FaultRecovery, victim: int) -> None:
        deadline_s = struck.struck_s + self._soak.recovery_limit
        while time.perf_counter() < deadline_s:
            if struck.back_s is None:
                struck.back_s = time.perf_counter() if await self._is_whole(victim) else None
            elif (token_s := self._users.last_token_s()) > struck.back_s:
                struck.token_s = token_s
                return
            await asyncio.sleep(POLL_S)

    async def _is_whole(self, victim: int) -> bool:
        """Asks whether every process is there and ready, the victim replaced."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, info = await self._pool.ask("GET", "/server_info")
        except (TimeoutError, UnavailableError):
            return False
        if status != 200 or info["not_ready_because"] is not None or info.get("engine_error") is not None:
            return False
        workers = [worker for worker in info["workers"] if worker["startup_s"]]
        pids = {info["processes"]["scheduler"], *(worker["pid"] for worker in workers)}
        return victim not in pids and len(workers) == self._config.parallel.replicas
