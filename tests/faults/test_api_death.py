"""The API process is killed under load: nothing of it stays, and whoever starts the next finds what was cached."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from hiserve.cache.storage.segment import SHARED_MEMORY
from tests.faults.harness import Crowd, body_of, family, read, scripts, serving
from tests.helpers.processes import wait_dead
from tests.helpers.segment_name import segment_name
from tests.helpers.waiting import PATIENCE_S

SEED = 71


@pytest.fixture
def name() -> Iterator[str]:
    with segment_name() as name:
        yield name


async def test_a_killed_api_takes_everything_along_but_the_named_cache(name: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    turns = [script[0] for script in scripts()]
    for life in ("first", "second"):
        (tmp_path / life).mkdir()
    with serving(tmp_path / "first", "--host-cache-name", name, is_fork=False) as live:
        async with Crowd(live.url, SEED, num_users=3).talking() as crowd:
            await crowd.until("answered", 6)
        pids = family(live.process.pid)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, trust_env=False) as http:
            while True:  # until some have more to hear: all may be said before a busy test gets to stop it
                streams = [asyncio.create_task(read(http, body_of(turn))) for turn in turns]
                await asyncio.sleep(rng.uniform(0.05, 0.4))
                os.kill(live.process.pid, signal.SIGSTOP)
                await asyncio.wait(streams, timeout=0.2)
                if not all(stream.done() for stream in streams):
                    break
                os.kill(live.process.pid, signal.SIGCONT)
            os.kill(live.process.pid, signal.SIGKILL)
            ends = await asyncio.gather(*streams, return_exceptions=True)
        assert any(isinstance(end, httpx.HTTPError) for end in ends), "it died when all was said"
        await asyncio.to_thread(wait_dead, pids)
        assert {path.name for path in SHARED_MEMORY.glob(f"hiserve-{name}*")} == {f"hiserve-{name}"}
    with serving(tmp_path / "second", "--host-cache-name", name, is_fork=False) as live:
        async with Crowd(live.url, SEED, num_users=3, leaving=0).talking() as crowd:
            await crowd.until("answered", 6)
        assert live.counter("hiserve:cached_tokens_total", cache_source="host") > 0
