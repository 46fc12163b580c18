"""One soak: start a server or use a running one, record replies, load it, inject faults, count leaks."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from hiserve.bench.http import Pool
from hiserve.bench.load import Advance, Begin
from hiserve.bench.online import read_key
from hiserve.bench.options import SoakOptions
from hiserve.bench.scrape import increases, scrape
from hiserve.bench.soak.faults import FaultInjector, possible
from hiserve.bench.soak.server_process import PROGRAM, RunningServer, start
from hiserve.bench.soak.soak_summary import SAMPLE_S, ProcessMonitor, SoakFigures, StreamOracle, figures
from hiserve.bench.soak.users import Questions, Reference, Sender, Users, build
from hiserve.bench.target import Target, look_at
from hiserve.config.options import Options
from hiserve.errors import UnavailableError

IDLE_S = 30.0
POLL_S = 0.1
# Descriptors that may be more open at the end than before the load: connections that are kept.
SPARE_FILES = 8


class SoakOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A soak and what it was one of."""

    target: Target
    figures: SoakFigures
    log_tail: list[str]  # the last lines that a server started here wrote
    is_partial: bool  # ctrl-C ended the load early


async def soak(config: Options, options: SoakOptions, progress: Begin, program: Sequence[str] = PROGRAM) -> SoakOutcome:
    """Puts a server under load and faults: one of these settings, or the one at ``options.url``. Raises HiserveError."""
    faults = possible(config, options.faults, options.recovery_limit) if options.url is None else []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(start(config, program)) if options.url is None else None
        url = options.url or (server.url if server is not None else "")
        key = read_key(options.api_key_file) if server is None else _key(config)
        pool = Pool(url, key)
        stack.callback(pool.close)
        target = await look_at(pool)
        sender = Sender(url, key, target.model, options.timeout)
        stack.callback(sender.close)
        run = _Run(config, options, server, pool, sender, build(options, target, options.seed))
        await run.record()
        await run.load(faults, progress(math.ceil(options.duration)))
        found = await run.judged()
        log = [] if server is None else server.log.read_text(errors="replace").splitlines()
    return SoakOutcome(target=target, figures=found, log_tail=log[-30:], is_partial=run.is_partial)


def _key(config: Options) -> str | None:
    keys = [config.server.admin_api_key, *config.server.api_key]
    return next((key for key in keys if key), None)


