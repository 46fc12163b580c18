"""The fake of the engine: stands for ``EngineClient``, plays scripted deltas and counts what happened to each request.

Tests of processes use ``fake_engine`` instead, which runs inside a real worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, Retain, SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import HiserveError
from hiserve.ipc.cache_stats import NodeFacts, TierName, TreeFacts
from hiserve.ipc.lifecycle import Crash, Recovery, ReplayStats
from hiserve.ipc.messages import Started, Status, WorkerFacts, WorkerStats
from hiserve.ipc.updates import TokenDelta
from hiserve.ipc.watching import Subject, WorkerView


@dataclass
class Seen:
    """One request as the engine saw it. Exactly one of the ends becomes true."""

    prompt: Int32Array
    sampling: SamplingParams
    namespace: bytes
    choice: int = 0
    priority: int = 0
    caller: int = 0
    tag: str = ""
    session: bytes = b""
    retain: Retain = ()
    num_resumed: int = 0
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    aborted: bool = False
    failed: bool = False


@dataclass
class FakeEngineClient:
    """Answers every request with ``script(prompt)``, one delta a list.

    Attributes:
        script: Token lists of the deltas; the last delta carries ``finish``.
        finish: Why requests end.
        cached: Cached tokens reported by the first delta, all on the device; or what the cache gave, or gives each prompt.
        queue_s: Seconds in the queue reported by the first delta.
        looks_up: A worker gets the requests, and says what of them is cached.
        scores: Packed scores of each delta; empty for zeros, as many as were asked for.
        drafts: All drafts until each delta; empty for none at all.
        step: Awaited before each delta, with its index; lets a test hold a request at any place.
        fail_at: Index of the delta before which ``failure`` is raised, or None.
        num_asked: How often its state was told.
        seen: All requests, in order.
    """

    script: Callable[[Int32Array], list[list[int]]]
    finish: FinishReason = FinishReason.STOP
    cached: int | CacheUse | Callable[[Int32Array], CacheUse] = 0
    queue_s: float = 0.0
    scores: list[bytes] = field(default_factory=list)
    drafts: list[DraftUse | None] = field(default_factory=list)
    max_model_len: int = 256
    is_ready: bool = True
    trouble: str = ""
    fail_at: int | None = None
    failure: HiserveError | Exception | None = None
    stats: WorkerStats = field(default_factory=WorkerStats)
    pid: int = 4243
    incarnation: int = 1
    step_age_s: float = 0.0
    replays: ReplayStats = field(default_factory=ReplayStats)
    recovery: Recovery | None = None
    queued: int = 0
    hangs: bool = False
    flushed: list[tuple[TierName, ...]] = field(default_factory=list)
    inspected: list[int] = field(default_factory=list)
    nodes: list[NodeFacts] = field(default_factory=list)
    watched: list[tuple[Subject, float]] = field(default_factory=list)
    views: list[WorkerView] = field(default_factory=list)
    stopped: int = 0
    death: asyncio.Event = field(default_factory=asyncio.Event)
    num_slow_readers: int = 0
    num_asked: int = 0
    looks_up: bool = True
    num_restarts: int = 0
    crash: Crash | None = None
    seen: list[Seen] = field(default_factory=list)
    step: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        self._streams: list[AsyncGenerator[TokenDelta, None]] = []
        self.started = Started(scheduler_pid=4242, workers=[self._worker()])

    @property
    def num_inflight(self) -> int:
        return sum(not (seen.finished or seen.aborted or seen.failed) for seen in self.seen)

    def generate(
        self,
        prompt: Int32Array,
        sampling: SamplingParams,
        *,
        namespace: bytes = b"",
        choice: int = 0,
        priority: int = 0,
        caller: int = 0,
        tag: str = "",
        session: bytes = b"",
        retain: Retain = (),
        num_resumed: int = 0,
    ) -> AsyncGenerator[TokenDelta, None]:
        seen = Seen(prompt, sampling, namespace, choice, priority, caller, tag, session, retain, num_resumed)
        stream = self._generate(seen)
        self._streams.append(stream)  # so that only an explicit close ends it, not the garbage collector
        return stream

    async def _generate(self, seen: Seen) -> AsyncGenerator[TokenDelta, None]:
        assert seen.prompt.dtype == np.int32
        self.seen.append(seen)
        try:
            script = self.script(seen.prompt)
            for i, tokens in enumerate(script):
                await self._wait(i, seen)
                if seen.cut.is_set():
                    seen.finished = True
                    yield TokenDelta(finish=FinishReason.ABORT, cached=CacheUse() if i == 0 and self.looks_up else None)
                    return
                if self.fail_at == i and self.failure is not None:
                    seen.failed = True
                    raise self.failure
                is_last = i == len(script) - 1
                seen.finished = is_last
                finish = self.finish if is_last else FinishReason.RUNNING
                is_first = i == 0
                scores = self.scores[i] if self.scores else _zeros(seen, len(tokens), is_first=is_first)
                queue_s = self.queue_s if is_first else -1.0
                use, drafts = (
                    self._use(seen.prompt) if is_first and self.looks_up else None,
                    self.drafts[i] if self.drafts else None,
                )
                yield TokenDelta(tokens, finish, scores, cached=use, drafts=drafts, queue_s=queue_s)
        finally:
            if not seen.finished and not seen.failed:
                seen.aborted = True

    def _use(self, prompt: Int32Array) -> CacheUse:
        if isinstance(self.cached, int):
            return CacheUse(device=self.cached)
        return self.cached if isinstance(self.cached, CacheUse) else self.cached(prompt)

    async def _wait(self, index: int, seen: Seen) -> None:
        """Waits for the step or for ``abort``."""
        if self.step is None:
            await asyncio.sleep(0)
            return
        tasks = [asyncio.ensure_future(self.step(index)), asyncio.ensure_future(seen.cut.wait())]  # type: ignore[call-overload]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    def abort(self, tag: str | None = None) -> int:
        open_ones = [seen for seen in self.seen if not (seen.finished or seen.aborted or seen.failed)]
        found = [seen for seen in open_ones if tag is None or seen.tag == tag]
        for seen in found:
            seen.cut.set()
        return len(found)

    async def flush(self, tiers: tuple[TierName, ...]) -> int:
        self.flushed.append(tiers)
        return 7

    async def inspect(self, depth: int) -> list[TreeFacts]:
        if self.hangs:
            await asyncio.Event().wait()
        self.inspected.append(depth)
        return [TreeFacts(replica=0, incarnation=self.incarnation, nodes=self.nodes)]

    async def watch(self, subject: Subject, since_s: float = 0.0) -> list[WorkerView]:
        if self.hangs:
            await asyncio.Event().wait()
        self.watched.append((subject, since_s))
        later = [[step for step in view.steps if step.end_s > since_s] for view in self.views]
        return [msgspec.structs.replace(view, steps=steps) for view, steps in zip(self.views, later, strict=True)]

    async def status(self) -> Status:
        if self.hangs:
            await asyncio.Event().wait()
        self.num_asked += 1
        return Status(
            ticket=1,
            queued=self.queued,
            queued_tokens=10 * self.queued,
            workers=[self._worker()],
            replays=self.replays,
            recovery=self.recovery,
        )

    async def ended(self) -> str:
        await self.death.wait()
        return self.trouble

    def die(self, why: str) -> None:
        """As an engine whose scheduler was killed."""
        self.is_ready, self.trouble = False, why
        self.death.set()

    async def stop(self, drain_s: float = 0.0, copy_s: float = 0.0) -> None:
        self.stopped += 1
        self.copy_s = copy_s
        self.is_ready = False

    def _worker(self) -> WorkerFacts:
        return WorkerFacts(
            replica=0,
            pid=self.pid,
            step_age_s=self.step_age_s,
            incarnation=self.incarnation,
            startup_s={"load": 0.5},
            num_pages=100,
            stats=self.stats,
        )


def _zeros(seen: Seen, num_tokens: int, *, is_first: bool) -> bytes:
    """Returns the packed scores of a delta, all zero: of the prompt but for its first token, then of the tokens."""

    def packed(count: int, num_top: int | None) -> bytes:
        return b"" if num_top is None else bytes(4 * count * (1 + 2 * num_top))

    is_scored = is_first and not seen.num_resumed
    prompt = packed(seen.prompt.size - 1, seen.sampling.prompt_logprobs) if is_scored else b""
    return prompt + packed(num_tokens, seen.sampling.logprobs)
