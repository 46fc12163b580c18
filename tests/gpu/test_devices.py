"""Each replica has its own device: its weights and pool lie there, and so do those of its successor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from hiserve.cache.storage.cache_identity import identify
from hiserve.cache.storage.host_segment import probe_segments
from hiserve.config.options import make_options
from hiserve.config.settings import Settings
from hiserve.core.machine import probe
from hiserve.core.request import SamplingParams
from hiserve.core.resolve import resolve
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.scheduler.client import EngineClient
from tests.helpers.processes import wait_dead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MIB = 1 << 20
TAKEN = 300 * MIB  # by a context alone; a device that nobody uses loses nothing


def free() -> list[int]:
    return [torch.cuda.mem_get_info(number)[0] for number in range(2)]


def config(**settings: object) -> Settings:
    # In float32 a reply is the same in any batch.
    fixed = {
        "kv_pages": 2048,
        "max_running_requests": 8,
        "host_cache_gib": 0.1,
        "dtype": "float32",
        "log_level": "warning",
    }
    given = make_options(**fixed, **settings)
    folder, model = read_model(given.model)
    return identify(
        resolve(given, model_facts(given, folder, model), probe_segments(given, probe())).settings, folder, model
    )


async def reply(client: EngineClient, first: int) -> list[int]:
    tokens: list[int] = []
    prompt = np.arange(first, first + 40, dtype=np.int32)
    async for delta in client.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)):
        tokens += delta.tokens
    return tokens


async def until_free(before: list[int], number: int) -> None:
    async with asyncio.timeout(60):
        while free()[number] < before[number] - 64 * MIB:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_replica_runs_on_the_device_that_was_chosen_and_on_no_other(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = free()
    client = await EngineClient.start(config(devices=str(number)))
    pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
    try:
        taken = [was - now for was, now in zip(before, free(), strict=True)]
        assert taken[number] > TAKEN, taken
        assert taken[1 - number] < 16 * MIB, taken
        assert len(await reply(client, 100)) == 24
    finally:
        await client.stop()
        await asyncio.to_thread(wait_dead, pids)
    await until_free(before, number)


async def test_two_replicas_have_a_device_each_also_after_a_death_and_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = free()
    client = await EngineClient.start(config(replicas=2))
    try:
        taken = [was - now for was, now in zip(before, free(), strict=True)]
        assert min(taken) > TAKEN, taken
        assert abs(taken[0] - taken[1]) < 64 * MIB, f"one plan, two devices: {taken}"
        expected = await asyncio.gather(*(reply(client, first) for first in range(8)))
        victim = client.started.workers[1].pid
        os.kill(victim, signal.SIGKILL)
        again = await asyncio.gather(*(reply(client, first) for first in range(8)))
        assert again == expected
        async with asyncio.timeout(120):
            while [worker.incarnation for worker in (await client.status()).workers if worker.startup_s] != [1, 2]:
                await asyncio.sleep(0.1)
        after = [was - now for was, now in zip(before, free(), strict=True)]
        assert abs(after[1] - taken[1]) < 256 * MIB, f"the successor lies elsewhere: {taken}, then {after}"
        assert abs(after[0] - taken[0]) < 64 * MIB, f"{taken}, then {after}"
    finally:
        pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
        await client.stop()
        await asyncio.to_thread(wait_dead, pids)
