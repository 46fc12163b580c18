"""Groups whose ranks are processes: their tokens, what the death of one costs, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.config.options import make_options
from hiserve.config.settings import Settings
from hiserve.core.machine import probe
from hiserve.core.request import FinishReason
from hiserve.core.resolve import resolve
from hiserve.distributed import collectives
from hiserve.engine import ranks
from hiserve.errors import ConfigError, EngineError, ResourceError
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.scheduler.client import EngineClient
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.processes import children, is_alive, wait_dead
from tests.helpers.segment_name import segment_name
from tests.helpers.settings import identified
from tests.helpers.tiered import engine_of
from tests.helpers.waiting import PATIENCE_S, wait_until

GROUP: dict[str, Any] = SMALL_MODEL | pool(16) | {"tp": 2, "host_cache_gib": 0, "spec": "off"}
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(7, 4096, 20 + 9 * index).tolist() for index in range(3)]
SAMPLING = [SamplingParams(seed=i, temperature=0.8 * (i % 2), max_tokens=10, ignore_eos=True) for i in range(3)]


def open_sockets() -> set[str]:
    """Those of this process."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}


def tokens_of(llm: LLM, sampling: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, sampling)]


def test_a_rank_that_is_killed_ends_its_engine_by_name_and_nothing_stays() -> None:
    with LLM(**GROUP | {"tp": 1}) as llm:
        expected = tokens_of(llm, SAMPLING)
    before = set(children(os.getpid()))
    with LLM(**GROUP) as llm:
        (rank,) = set(children(os.getpid())) - before
        assert tokens_of(llm, SAMPLING) == expected

        def kill_later() -> None:
            wait_until(lambda: engine_of(llm).stats().running)
            os.kill(rank, signal.SIGKILL)

        thread = threading.Thread(target=kill_later)
        thread.start()
        begin_s = time.monotonic()
        with pytest.raises(EngineError, match=r"rank 1 of the group has ended \(killed by signal 9\)"):
            tokens_of(llm, [SamplingParams(max_tokens=100, ignore_eos=True)] * 3)
        thread.join()
        assert time.monotonic() - begin_s < PATIENCE_S / 2
    wait_dead([rank])
    assert set(children(os.getpid())) == before


class _Awaited(subprocess.Popen[bytes]):
    """A process that has ended once it is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wait()


@pytest.mark.parametrize("process", [subprocess.Popen, _Awaited], ids=["later", "before its setup is sent"])
def test_a_rank_that_ends_before_it_meets_the_others_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, process: type[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(ranks, "RANK_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(subprocess, "Popen", process)
    monkeypatch.setattr(collectives, "JOIN_S", PATIENCE_S)
    begin_s = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 of the group has ended \(exit code 3\)"):
        LLM(**GROUP)
    assert time.monotonic() - begin_s < PATIENCE_S / 2


def test_a_rank_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RANK_COMMAND", ("/nowhere/to/be/found",))
    before = open_sockets()
    with pytest.raises(ResourceError, match="rank 1 cannot be started"):
        LLM(**GROUP)
    assert open_sockets() <= before


def test_a_group_that_cannot_be_is_refused_before_anything_starts() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ConfigError, match=r"Use one of 1, 2, 4") as caught:
        LLM(**GROUP | {"tp": 3})
    assert caught.value.param == "tp"
    assert set(children(os.getpid())) == before


def resolved(**others: Any) -> Settings:
    given = make_options(
        **{name: value for name, value in (GROUP | others).items() if name != "in_process"}, device="cpu"
    )
    return identified(resolve(given, model_facts(given, *read_model(given.model)), probe()).settings)


async def read(client: EngineClient, index: int, max_tokens: int) -> list[int]:
    got: list[int] = []
    sampling = SamplingParams(seed=index, temperature=0.8 * (index % 2), max_tokens=max_tokens, ignore_eos=True)
    async for delta in client.generate(np.array(PROMPTS[index], dtype=np.int32), sampling):
        got += delta.tokens
    assert delta.finish is FinishReason.LENGTH
    return got


@pytest.mark.wide
@pytest.mark.parametrize("victim", ["rank", "first"])
async def test_a_dead_process_of_a_group_costs_its_requests_nothing(victim: str) -> None:
    """Its successor opens the segments of the host cache, each when the process has ended that had it."""
    with LLM(**GROUP | {"tp": 1}) as llm:
        sampling = [SamplingParams(seed=i, temperature=0.8 * (i % 2), max_tokens=80, ignore_eos=True) for i in range(3)]
        expected = tokens_of(llm, sampling)
    stack = contextlib.ExitStack()
    name = stack.enter_context(segment_name())
    client = await EngineClient.start(resolved(host_cache_name=name, host_cache_gib=0.01))
    try:
        worker = client.started.workers[0].pid
        (rank,) = children(worker)
        tasks = [asyncio.create_task(read(client, index, 80)) for index in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.status()).workers[0].stats.steps:
                await asyncio.sleep(0.001)
        os.kill(rank if victim == "rank" else worker, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*tasks) == expected
        assert (await client.status()).workers[0].incarnation == 2
        wait_dead([worker, rank])
        pids = [client.started.scheduler_pid, *children(client.started.scheduler_pid)]
    finally:
        await client.stop()
    await asyncio.to_thread(wait_dead, pids)
    assert not any(map(is_alive, pids))
    stack.close()
