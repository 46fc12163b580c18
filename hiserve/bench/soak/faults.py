"""Faults injected from outside, one after the other: signals, bit flips in cached pages; and how long each is felt."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.options import Fault, SoakOptions
from hiserve.bench.soak.server_process import RunningServer
from hiserve.bench.soak.users import Users
from hiserve.bench.workload import Sample
from hiserve.cache.storage.records import NO_CHECKSUM, PageState
from hiserve.cache.storage.segment import Segment, segment_path
from hiserve.config.options import Options
from hiserve.errors import ConfigError, UnavailableError

MAX_FLIPPED = 4
NAME_LENGTH = 64  # of a page's file in a store
MEMFD = "/memfd:hiserve-host-cache"
# The process that a fault hits, and its signal.
SIGNALS: dict[Fault, tuple[str, signal.Signals]] = {
    "kill-worker": ("worker", signal.SIGKILL),
    "hang-worker": ("worker", signal.SIGSTOP),
    "kill-scheduler": ("scheduler", signal.SIGKILL),
}
# While these last, streams may end with an error.
FAILING: tuple[Fault, ...] = ("kill-scheduler",)
POLL_S = 0.02
ANSWER_S = 2.0


class InjectedFault(NamedTuple):
    """The effect of a fault."""

    what: str  # in words; empty if there was nothing to strike
    victim: int = 0  # the process that has to be replaced; 0 for none


def possible(config: Options, wanted: tuple[Fault, ...], recovery_limit_s: float) -> list[Fault]:
    """Returns the wanted faults, or all that the settings allow. Raises ConfigError for one that has no target."""
    reasons: dict[Fault, str] = {}
    if config.cache.cache_verify != "all" or config.cache.host_cache_gib == 0:
        reasons["flip-host"] = "needs a host cache that is checked whenever it is read: --cache-verify all"
    if config.cache.store is None:
        reasons["flip-store"] = "needs --store"
    if not 0 < config.scheduler.step_timeout_s < recovery_limit_s:
        reasons["hang-worker"] = "needs a server that notices in time: --step-timeout-s, less than --recovery-limit"
    for fault in wanted:
        if fault in reasons:
            raise ConfigError(f"--faults {fault} {reasons[fault]}.", param="faults")
    every: tuple[Fault, ...] = (*SIGNALS, "flip-host", "flip-store")
    return list(wanted) or [fault for fault in every if fault not in reasons]


def inject(fault: Fault, config: Options, processes: dict[int, str], rng: np.random.Generator) -> InjectedFault:
    if fault in SIGNALS:
        role, number = SIGNALS[fault]
        victims = [pid for pid, its in processes.items() if its == role]
        if not victims:
            return InjectedFault("")
        victim = int(rng.choice(victims))
        with suppress(ProcessLookupError):
            os.kill(victim, number)
            return InjectedFault(f"{number.name} to {role} {victim}", victim)
        return InjectedFault("")
    if fault == "flip-host":
        return InjectedFault(_flip_host(config, processes, rng))
    assert config.cache.store is not None
    return InjectedFault(_flip_store(Path(config.cache.store.removeprefix("file:")), rng))


def _flip_host(config: Options, processes: dict[int, str], rng: np.random.Generator) -> str:
    """Flips a bit in each of some pages that have their checksum, while no worker writes."""
    workers = [pid for pid, role in processes.items() if role == "worker"]
    fds = [fd for pid, role in processes.items() if role == "scheduler" for fd in _segments(pid, config)]
    if not fds:
        return ""
    with _stopped(workers):
        segment = Segment.attach(os.open(fds[int(rng.integers(len(fds)))], os.O_RDWR | os.O_CLOEXEC))
        is_sealed = (segment.records["state"] == PageState.VALID) & (segment.records["checksum"] != NO_CHECKSUM)
        pages = rng.permutation(np.flatnonzero(is_sealed))[:MAX_FLIPPED]
        places = rng.integers(segment.layout.page_bytes, size=pages.size)
        segment.pages[pages, places] ^= np.uint8(1 << int(rng.integers(8)))
        segment.close()
    return f"a bit in each of {pages.size} pages" if pages.size else ""


def _segments(pid: int, config: Options) -> list[str]:
    """Returns the descriptors of host segments that a process holds, as paths."""
    name = config.cache.host_cache_name
    wanted = MEMFD if name is None else str(segment_path(name))
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith(wanted):
                found.append(str(path))
    return found


@contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _flip_store(folder: Path, rng: np.random.Generator) -> str:
    """Flips a bit in each of some files of a store."""
    files = sorted(path for path in folder.glob("*/*") if len(path.name) == NAME_LENGTH)
    num_flipped = 0
    for index in rng.permutation(len(files))[:MAX_FLIPPED]:
        with suppress(FileNotFoundError), files[index].open("r+b") as file:  # the store removes files, too
            place = int(rng.integers(max(1, os.fstat(file.fileno()).st_size)))
            file.seek(place)
            (byte,) = file.read(1) or b"\0"
            file.seek(place)
            file.write(bytes([byte ^ 1 << int(rng.integers(8))]))
            num_flipped += 1
    return f"a bit in each of {num_flipped} files" if num_flipped else ""


class Window(msgspec.Struct, frozen=True):
    """From a fault to the first token after it, on the clock of the samples."""

    begin_s: float  # it struck
    end_s: float  # tokens came again; infinite while they do not
    may_fail: bool  # streams that were open in between may end with an error

    def overlaps(self, sample: Sample) -> bool:
        return sample.begin_s <= self.end_s and self.begin_s <= sample.end_s


class FaultRecovery(msgspec.Struct, kw_only=True):
    """A fault and its recovery, on the clock of the samples.

    Attributes:
        back_s: When all processes were there and ready again; None if they never were, or none was struck.
    """

    fault: Fault
    what: str  # what was done, in words
    num_open: int  # requests in flight at that moment
    struck_s: float  # when
    back_s: float | None = None
    token_s: float | None = None  # when the first token came after that; None if none came, or no process was struck

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the fault to the first new token; None if the fault hit no process, or no token came."""
        return None if self.token_s is None else self.token_s - self.struck_s

    @property
    def is_lost(self) -> bool:
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
