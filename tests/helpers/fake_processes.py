"""Real processes around the fake engine: ``python -m tests.helpers.fake_processes KIND ...``.

``worker ENDPOINT`` serves the fake engine, ``scheduler ENDPOINT`` starts such workers, and ``client MODEL REPLICAS`` owns
such a scheduler, for tests that kill the owner.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from hiserve.core.request import SamplingParams
from hiserve.engine import service
from hiserve.scheduler import process, supervisor
from hiserve.scheduler.client import EngineClient
from tests.helpers.fake_engine import build
from tests.helpers.settings import settings_of

FAKE_WORKER, FAKE_SCHEDULER, FAKE_CLIENT = (
    (sys.executable, "-m", "tests.helpers.fake_processes", kind) for kind in ("worker", "scheduler", "client")
)
SETTINGS = {
    "max_model_len": 100_000,
    "kv_pages": 10_000,
    "max_running_requests": 8,
    "max_batched_tokens": 512,
    "host_cache_gib": 0,
    "log_level": "error",
}


async def own(model: str, replicas: str) -> None:
    """Prints one line when the engine is ready, and keeps two requests running."""
    client = await EngineClient.start(settings_of(**SETTINGS, model=model, replicas=replicas), command=FAKE_SCHEDULER)
    print("ready", flush=True)

    async def read(first: int) -> None:
        prompt = np.arange(first, first + 20, dtype=np.int32)
        async for _ in client.generate(prompt, SamplingParams(max_tokens=90_000)):
            pass

    await asyncio.gather(read(0), read(500))


def main(kind: str, *arguments: str) -> int:
    match kind:
        case "worker":
            return service.serve(*arguments, build)
        case "scheduler":
            supervisor.RESTART_DELAYS_S = (0.0, 0.01, 0.02, 0.05)
            return process.main(*arguments, FAKE_WORKER)
        case _:
            asyncio.run(own(*arguments))
            return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
