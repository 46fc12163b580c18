"""Real scheduler and worker processes around an engine without a model: requests, deaths, starts and stops."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvloop

from hiserve.config import make_config
from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import ContextLengthError, EngineError, HiserveError, ModelError, RequestError, UnavailableError
from hiserve.scheduler.client import Delta, EngineClient
from tests.helpers.fake_client import FAKE_SCHEDULER
from tests.helpers.fake_engine import CRASH, FAIL, KILL, LIE, reply
from tests.helpers.processes import children, is_alive, resident_bytes, wait_dead

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything temporary of all processes lands here, and nothing of it may stay."""
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "an endpoint was left behind"


@asynccontextmanager
async def engine(**settings: object) -> AsyncIterator[EngineClient]:
    """Starts an engine, and after the test sees to it that no process is left."""
    defaults = {
        "max_model_len": 100_000,
        "kv_pages": 10_000,
        "max_running_requests": 8,
        "max_batched_tokens": 512,
        "log_level": "error",
    }
    client = await EngineClient.start(make_config(**(defaults | settings)), command=FAKE_SCHEDULER)
    pids = [client.started.scheduler_pid, *(worker.pid for worker in client.started.workers)]
    try:
        yield client
    finally:
        pids += children(pids[0]) if is_alive(pids[0]) else []
        await client.stop()
        await asyncio.to_thread(wait_dead, pids)


def tokens(first: int, length: int = 20) -> Int32Array:
    return np.arange(first, first + length, dtype=np.int32)


def order(order_id: int) -> Int32Array:
    return np.array([order_id, 1, 2], dtype=np.int32)


async def collect(client: EngineClient, prompt: Int32Array, max_tokens: int = 4) -> list[Delta]:
    return [delta async for delta in client.generate(prompt, SamplingParams(max_tokens=max_tokens))]


async def finish(client: EngineClient, prompt: Int32Array, max_tokens: int = 4) -> list[int]:
    """Runs a request to its end and checks what it got."""
    deltas = await collect(client, prompt, max_tokens)
    got = [token for delta in deltas for token in delta.tokens]
    assert got == reply(prompt, max_tokens)
    assert [delta.finish for delta in deltas[:-1]] == [FinishReason.RUNNING] * (len(deltas) - 1)
    assert deltas[-1].finish is FinishReason.LENGTH
    assert deltas[0].cached >= 0
    assert all(delta.cached == -1 for delta in deltas[1:])
    return got


async def settled(client: EngineClient) -> None:
    """Waits until nothing is owed, here, in the scheduler and in the workers; fails if something stays."""
    async with asyncio.timeout(10):
        while True:
            status = await client.status()
            if not client.num_inflight and not status.queued and not any(w.stats.running for w in status.workers):
                return
            await asyncio.sleep(0.01)


async def until_served(client: EngineClient) -> None:
    """Waits until a request is answered again after a death."""
    async with asyncio.timeout(20):
        while True:
            try:
                await finish(client, tokens(7000))
                return
            except EngineError:
                await asyncio.sleep(0.01)


# --- requests -----------------------------------------------------------------------------


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
        await asyncio.sleep(0.1)
        assert (await client.status()).queued == 7
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await settled(client)
        await finish(client, tokens(0))


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
            return deltas[0].cached

        await asyncio.gather(*(turn(number, 77_000) for number in history))  # at once: spread over both
        before = [worker.stats.steps for worker in (await client.status()).workers]
        for question in (78_000, 79_000):
            for number, prompt in history.items():  # one by one: without its prefix each would go to the first
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
        assert (await collect(client, tokens(0, 33)))[0].cached == 32
        assert await client.flush() >= 8
        assert (await collect(client, tokens(0, 33)))[0].cached == 0


async def test_a_reader_that_never_reads_slows_nobody_and_loses_nothing() -> None:
    async with engine() as client:
        sleeper = client.generate(tokens(0), SamplingParams(max_tokens=3000))
        first = await anext(sleeper)
        begin = time.monotonic()
        await asyncio.gather(*(finish(client, tokens(1000 * number), 100) for number in range(1, 6)))
        assert time.monotonic() - begin < 5
        while client.num_inflight:
            await asyncio.sleep(0.01)
        rest = [delta async for delta in sleeper]
        assert len(rest) == 1, "what the reader missed is one delta"
        assert first.tokens + rest[0].tokens == reply(tokens(0), 3000)


