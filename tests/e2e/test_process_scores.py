"""What comes beside a request's tokens through real processes, and what must not: keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.core.request import SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import ModelError
from hiserve.scheduler.client import EngineClient, TokenDelta
from tests.helpers.fake_engine import score_words
from tests.helpers.process_engine import collect, engine, private_folder, settled, tokens
from tests.helpers.processes import wait_resting


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with private_folder(tmp_path, monkeypatch):
        yield


async def ask(client: EngineClient, first: int, sampling: SamplingParams) -> list[TokenDelta]:
    return [delta async for delta in client.generate(tokens(first), sampling)]


async def test_every_request_gets_its_own_scores_in_order() -> None:
    asked = [
        SamplingParams(max_tokens=30, logprobs=number % 3 or None, prompt_logprobs=number % 5 or None)
        for number in range(20)
    ]
    async with engine(replicas=2) as client:
        got = await asyncio.gather(*(ask(client, 100 * i, sampling) for i, sampling in enumerate(asked)))
        await settled(client)
    for sampling, deltas in zip(asked, got, strict=True):
        prompt, output = score_words(1, 20, sampling.prompt_logprobs), score_words(20, 50, sampling.logprobs)
        assert b"".join(delta.scores for delta in deltas) == prompt + output
        assert len([token for delta in deltas for token in delta.tokens]) == 30
        assert deltas[0].cached == CacheUse()


async def test_a_reader_that_was_away_finds_every_score() -> None:
    sampling = SamplingParams(max_tokens=200, logprobs=2, prompt_logprobs=1)
    async with engine() as client:
        stream = client.generate(tokens(0), sampling)
        deltas = [await anext(stream)]
        wait_resting(client.started.workers[0].pid, rest_s=0.3)  # nothing of this process runs meanwhile
        deltas += [delta async for delta in stream]
    assert b"".join(delta.scores for delta in deltas) == score_words(1, 20, 1) + score_words(20, 220, 2)
    assert len(deltas) < 150, "nothing was merged"


async def test_the_time_in_the_queue_is_told_once() -> None:
    async with engine(max_running_requests=1) as client:
        got = await asyncio.gather(*(collect(client, tokens(100 * i), 50) for i in range(4)))
    assert all(delta.queue_s == -1 for deltas in got for delta in deltas[1:])
    queue_s = [deltas[0].queue_s for deltas in got]
    assert min(queue_s) >= 0
    assert queue_s[3] > queue_s[0]


async def test_keys_stay_in_the_process_that_checks_them() -> None:
    with pytest.raises(ModelError) as caught:
        async with engine(model="tell_keys", api_key=("tenant-key",), admin_api_key="admin-key"):
            pass
    assert caught.value.message.startswith("the keys are ")
    assert "-key" not in caught.value.message
