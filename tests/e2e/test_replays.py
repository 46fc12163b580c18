"""Whatever a request asks for, it gets the same of several workers, one after the other, as of one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.config.options import make_options
from hiserve.config.settings import Settings
from hiserve.core.machine import probe
from hiserve.core.request import FinishReason, SamplingParams, SpecParams
from hiserve.core.resolve import resolve
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.ipc.messages import WorkerFacts
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.scheduler.client import EngineClient
from tests.helpers.forks import forked_engines
from tests.helpers.grammars import GRAMMARS
from tests.helpers.settings import identified
from tests.helpers.waiting import PATIENCE_S

SEED = 41
NUM_NEW = 40
EOS = 1  # of nano
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "page_size": 16,
    "max_model_len": 512,
    "kv_pages": 300,
    "max_running_requests": 16,
    "max_batched_tokens": 64,
    "cpu_threads": 1,
    "host_cache_gib": 0.1,
    "log_level": "error",
}
DRAWN = {"temperature": 0.9, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": DRAWN,
    "filtered": DRAWN | {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": DRAWN | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "biased": DRAWN | {"logit_bias": {11: 4.0, 12: -100.0}},
    "ends by itself": DRAWN | {"ignore_eos": False, "min_tokens": 20, "logit_bias": {EOS: 8.0}},
    "of a grammar": DRAWN | {"grammar": GRAMMARS["object"]},
    "of a grammar that ends": DRAWN | {"grammar": GRAMMARS["json"], "max_tokens": 200},
    "of calls": DRAWN | {"grammar": GRAMMARS["calls"]},
    "stops": DRAWN,  # at a token of its own, set below
    "scores": DRAWN | {"logprobs": 2},
    "scores of the prompt": DRAWN | {"logprobs": 1, "prompt_logprobs": 1},
    "without drafts": DRAWN | {"spec": SpecParams(enabled=False)},
    "second choice": DRAWN,
    "short": DRAWN | {"max_tokens": 24},
}


@dataclass
class Got:
    """What a reader saw of one request."""

    tokens: list[int] = field(default_factory=list)
    scores: bytes = b""
    finish: FinishReason = FinishReason.RUNNING
    cached: list[CacheUse] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    drafts: list[DraftUse] = field(default_factory=list)


def resolved() -> Settings:
    given = make_options(**SETTINGS)
    return identified(resolve(given, model_facts(given, *read_model(given.model)), probe()).settings)


def prompt_of(name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    rng = np.random.default_rng([SEED, *name.encode()])
    return rng.integers(7, 4096, 250 if "prompt" in name else int(rng.integers(20, 120))).astype(np.int32)


async def read(client: EngineClient, name: str, sampling: SamplingParams, got: Got) -> None:
    async for delta in client.generate(prompt_of(name), sampling, choice=int("choice" in name)):
        assert got.finish is FinishReason.RUNNING, "news after the end"
        got.tokens += delta.tokens
        got.scores += delta.scores
        got.finish = delta.finish
        got.cached += [delta.cached] if delta.cached is not None else []
        got.queue_s += [delta.queue_s] if delta.queue_s >= 0 else []
        got.drafts += [delta.drafts] if delta.drafts is not None else []


def start(client: EngineClient, asked: dict[str, SamplingParams], got: dict[str, Got]) -> list[asyncio.Task[None]]:
    """Begins to read all at once."""
    return [asyncio.create_task(read(client, name, sampling, got[name])) for name, sampling in asked.items()]


async def answers(client: EngineClient, asked: dict[str, SamplingParams]) -> dict[str, Got]:
    """Reads all."""
    got = {name: Got() for name in asked}
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*start(client, asked, got))
    return got


async def kill(client: EngineClient, incarnation: int, is_due: Callable[[WorkerFacts], bool]) -> None:
    """Kills a worker when it is due."""
    async with asyncio.timeout(PATIENCE_S):
        while not (workers := (await client.status()).workers) or workers[0].incarnation != incarnation:
            await asyncio.sleep(0.01)
        while not is_due(workers[0]):
            await asyncio.sleep(0.01)
            workers = (await client.status()).workers
    os.kill(workers[0].pid, signal.SIGKILL)


async def test_every_request_gets_what_it_would_have_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wait to be killed: a test that gets no CPU for long kills none that is done."""
    print(f"seed {SEED}")
    asked = {name: SamplingParams(**({"max_tokens": NUM_NEW, "ignore_eos": True} | how)) for name, how in CASES.items()}
    share = sum(sampling.max_tokens or 0 for sampling in asked.values()) // 8
    with forked_engines():
        client = await EngineClient.start(resolved())
    try:
        expected = await answers(client, asked)
        stop = next(token for token in expected["stops"].tokens[25:] if token not in expected["stops"].tokens[:25])
        asked["stops"] = msgspec.structs.replace(asked["stops"], stop_token_ids=(stop,))
        expected |= await answers(client, {"stops": asked["stops"]})
    finally:
        await client.stop()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    worker = f"tests.faults.held_worker {len(asked)}:{len(asked) // 2}:{share}"
    with forked_engines():
        command = (sys.executable, "-m", "tests.faults.scheduler", worker)
        client = await EngineClient.start(resolved(), command=command)
    try:
        got = {name: Got() for name in asked}
        tasks = start(client, asked, got)
        await kill(client, 1, lambda _: bool(got["scores of the prompt"].scores))
        await kill(client, 2, lambda it: it.stats.generated_tokens >= share)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks)
        status = await client.status()
    finally:
        await client.stop()
    print("replays:", status.replays, "recovery:", status.recovery)
    assert status.workers[0].incarnation == 3
    assert status.replays.requests > len(asked)
    assert status.replays.cached["host"] > 0, "nothing was found on the host"
    assert len({token for each in expected.values() for token in each.tokens}) >= 20
    assert expected["of a grammar that ends"].finish in (FinishReason.STOP, FinishReason.COMPLETE)
    assert expected["stops"].finish is expected["ends by itself"].finish is FinishReason.STOP
    for name, one in expected.items():
        other = got[name]
        assert other.tokens == one.tokens, name
        assert other.finish is one.finish, name
        assert len(other.cached) == 1 and len(other.queue_s) == 1, name
        assert len(other.scores) == len(one.scores), f"{name}: scores were lost, or told twice"
        values = [np.frombuffer(scores, dtype=np.float32) for scores in (one.scores, other.scores)]
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6, err_msg=name)
        steps = [use.verify_steps for use in other.drafts]
        assert steps == sorted(steps), f"{name}: drafts of a dead worker were forgotten"
    assert any(one.drafts and one.drafts[-1].accepted for one in got.values()), "nothing was drafted"
    assert expected["drawn"].tokens != expected["second choice"].tokens