async def test_a_client_that_stands_still_costs_the_scheduler_no_memory() -> None:
    async with engine(max_running_requests=32) as client:
        num_batches = 0
        spread = client._spread

        def counting(*news: object) -> None:
            nonlocal num_batches
            num_batches += 1
            spread(*news)  # type: ignore[arg-type]

        client._spread = counting  # type: ignore[method-assign]
        tasks = [asyncio.create_task(finish(client, tokens(1000 * number), 2500)) for number in range(32)]
        await asyncio.sleep(0.2)
        before = resident_bytes(client.started.scheduler_pid)
        time.sleep(4)  # the event loop stands still, on purpose
        growth = resident_bytes(client.started.scheduler_pid) - before
        await asyncio.gather(*tasks)
        steps = (await client.status()).workers[0].stats.steps
        assert steps >= 2500
        assert num_batches < steps, "nothing was merged"
        assert growth < 16 * 2**20


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [(tokens(0, 512), ContextLengthError), (tokens(0, 0), RequestError), (tokens(-1, 5), RequestError)],
)
async def test_a_request_that_cannot_run_is_refused_with_a_typed_error(
    prompt: Int32Array, kind: type[HiserveError]
) -> None:
    async with engine(max_model_len=512) as client:
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
        await asyncio.wait_for(anext(client.generate(tokens(0), SamplingParams())), 10)
    finally:
        client._process.send = send  # type: ignore[method-assign]


# --- deaths -------------------------------------------------------------------------------


@pytest.mark.parametrize("death", [CRASH, KILL, LIE])
async def test_a_worker_that_dies_costs_its_requests_one_error_each_and_is_replaced(death: int) -> None:
    async with engine() as client:
        tasks = [asyncio.create_task(collect(client, tokens(1000 * number), 90_000)) for number in range(6)]
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="worker"):
            await collect(client, order(death))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results), results
        await until_served(client)
        await settled(client)
        [worker] = (await client.status()).workers
        assert worker.incarnation == 2


async def test_a_killed_worker_harms_no_request_of_the_other() -> None:
    async with engine(replicas=2) as client:
        tasks = [asyncio.create_task(collect(client, tokens(1000 * number), 400)) for number in range(8)]
        await asyncio.sleep(0.1)
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, EngineError) for result in results) == 4
        assert sum(isinstance(result, list) for result in results) == 4
        await until_served(client)
        async with asyncio.timeout(20):
            while len((await client.status()).workers) < 2:
                await asyncio.sleep(0.01)
        assert [worker.incarnation for worker in (await client.status()).workers] == [2, 1]


async def test_queued_requests_survive_the_death_of_the_only_worker() -> None:
    async with engine(max_running_requests=1) as client:
        doomed = [asyncio.create_task(collect(client, tokens(1000 * number), 90_000)) for number in range(2)]
        await asyncio.sleep(0.05)
        queued = [asyncio.create_task(finish(client, tokens(1000 * number), 5)) for number in range(2, 6)]
        await asyncio.sleep(0.05)
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        await asyncio.gather(*queued)


async def test_a_killed_scheduler_fails_every_request_and_takes_its_workers_along() -> None:
    async with engine(replicas=2) as client:
        tasks = [asyncio.create_task(collect(client, tokens(1000 * number), 90_000)) for number in range(30)]
        await asyncio.sleep(0.1)
        os.kill(client.started.scheduler_pid, signal.SIGKILL)
        begin = time.monotonic()
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - begin < 3
        assert all(isinstance(result, UnavailableError) for result in results)
        assert not client.is_ready
        assert client.num_inflight == 0
        with pytest.raises(UnavailableError, match="SIGKILL"):
            await client.status()
        await asyncio.to_thread(wait_dead, [worker.pid for worker in client.started.workers], 2.0)


async def test_interrupts_and_terminations_are_left_to_the_parent() -> None:
    async with engine() as client:
        for pid in (client.started.scheduler_pid, client.started.workers[0].pid):
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        await finish(client, tokens(0))
        assert (await client.status()).workers[0].incarnation == 1


