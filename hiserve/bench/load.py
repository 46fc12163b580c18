"""The load generator: when requests are sent, how many at once, and what it says of itself meanwhile."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

import numpy as np

from hiserve.bench.summary import ttft_s
from hiserve.bench.workload import Prompt, Run, Sample, Turn, Workload
from hiserve.core.plan import Int32Array

Send = Callable[[Prompt, int, Sample], Awaitable[None]]
OnDone = Callable[[Sample], None]
# Called after each of the things that are counted, with what has been measured so far, in words.
Advance: TypeAlias = Callable[[str], None]
# Called with the total; None if it is unknown.
Begin: TypeAlias = Callable[[int | None], Advance]


def arrivals(workload: Workload, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns when each session begins, in seconds from the start of the run; an infinite rate begins all at once.

    The gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less is burstier. Sessions of
    several requests arrive as much more rarely, so that requests are offered at ``rate`` on average.
    """
    count = len(workload.sessions)
    if math.isinf(rate) or not count:
        return [0.0] * count
    mean_gap = workload.num_turns / count / rate
    gaps = np.random.default_rng(seed).gamma(burstiness, mean_gap / burstiness, size=count)
    return [float(time_s) for time_s in np.cumsum(gaps) - gaps[0]]


async def drive(
    workload: Workload,
    send: Send,
    *,
    starts: list[float],
    max_concurrency: int | None = None,
    on_done: OnDone = lambda _: None,
) -> Run:
    """Sends every request of a workload and waits for the last reply; after Ctrl-C returns what was sent until then.

    A request is sent when its time has come, its session's previous reply is there and fewer than ``max_concurrency``
    requests are in flight. Its own time counts from there on. Turns with a time of their own ignore ``starts``.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    sessions = _open(workload)
    cpu_s, begin_s = time.process_time(), time.perf_counter()

    async def follow(session: _Session, start_s: float) -> None:
        ready_s = begin_s + start_s
        for turn, sample in session.requests():
            planned_s = ready_s + turn.think_s if turn.at_s is None else begin_s + turn.at_s
            sample.due_s = max(planned_s, ready_s)
            await asyncio.sleep(sample.due_s - time.perf_counter())
            async with places:
                await session.send(turn, sample, send)
            ready_s = time.perf_counter()
            on_done(sample)

    with _until_cancelled():
        async with asyncio.TaskGroup() as group:
            for session, start_s in zip(sessions, starts, strict=True):
                group.create_task(follow(session, start_s))
    return _ended(sessions, begin_s, cpu_s)


async def drive_in_groups(workload: Workload, send: Send, *, group_size: int, on_done: OnDone = lambda _: None) -> Run:
    """Visits groups of sessions in turn, round after round: one request of each session of the group, all at once.

    The next group is visited when the last reply of the one before is there. So a session comes back when all
    others have been there, which is the worst case for a cache that forgets what was used longest ago.
    """
    sessions = _open(workload)
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    waiting = [(session, session.requests()) for session in sessions]

    async def one(session: _Session, turn: Turn, sample: Sample) -> None:
        sample.due_s = time.perf_counter()
        await session.send(turn, sample, send)
        on_done(sample)

    with _until_cancelled():
        for _ in range(max(map(len, workload.sessions), default=0)):
            for first in range(0, len(waiting), group_size):
                async with asyncio.TaskGroup() as group:
                    for session, requests in waiting[first : first + group_size]:
                        for turn, sample in itertools.islice(requests, 1):
                            group.create_task(one(session, turn, sample))
    return _ended(sessions, begin_s, cpu_s)


class _Session:
    """The requests of one session, one sample for each, and what they grew to."""

    def __init__(self, turns: list[Turn], index: int) -> None:
        self.samples = [Sample(session=index, turn=turn) for turn in range(len(turns))]
        self._turns = turns
        self._known: Prompt = np.empty(0, dtype=np.int32)

    def requests(self) -> Iterator[tuple[Turn, Sample]]:
        return zip(self._turns, self.samples, strict=True)

    async def send(self, turn: Turn, sample: Sample, send: Send) -> None:
        """Sends the next request; remembers it and its reply for the turns that extend it."""
        prompt = _extended(self._known, turn.prompt) if turn.extends else turn.prompt
        await send(prompt, turn.max_tokens, sample)
        if turn.extends:
            self._known = _extended(prompt, np.array(sample.output_ids, dtype=np.int32))


def _open(workload: Workload) -> list[_Session]:
    return [_Session(turns, index) for index, turns in enumerate(workload.sessions)]


def _until_cancelled() -> contextlib.suppress:
    """Ends a run early when its task is cancelled: what was measured until then is worth keeping."""
    return contextlib.suppress(asyncio.CancelledError)


def _ended(sessions: list[_Session], begin_s: float, cpu_s: float) -> Run:
    """Returns the run that began at these readings of the clock and of the processor's time.

    Requests that were never sent are left out; those that were cut off in flight have failed.
    """
    end_s = time.perf_counter()
    every = [sample for session in sessions for sample in session.samples]
    sent = [sample for sample in every if sample.begin_s]
    for sample in sent:
        if not sample.end_s:
            sample.fail("interrupted", "the run was stopped", end_s)
    num_unsent = len(every) - len(sent)
    return Run(
        begin_s=begin_s, end_s=end_s, samples=sent, client_cpu_s=time.process_time() - cpu_s, num_unsent=num_unsent
    )


def _extended(known: Prompt, more: Prompt) -> Int32Array:
    assert isinstance(known, np.ndarray) and isinstance(more, np.ndarray), "only token ids extend a session"
    return np.concatenate([known, more])


class SoFar:
    """Figures of the requests that have ended; says them after each one."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._begin_s = float("inf")
        self._num_failed = 0
        self._num_output = 0
        self._num_prompt = 0
        self._num_cached = 0
        self._ttfts_s: list[float] = []

    def add(self, sample: Sample) -> None:
        self._begin_s = min(self._begin_s, sample.begin_s)
        if sample.error:
            self._num_failed += 1
        else:
            self._num_output += sample.num_output
            self._num_prompt += max(0, sample.num_prompt)
            self._num_cached += max(0, sample.num_cached)
            if (first_s := ttft_s(sample)) is not None:
                bisect.insort(self._ttfts_s, first_s)
        self._advance(self._words(sample.end_s))

    def _words(self, now_s: float) -> str:
        words = [f"{self._num_output / max(now_s - self._begin_s, 1e-9):,.0f} tokens/s"]
        if self._ttfts_s:
            words.append(f"TTFT {self._ttfts_s[len(self._ttfts_s) // 2] * 1e3:,.0f} ms")
        if self._num_cached:
            words.append(f"{self._num_cached / self._num_prompt:.0%} cached")
        if self._num_failed:
            words.append(f"{self._num_failed:,} failed")
        return ", ".join(words)
