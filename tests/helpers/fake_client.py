"""A process that owns an engine of fake workers, for tests that kill it: ``... fake_client MODEL REPLICAS``.

Prints one line when the engine is ready, and keeps two requests running.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from hiserve.core.request import SamplingParams
from hiserve.scheduler.client import EngineClient
from tests.helpers.settings import settings_of

FAKE_SCHEDULER = (sys.executable, "-m", "tests.helpers.fake_scheduler")


async def read(client: EngineClient, first: int) -> None:
    prompt = np.arange(first, first + 20, dtype=np.int32)
    async for _ in client.generate(prompt, SamplingParams(max_tokens=90_000)):
        pass


async def main() -> None:
    config = settings_of(
        model=sys.argv[1],
        replicas=sys.argv[2],
        max_model_len=100_000,
        kv_pages=10_000,
        max_running_requests=4,
        max_batched_tokens=64,
        host_cache_gib=0,
        log_level="error",
    )
    client = await EngineClient.start(config, command=FAKE_SCHEDULER)
    print("ready", flush=True)
    await asyncio.gather(read(client, 0), read(client, 500))


if __name__ == "__main__":
    asyncio.run(main())
