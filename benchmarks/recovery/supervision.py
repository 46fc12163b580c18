"""What supervision and ledger take of the CPU time while nothing dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recovery.sizes import Sizes
from benchmarks.served import cpu_s
from hiserve.config.options import make_options
from hiserve.core.request import SamplingParams
from hiserve.launch import prepare
from hiserve.scheduler.client import EngineClient

MODULES = tuple(f"scheduler/{name}.py" for name in ("supervisor", "incarnation", "recovery", "quarantine", "ledger"))


async def watch(sizes: Sizes) -> dict[str, Any]:
    """Runs a load of streams that come and go for a while; returns CPU seconds and the share."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scheduler.json"
        command = (sys.executable, "-m", "benchmarks.recovery.sampled_scheduler", str(out))
        settings = prepare(make_options(log_level="warning", **sizes.settings)).identified()
        client = await EngineClient.start(settings, command=command)
        pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
        os.kill(client.started.scheduler_pid, signal.SIGUSR2)
        before, own = [cpu_s(pid) for pid in pids], time.process_time()
        await asyncio.gather(*(talk(client, sizes, index) for index in range(sizes.streams)))
        used = [cpu_s(pid) - first for pid, first in zip(pids, before, strict=True)]
        own = time.process_time() - own
        await client.stop()
        told = json.loads(out.read_text())
    ticks = sum(told["modules"].get(name, 0) for name in MODULES)
    watched_s = ticks / told["ticks"] * used[0] if told["ticks"] else 0.0
    total_s = sum(used) + own
    return {
        "client_cpu_s": round(own, 3),
        "scheduler_cpu_s": round(used[0], 3),
        "worker_cpu_s": round(sum(used[1:]), 3),
        "ticks": told["ticks"],
        "ticks_by_module": told["modules"],
        "supervision_and_ledger_cpu_s": round(watched_s, 4),
        "share": round(watched_s / total_s, 5),
    }


async def talk(client: EngineClient, sizes: Sizes, index: int) -> None:
    """Sends one request after the other until the time is over."""
    rng = np.random.default_rng(index)
    until = time.monotonic() + sizes.load_s
    while time.monotonic() < until:
        prompt = rng.integers(7, sizes.vocab_size, sizes.prompt // 4, dtype=np.int32)
        sampling = SamplingParams(max_tokens=sizes.before, seed=index, ignore_eos=True)
        async for _ in client.generate(prompt, sampling):
            pass
