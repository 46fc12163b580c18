"""Users who leave, users who come all at once, connections that are cut: the others notice nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest

from tests.e2e.live import Live
from tests.faults.harness import Crowd, body_of, check_idle, open_files, scripts, serving, worker_pid
from tests.helpers.widening import some

QUEUED = 8
SEED = 31


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("crowds"), "--max-queued-requests", str(QUEUED)) as made:
        yield made


@pytest.mark.wide
async def test_a_third_of_the_users_leave_and_the_others_get_their_tokens(live: Live) -> None:
    worker, files = worker_pid(live), open_files(live)
    async with Crowd(live.url, SEED, leaving=0.3).talking() as crowd:
        await crowd.until("left", 12)
        await crowd.until("answered", 12)
    await asyncio.to_thread(check_idle, live, files)
    assert worker_pid(live) == worker


async def test_ten_times_too_many_users_are_served_or_refused(live: Live) -> None:
    worker, files = worker_pid(live), open_files(live)
    async with Crowd(live.url, SEED + 1, num_users=10 * (QUEUED + 5), leaving=0, may_refuse=True).talking() as crowd:
        await crowd.until("refused", 50)
        await crowd.until("answered", 10)
    await asyncio.to_thread(check_idle, live, files)
    assert worker_pid(live) == worker


@pytest.mark.parametrize("num_cut", some([20, 60], 20))
async def test_connections_cut_at_any_byte_disturb_nobody(live: Live, num_cut: int) -> None:
    """In the head, in the body, and in the reply; cleanly and by a reset."""
    print(f"seed {SEED + 2}")
    rng = np.random.default_rng(SEED + 2)
    worker, files = worker_pid(live), open_files(live)
    host, port = live.url.removeprefix("http://").split(":")
    async with Crowd(live.url, SEED + 3, num_users=3, leaving=0).talking() as crowd:
        for _ in range(num_cut):
            turn = scripts()[rng.integers(len(scripts()))][0]
            content = json.dumps(body_of(turn)).encode()
            whole = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
            )
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(whole[: rng.integers(1, len(whole) + 1)] if rng.random() < 0.6 else whole)
            await writer.drain()
            await asyncio.sleep(rng.exponential(0.02))
            if rng.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
        await crowd.until("answered", 3)
    await asyncio.to_thread(check_idle, live, files)
    assert worker_pid(live) == worker
