"""The load generator: when requests are sent, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

import numpy as np

from hiserve.bench.request import Prompt, Run, Sample, Turn, Workload
from hiserve.core.plan import Int32Array

Send = Callable[[Prompt, int, Sample], Awaitable[None]]


def arrivals(workload: Workload, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns when each session begins, in seconds from the start of the run.

    The gaps follow a gamma distribution. Sessions of several requests arrive as much more rarely, so that
    requests are offered at ``rate`` on average.

    Args:
        workload: Its sessions.
        rate: Requests per second; infinity begins all sessions at once.
        burstiness: Shape of the gamma distribution: 1 is a Poisson process, less is burstier.
        seed: Of the gaps.
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
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Sends every request of a workload and waits for the last reply.

    A request is sent when its time has come, its session's previous reply is there and, with
    ``max_concurrency``, fewer requests than that are in flight. Its own time counts from there on.

    Args:
        workload: What to send.
        send: Sends one request and fills in its sample.
        starts: When each session begins, in seconds; turns with a time of their own ignore it.
        max_concurrency: Most requests in flight; None sets no limit.
        on_done: Called after each request.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    samples = [
        [Sample(session=session, turn=turn) for turn in range(len(turns))]
        for session, turns in enumerate(workload.sessions)
    ]
    cpu_s, begin_s = time.process_time(), time.perf_counter()

    async def follow(turns: list[Turn], into: list[Sample], start_s: float) -> None:
        known = np.empty(0, dtype=np.int32)
        ready_s = begin_s + start_s
        for turn, sample in zip(turns, into, strict=True):
            planned_s = ready_s + turn.think_s if turn.at_s is None else begin_s + turn.at_s
            sample.due_s = max(planned_s, ready_s)
            await asyncio.sleep(sample.due_s - time.perf_counter())
            prompt = _extended(known, turn.prompt) if turn.extends else turn.prompt
            async with places:
                await send(prompt, turn.max_tokens, sample)
            if turn.extends:
                known = _extended(prompt, np.array(sample.output_ids, dtype=np.int32))
            ready_s = time.perf_counter()
            on_done()

    async with asyncio.TaskGroup() as group:
        for turns, into, start_s in zip(workload.sessions, samples, starts, strict=True):
            group.create_task(follow(turns, into, start_s))
    end_s = time.perf_counter()
    flat = [sample for session in samples for sample in session]
    return Run(begin_s=begin_s, end_s=end_s, samples=flat, client_cpu_s=time.process_time() - cpu_s)


def _extended(known: Prompt, more: Prompt) -> Int32Array:
    assert isinstance(known, np.ndarray) and isinstance(more, np.ndarray), "only token ids extend a session"
    return np.concatenate([known, more])
