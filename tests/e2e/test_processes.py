"""Requests through a real scheduler and real workers around an engine without a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import ContextLengthError, EngineError, RequestError, SlowReaderError
from hiserve.scheduler.client import EngineClient
from hiserve.scheduler.request_stream import TOKEN_BYTES
from tests.helpers.fake_engine import FAIL, reply
from tests.helpers.process_engine import collect, engine, finish, order, private_folder, settled, tokens, until_running
from tests.helpers.processes import resident_bytes, wait_resting
from tests.helpers.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with private_folder(tmp_path, monkeypatch):
        yield


async def test_two_hundred_requests_with_random_aborts_each_end_once() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    ends: dict[int, str] = {}

    async def one(client: EngineClient, number: int, abort_after: int | None, max_tokens: int) -> None:
        prompt = tokens(number * 100)
        got: list[int] = []
        await asyncio.sleep(rng.random() * 0.2)
        async with aclosing(client.generate(prompt, SamplingParams(max_tokens=max_tokens))) as deltas:
            async for delta in deltas:
                got += delta.tokens
                if abort_after is not None and len(got) >= abort_after:
                    ends[number] = "aborted"
                    break
                if delta.finish:
                    assert number not in ends
                    ends[number] = delta.finish.text or ""
        assert got == reply(prompt, max_tokens)[: len(got)]
        assert abort_after is not None or len(got) == max_tokens

    async with engine(replicas=2) as client:
        plan = [(number, rng.choice([0, 1, 5]) if rng.random() < 0.3 else None) for number in range(200)]
        await asyncio.gather(*(one(client, number, after, rng.randint(1, 30)) for number, after in plan))
        assert len(ends) == 200
        assert list(ends.values()).count("aborted") > 20
        await settled(client)


async def test_requests_cancelled_while_queued_running_or_unread_leave_nothing() -> None:
    async with engine(max_running_requests=2) as client:
        tasks = [asyncio.create_task(collect(client, tokens(100 * number), 90_000)) for number in range(10)]
        await until_running(client, 2 + 1)  # a worker holds one more
        assert (await client.status()).queued == 7
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await settled(client)
        await finish(client, tokens(0))


async def test_an_abort_by_tag_ends_those_requests_alone() -> None:
    async def read(number: int, tag: str) -> tuple[FinishReason, int]:
        stream = client.generate(tokens(100 * number), SamplingParams(max_tokens=90_000), tag=tag)
        deltas = [delta async for delta in stream]
        return deltas[-1].finish, sum(len(delta.tokens) for delta in deltas)

    async with engine(max_running_requests=2) as client:
        tasks = [asyncio.create_task(read(number, "ab"[number % 2])) for number in range(6)]
        await asyncio.sleep(0.1)
        assert client.abort("nobody") == 0
        assert client.abort("a") == 3
        assert [(await task)[0] for task in tasks[::2]] == [FinishReason.ABORT] * 3
        await asyncio.sleep(0.05)
        assert client.num_inflight == 3
        assert client.abort() == 3
        assert sum([(await task)[1] for task in tasks]) > 0
        await settled(client)
        assert client.abort() == 0


async def test_closing_after_the_end_is_harmless() -> None:
    async with engine() as client:
        generator = client.generate(tokens(0), SamplingParams(max_tokens=2))
        assert len([delta async for delta in generator]) >= 1
        await generator.aclose()
        await settled(client)


async def test_first_come_is_first_served() -> None:
    order_of_ends: list[int] = []

    async def one(client: EngineClient, number: int) -> None:
        await finish(client, tokens(number * 100), 3)
        order_of_ends.append(number)

    async with engine(max_running_requests=1) as client:
        await asyncio.gather(*(one(client, number) for number in range(12)))
    assert order_of_ends == list(range(12))


async def test_a_conversation_returns_to_the_worker_that_holds_its_prefix() -> None:
    async with engine(replicas=2, policy="longest-prefix") as client:
        history = {number: tokens(10_000 * number, 64) for number in range(6)}

        async def turn(number: int, question: int) -> int:
            deltas = await collect(client, history[number], 16)
            answer = np.array([token for delta in deltas for token in delta.tokens], dtype=np.int32)
            history[number] = np.concatenate([history[number], answer, tokens(question, 20)])
            assert deltas[0].cached is not None
            return deltas[0].cached.num_tokens

        await asyncio.gather(*(turn(number, 77_000) for number in history))  # at once: spread over both
        before = [worker.stats.steps for worker in (await client.status()).workers]
        for number in history:
            for question in (78_000, 79_000):  # without its prefix, the second would go to the other worker
                prompt = history[number]
                # All whole pages of the history, but for the newest token, which was never computed.
                assert await turn(number, question) >= len(prompt) - 20 - 16
        after = [worker.stats.steps for worker in (await client.status()).workers]
        assert [now - then for now, then in zip(after, before, strict=True)] == [6 * 16, 6 * 16]


async def test_both_workers_are_used_when_no_prefix_is_shared() -> None:
    async with engine(replicas=2) as client:
        await asyncio.gather(*(finish(client, tokens(1000 * number), 20) for number in range(16)))
        steps = [worker.stats.steps for worker in (await client.status()).workers]
        assert min(steps) >= 20


async def test_a_flush_empties_every_worker_and_the_index() -> None:
    async with engine(replicas=2) as client:
        await asyncio.gather(*(finish(client, tokens(1000 * number, 33), 2) for number in range(4)))
        assert (await collect(client, tokens(0, 33)))[0].cached == CacheUse(device=32)
        assert await client.flush(("host",)) == 0
        assert (await collect(client, tokens(0, 33)))[0].cached == CacheUse(device=32)
        assert await client.flush() >= 8
        assert (await collect(client, tokens(0, 33)))[0].cached == CacheUse()


async def test_every_worker_shows_its_tree() -> None:
    async with engine(replicas=2) as client:
        trees = await client.inspect(5)
        assert [(tree.replica, tree.incarnation, [node.depth for node in tree.nodes]) for tree in trees] == [
            (0, 1, [5]),
            (1, 1, [5]),
        ]


async def test_a_reader_that_never_reads_slows_nobody_and_loses_nothing() -> None:
    async with engine() as client:
        sleeper = client.generate(tokens(0), SamplingParams(max_tokens=3000))
        first = await anext(sleeper)
        await asyncio.gather(*(finish(client, tokens(1000 * number), 100) for number in range(1, 6)))
        while client.num_inflight:
            await asyncio.sleep(0.01)
        rest = [delta async for delta in sleeper]
        assert len(rest) == 1, "what the reader missed is one delta"
        assert first.tokens + rest[0].tokens == reply(tokens(0), 3000)


async def test_a_stream_is_ended_when_too_much_of_it_is_unread_and_no_other() -> None:
    async with engine(max_unread_bytes=500 * TOKEN_BYTES) as client:
        sleeper = client.generate(tokens(0), SamplingParams(max_tokens=90_000))
        await anext(sleeper)
        await asyncio.gather(*(finish(client, tokens(1000 * number), 1000) for number in range(1, 6)))
        await settled(client)  # although nobody has read
        assert client.num_slow_readers == 1
        with pytest.raises(SlowReaderError, match="were not read in time"):
            await anext(sleeper)
        await finish(client, tokens(0), 1000)


async def test_a_client_that_stands_still_costs_the_scheduler_no_memory() -> None:
    async with engine(max_running_requests=32) as client:
        num_batches = 0
        deliver = client._deliver

        def counting(*news: object) -> None:
            nonlocal num_batches
            num_batches += 1
            deliver(*news)  # type: ignore[arg-type]

        client._deliver = counting  # type: ignore[method-assign]
        tasks = [asyncio.create_task(finish(client, tokens(1000 * number), 2500)) for number in range(32)]
        await until_running(client, 32)
        before = resident_bytes(client.started.scheduler_pid)
        wait_resting(client.started.workers[0].pid)  # the event loop stands still, on purpose
        growth = resident_bytes(client.started.scheduler_pid) - before
        await asyncio.gather(*tasks)
        steps = (await client.status()).workers[0].stats.steps
        assert steps >= 2500
        assert num_batches < steps, "nothing was merged"
        assert growth < 16 * 2**20


async def test_a_request_that_cannot_run_is_refused_with_a_typed_error() -> None:
    refused = [(tokens(0, 512), ContextLengthError), (tokens(0, 0), RequestError), (tokens(-1, 5), RequestError)]
    async with engine(max_model_len=512) as client:
        for prompt, kind in refused:
            with pytest.raises(kind) as caught:
                await anext(client.generate(prompt, SamplingParams()))
            assert type(caught.value) is kind
        await settled(client)


async def test_a_request_the_engine_fails_harms_no_other() -> None:
    async with engine() as client:
        others = [asyncio.create_task(finish(client, tokens(1000 * number), 100)) for number in range(4)]
        with pytest.raises(EngineError, match="cursed"):
            await collect(client, order(FAIL))
        await asyncio.gather(*others)


async def test_malformed_frames_are_counted_and_the_request_answered() -> None:
    async with engine() as client:
        client._process.send([b"\xc1", b"garbage"])
        client._process.send([b""])
        with pytest.raises(RequestError, match="malformed"):
            await self_made(client)
        assert (await client.status()).malformed_messages == 3
        await finish(client, tokens(0))


async def self_made(client: EngineClient) -> None:
    """A generate whose prompt frame is cut in the middle of a token."""
    send = client._process.send

    def cut(frames: list[bytes]) -> None:
        send([frames[0], b"\x00\x00\x00"] if len(frames) == 2 else frames)

    client._process.send = cut  # type: ignore[method-assign]
    try:
        await asyncio.wait_for(anext(client.generate(tokens(0), SamplingParams())), PATIENCE_S)
    finally:
        client._process.send = send  # type: ignore[method-assign]