class _Run:
    """The parts of a soak, in the order of their use: ``record``, ``load``, ``judged``."""

    def __init__(
        self,
        config: Options,
        options: SoakOptions,
        server: RunningServer | None,
        pool: Pool,
        sender: Sender,
        questions: Questions,
    ) -> None:
        self._config = config
        self._options = options
        self._server = server
        self._pool = pool
        self._sender = sender
        self._questions = questions
        self._watch = ProcessMonitor(dict if server is None else server.processes)
        self._references: list[Reference] = []
        self._striker: FaultInjector | None = None
        self._begin_s = 0.0
        self.is_partial = False

    async def record(self) -> None:
        """Asks every question, a few at once, and remembers the answers; then counts what is open."""
        places = asyncio.Semaphore(self._options.users)
        took_s: list[float] = []

        async def one(index: int) -> Reference:
            async with places:
                begin_s = time.perf_counter()
                reference = await self._sender.record(index, self._questions.all[index])
                took_s.append(time.perf_counter() - begin_s)
                return reference

        self._references = await asyncio.gather(*map(one, range(len(self._questions.all))))
        self._users = Users(self._sender, self._questions, self._options, statistics.median(took_s))
        self._sender.close()
        self._left = await self._not_idle()
        self._files = self._watch.open_files()
        self._counters = await scrape(self._pool)
        info = await self._info()
        self._is_exact = has_same_tokens(info["config"]) if info else False
        if self._options.same_tokens is not None:
            self._is_exact = self._options.same_tokens

    async def load(self, faults: list[Any], advance: Advance) -> None:
        """Runs users and faults for the given time, or until Ctrl-C, and waits for the last reply."""
        self._begin_s = time.perf_counter()
        using = asyncio.create_task(self._users.run())
        watching = asyncio.create_task(self._look(advance))
        try:
            try:
                await self._strike(faults)
            except asyncio.CancelledError:  # what was seen until then is judged
                self.is_partial = True
            self._users.stop()
            await using
        finally:
            for task in (using, watching):
                task.cancel()
            await asyncio.gather(using, watching, return_exceptions=True)

    async def _strike(self, faults: list[Any]) -> None:
        if self._server is not None and faults:
            self._striker = FaultInjector(self._server, self._config, self._pool, self._users, self._options, faults)
            await self._striker.run(self._options.duration)
        if self._striker is None or not self._striker.has_lost:
            await asyncio.sleep(self._begin_s + self._options.duration - time.perf_counter())

    async def judged(self) -> SoakFigures:
        """Ends a server that was started, and returns the figures."""
        self._sender.close()
        left = self._left + await self._not_idle() + await self._not_closed()
        counters = increases(self._counters, await scrape(self._pool))
        self._pool.close()
        if self._server is not None:
            left += await self._server.stop()
        return figures(
            asked=self._users.asked,
            nonsense=self._users.nonsense,
            struck=self._striker.struck if self._striker is not None else [],
            histories=list(self._watch.histories.values()),
            left=left,
            counters=counters,
            judge=StreamOracle(self._references, is_exact=self._is_exact),
            soak=self._options,
            begin_s=self._begin_s,
            is_exact=self._is_exact,
        )

    async def _look(self, advance: Advance) -> None:
        while True:
            self._watch.look()
            struck = self._striker.struck if self._striker is not None else []
            advance(f"{len(self._users.asked):,} requests, {self._users.num_open} open, {len(struck)} faults")
            await asyncio.sleep(SAMPLE_S)

    async def _not_idle(self) -> list[str]:
        """Waits until no request is anywhere and every page can be had; says what is not so in time."""
        deadline_s = time.perf_counter() + IDLE_S
        while (busy := still_open(await self._info())) and time.perf_counter() < deadline_s:
            await asyncio.sleep(POLL_S)
        return [f"{word}, {IDLE_S:g} s after the last request" for word in busy]

    async def _not_closed(self) -> list[str]:
        """Waits until no role has many more files open than before the load; says which has."""
        deadline_s = time.perf_counter() + IDLE_S
        while True:
            more = [
                f"{role} has {num_files} open files, {self._files.get(role, 0)} before the load"
                for role, num_files in self._watch.open_files().items()
                if num_files > self._files.get(role, 0) + SPARE_FILES
            ]
            if not more or time.perf_counter() >= deadline_s:
                return more
            await asyncio.sleep(POLL_S)

    async def _info(self) -> dict[str, Any]:
        """Returns ``/server_info``; empty if this server has none, or refuses this key."""
        try:
            status, info = await self._pool.ask("GET", "/server_info")
        except UnavailableError:
            return {}
        is_fresh = isinstance(info, dict) and "workers" in info and info.get("engine_error") is None
        return dict(info) if status == 200 and is_fresh else {}


def has_same_tokens(config: dict[str, Any]) -> bool:
    """Whether replies of a server with this configuration, as ``/server_info`` has it, depend on nothing else that it computes."""
    return config["model"]["dtype"] == "float64" or bool(config["runner"].get("exact", False))


def still_open(info: dict[str, Any]) -> list[str]:
    """Returns in words what is still there of requests."""
    if not info:
        return []
    found = []
    num_requests = info["num_inflight"] + info["num_queued"]
    for worker in info["workers"]:
        stats = worker["stats"]
        num_requests += stats["running"] + stats["waiting"]
        num_free = stats["free_pages"] + stats["evictable_pages"]
        if num_free != worker["num_pages"]:
            found.append(f"{worker['num_pages'] - num_free} pages of worker {worker['replica']} are held")
    return [f"{num_requests} requests are open", *found] if num_requests else found