class Family:
    """A client in a process of its own, with its scheduler and workers."""

    def __init__(self, model: str = "fake", replicas: int = 2) -> None:
        self.client = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fake_client", model, str(replicas)], stdout=subprocess.PIPE
        )
        self._num_workers = replicas

    def wait_ready(self) -> None:
        assert self.client.stdout is not None
        assert self.client.stdout.readline() == b"ready\n"
        self.wait_born()

    def wait_born(self) -> None:
        """Waits until the workers' processes exist."""
        deadline = time.monotonic() + 20
        while not (schedulers := children(self.client.pid)) or len(children(schedulers[0])) < self._num_workers:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        [self.scheduler] = schedulers
        self.workers = children(self.scheduler)

    def wait_dead(self) -> None:
        wait_dead([self.client.pid, self.scheduler, *self.workers])
        self.client.wait()
        assert self.client.stdout is not None
        self.client.stdout.close()


@pytest.mark.parametrize(
    "victims", ["client", "client scheduler", "scheduler client", "worker client", "client worker"]
)
def test_no_order_of_kills_leaves_an_orphan(victims: str) -> None:
    family = Family()
    family.wait_ready()
    pids = {"client": family.client.pid, "scheduler": family.scheduler, "worker": family.workers[0]}
    for victim in victims.split():
        os.kill(pids[victim], signal.SIGKILL)
    family.wait_dead()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.3])
def test_a_client_killed_while_its_workers_start_leaves_nothing(delay_s: float) -> None:
    family = Family("slow")
    family.wait_born()
    time.sleep(delay_s)
    family.client.kill()
    family.wait_dead()


# --- starts and stops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("missing", ModelError, "the folder 'missing' has no config.json. Give a checkpoint folder."),
        ("broken", EngineError, "RuntimeError: the builder is broken"),
        ("vanishes", EngineError, "worker 0 died while it started (exit code 7)."),
    ],
)
async def test_a_failed_start_is_one_clear_error(
    model: str, kind: type[HiserveError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HiserveError) as caught:
        async with engine(model=model):
            pass
    assert type(caught.value) is kind
    assert caught.value.message == message
    assert children(os.getpid()) == []
    if kind is ModelError:
        assert "Traceback" not in capfd.readouterr().err
        assert "Traceback" in caught.value.__notes__[0]


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    task = asyncio.create_task(anext(aiter_of(engine(model="slow"))))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_dead, children(os.getpid()))


async def aiter_of(context: object) -> AsyncIterator[EngineClient]:
    async with context as client:  # type: ignore[attr-defined]
        yield client


async def test_a_scheduler_that_cannot_run_is_one_clear_error() -> None:
    with pytest.raises(EngineError, match=r"scheduler process died \(exit code 5\)"):
        await EngineClient.start(make_config(), command=(sys.executable, "-c", "raise SystemExit(5)"))


async def test_stop_drains_as_long_as_it_was_told_and_fails_the_rest() -> None:
    async with engine() as client:
        short = asyncio.create_task(finish(client, tokens(0), 50))
        long = asyncio.create_task(collect(client, tokens(1000), 90_000))
        await asyncio.sleep(0.05)
        await client.stop(drain_s=0.5)
        assert short.done()
        await short
        with pytest.raises(UnavailableError, match="stopped"):
            await long
        with pytest.raises(UnavailableError, match="stopped"):
            await collect(client, tokens(0))
        assert not client.is_ready


async def test_an_idle_engine_stops_quickly_even_when_asked_to_drain() -> None:
    async with engine(replicas=2) as client:
        begin = time.monotonic()
        await client.stop(drain_s=30)
        assert time.monotonic() - begin < 2


def test_an_engine_lives_in_uvloop_as_well() -> None:
    async def use() -> None:
        async with engine(replicas=2) as client:
            for worker in client.started.workers:
                assert list(worker.startup_s) == ["start process", "build"]
                assert 0 < worker.startup_s["start process"] < 20
            await asyncio.gather(*(finish(client, tokens(1000 * number), 50) for number in range(8)))
            running = asyncio.create_task(collect(client, tokens(0), 90_000))
            await asyncio.sleep(0.05)
            os.kill(client.started.scheduler_pid, signal.SIGKILL)
            with pytest.raises(UnavailableError):
                await running

    uvloop.run(use())


def test_an_engine_may_live_in_the_loop_of_a_background_thread() -> None:
    got: list[int] = []

    async def use() -> None:
        async with engine() as client:
            got.extend(await finish(client, tokens(0), 5))

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    thread.join(30)
    assert got == reply(tokens(0), 5)
