"""Engines of fake workers for tests: start one, ask it, and see that nothing of it stays."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.scheduler.client import EngineClient, TokenDelta
from tests.helpers.fake_engine import SLOW_FILE, reply
from tests.helpers.fake_processes import FAKE_SCHEDULER, SETTINGS
from tests.helpers.forks import forked_engines
from tests.helpers.processes import children, is_alive, wait_dead
from tests.helpers.settings import settings_of
from tests.helpers.waiting import PATIENCE_S


@contextmanager
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything temporary of all processes lands in ``tmp_path``, and nothing of it may stay."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == [], "an endpoint was left behind"


@asynccontextmanager
async def engine(*, max_unread_bytes: int | None = None, **settings: object) -> AsyncIterator[EngineClient]:
    """Starts an engine, and after the test sees to it that no process is left."""
    config = settings_of(**(SETTINGS | settings))
    with forked_engines():
        client = await EngineClient.start(config, command=FAKE_SCHEDULER, max_unread_bytes=max_unread_bytes)
    pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
    try:
        yield client
    finally:
        pids += children(pids[0]) if is_alive(pids[0]) else []
        await client.stop()
        await asyncio.to_thread(wait_dead, pids)


def tokens(first: int, length: int = 20) -> Int32Array:
    return np.arange(first, first + length, dtype=np.int32)


def order(order_id: int) -> Int32Array:
    return np.array([order_id, 1, 2], dtype=np.int32)


async def collect(client: EngineClient, prompt: Int32Array, max_tokens: int = 4) -> list[TokenDelta]:
    return [delta async for delta in client.generate(prompt, SamplingParams(max_tokens=max_tokens))]


async def finish(client: EngineClient, prompt: Int32Array, max_tokens: int = 4) -> list[int]:
    """Runs a request to its end and checks what it got."""
    deltas = await collect(client, prompt, max_tokens)
    got = [token for delta in deltas for token in delta.tokens]
    assert got == reply(prompt, max_tokens)
    assert [delta.finish for delta in deltas[:-1]] == [FinishReason.RUNNING] * (len(deltas) - 1)
    assert deltas[-1].finish is FinishReason.LENGTH
    assert deltas[0].cached is not None
    assert all(delta.cached is None for delta in deltas[1:])
    return got


async def until_running(client: EngineClient, *counts: int) -> None:
    """Waits until each worker runs so many requests."""
    async with asyncio.timeout(PATIENCE_S):
        while [worker.stats.running for worker in (await client.status()).workers] != list(counts):
            await asyncio.sleep(0.01)


@contextmanager
def slowly(folder: Path) -> Iterator[None]:
    """Workers take their time for each step: what they have runs on until a test has seen it."""
    (folder / SLOW_FILE).touch()
    try:
        yield
    finally:
        (folder / SLOW_FILE).unlink()


async def settled(client: EngineClient) -> None:
    """Waits until nothing is owed, here, in the scheduler and in the workers; fails if something stays."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await client.status()
            if not client.num_inflight and not status.queued and not any(w.stats.running for w in status.workers):
                return
            await asyncio.sleep(0.01)
