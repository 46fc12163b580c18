"""Starts, stops and deaths of the three processes: one clear error each, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from hiserve.core.request import FinishReason
from hiserve.errors import EngineError, HiserveError, ModelError, UnavailableError
from hiserve.ipc.codec import Received
from hiserve.ipc.messages import Halted
from hiserve.scheduler import client as client_module
from hiserve.scheduler.client import EngineClient
from tests.helpers.fake_engine import CRASH, KILL, LIE, reply
from tests.helpers.fake_processes import FAKE_CLIENT
from tests.helpers.process_engine import (
    collect,
    engine,
    finish,
    order,
    private_folder,
    settled,
    slowly,
    tokens,
    until_running,
)
from tests.helpers.processes import children, wait_dead
from tests.helpers.settings import settings_of
from tests.helpers.waiting import PATIENCE_S, until, wait_until
from tests.helpers.widening import some


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with private_folder(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize("death", [CRASH, KILL, LIE])
async def test_a_request_that_kills_its_worker_fails_alone_and_the_others_get_what_they_would_have(
    death: int, tmp_path: Path
) -> None:
    async with engine() as client:
        with slowly(tmp_path):
            tasks = [asyncio.create_task(finish(client, tokens(1000 * number), 500)) for number in range(4)]
            await until_running(client, 4)
            dying = asyncio.create_task(collect(client, order(death)))
            await until(lambda: client.crash)
        with pytest.raises(EngineError, match="at last with no other"):
            await dying
        await asyncio.gather(*tasks)
        await settled(client)
        await finish(client, tokens(7000))
        status = await client.status()
        assert status.workers[0].incarnation > 2
        assert status.replays.requests >= 4


async def test_the_client_knows_of_deaths_and_restarts_when_they_come_and_keeps_them_when_the_scheduler_dies() -> None:
    """Nobody asks for the state between the worker's death and the scheduler's."""
    async with engine() as client:
        assert (client.crash, client.num_restarts) == (None, 0)
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        await until(lambda: client.num_restarts)
        os.kill(client.started.scheduler_pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await client.ended()
        assert client.crash is not None
        assert (client.crash.replica, client.crash.incarnation, client.crash.end) == (0, 1, "killed by SIGKILL")
        assert client.num_restarts == 1


async def test_a_killed_worker_costs_nobody_a_token(tmp_path: Path) -> None:
    async with engine(replicas=2) as client:
        with slowly(tmp_path):
            tasks = [asyncio.create_task(finish(client, tokens(1000 * number), 500)) for number in range(8)]
            await until_running(client, 4, 4)
            os.kill(client.started.workers[0].pid, signal.SIGKILL)
            await until(lambda: client.crash)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(PATIENCE_S):
            while len((await client.status()).workers) < 2:
                await asyncio.sleep(0.01)
        status = await client.status()
        assert [worker.incarnation for worker in status.workers] == [2, 1]
        assert status.replays.requests == 4


async def test_queued_requests_survive_the_death_of_the_only_worker() -> None:
    async with engine(max_running_requests=1) as client:
        first = [asyncio.create_task(finish(client, tokens(1000 * number), 400)) for number in range(2)]
        await asyncio.sleep(0.05)
        queued = [asyncio.create_task(finish(client, tokens(1000 * number), 5)) for number in range(2, 6)]
        await asyncio.sleep(0.05)
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        await asyncio.gather(*first, *queued)


async def test_requests_aborted_while_their_worker_starts_again_end_at_once(tmp_path: Path) -> None:
    async with engine(model="held") as client:
        tasks = [asyncio.create_task(collect(client, tokens(1000 * number), 90_000)) for number in range(6)]
        await until_running(client, 6)
        (tmp_path / "hold").touch()
        os.kill(client.started.workers[0].pid, signal.SIGKILL)
        while (await client.status()).queued < 6:
            await asyncio.sleep(0.001)
        assert client.abort() == 6
        for deltas in await asyncio.gather(*tasks):
            assert deltas[-1].finish is FinishReason.ABORT
        assert client.num_restarts == 0
        (tmp_path / "hold").unlink()
        await finish(client, tokens(7000))
        await settled(client)


async def test_a_killed_scheduler_fails_every_request_and_takes_its_workers_along() -> None:
    async with engine(replicas=2) as client:
        tasks = [asyncio.create_task(collect(client, tokens(1000 * number), 90_000)) for number in range(30)]
        await until_running(client, 8 + 1, 8 + 1)  # a worker holds one more
        os.kill(client.started.scheduler_pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, UnavailableError) for result in results)
        assert not client.is_ready
        assert client.num_inflight == 0
        with pytest.raises(UnavailableError, match="SIGKILL"):
            await client.status()
        await asyncio.to_thread(wait_dead, [worker.pid for worker in client.started.workers])


async def test_a_client_that_was_told_that_no_worker_is_left_says_so() -> None:
    async with engine() as client:
        assert client.is_ready and not client.trouble
        client._on_message(Received(Halted("no worker is left: it died.")))
        assert not client.is_ready
        assert client.trouble == "no worker is left: it died."


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
        self.client = subprocess.Popen([*FAKE_CLIENT, model, str(replicas)], stdout=subprocess.PIPE)
        self._num_workers = replicas

    def wait_ready(self) -> None:
        assert self.client.stdout is not None
        assert self.client.stdout.readline() == b"ready\n"
        self.wait_born()

    def wait_born(self) -> None:
        """Waits until the workers' processes exist."""

        def are_born() -> bool:
            schedulers = children(self.client.pid)
            return bool(schedulers) and len(children(schedulers[0])) == self._num_workers

        wait_until(are_born)
        [self.scheduler] = children(self.client.pid)
        self.workers = children(self.scheduler)

    def wait_dead(self) -> None:
        wait_dead([self.client.pid, self.scheduler, *self.workers])
        self.client.wait()
        assert self.client.stdout is not None
        self.client.stdout.close()


@pytest.mark.parametrize(
    "victims",
    some(
        ["client", "client scheduler", "scheduler client", "worker client", "client worker"],
        "client scheduler",
        "worker client",
    ),
)
def test_no_order_of_kills_leaves_an_orphan(victims: str) -> None:
    family = Family()
    family.wait_ready()
    pids = {"client": family.client.pid, "scheduler": family.scheduler, "worker": family.workers[0]}
    for victim in victims.split():
        with contextlib.suppress(ProcessLookupError):  # the first death may have taken it along
            os.kill(pids[victim], signal.SIGKILL)
    family.wait_dead()


@pytest.mark.parametrize("delay_s", some([0.0, 0.02, 0.05, 0.3], 0.0, 0.05))
def test_a_client_killed_while_its_workers_start_leaves_nothing(delay_s: float) -> None:
    family = Family("slow")
    family.wait_born()
    time.sleep(delay_s)
    family.client.kill()
    family.wait_dead()


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
    before = set(children(os.getpid()))
    with pytest.raises(HiserveError) as caught:
        async with engine(model=model):
            pass
    assert type(caught.value) is kind
    assert caught.value.message == message
    assert set(children(os.getpid())) <= before
    if kind is ModelError:
        assert "Traceback" not in capfd.readouterr().err
        assert "Traceback" in caught.value.__notes__[0]


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    before = set(children(os.getpid()))
    task = asyncio.create_task(anext(aiter_of(engine(model="slow"))))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_dead, set(children(os.getpid())) - before)


async def aiter_of(context: object) -> AsyncIterator[EngineClient]:
    async with context as client:  # type: ignore[attr-defined]
        yield client


async def test_a_scheduler_that_cannot_run_is_one_clear_error() -> None:
    with pytest.raises(EngineError, match=r"scheduler process died \(exit code 5\)"):
        await EngineClient.start(settings_of(), command=(sys.executable, "-c", "raise SystemExit(5)"))


async def test_stop_drains_as_long_as_it_was_told_and_fails_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    told_s: list[float] = []

    async def wait_for_short(event: asyncio.Event, timeout_s: float) -> bool:
        told_s.append(timeout_s)
        await asyncio.wait([short, asyncio.create_task(event.wait())], return_when=asyncio.FIRST_COMPLETED)
        return event.is_set()

    monkeypatch.setattr(client_module, "wait_for_event", wait_for_short)
    async with engine() as client:
        short = asyncio.create_task(finish(client, tokens(0), 50))
        long = asyncio.create_task(collect(client, tokens(1000), 90_000))
        await asyncio.sleep(0)
        await client.stop(drain_s=0.5)
        assert told_s == [0.5]
        assert short.done()
        await short
        with pytest.raises(UnavailableError, match="stopped"):
            await long
        with pytest.raises(UnavailableError, match="stopped"):
            await collect(client, tokens(0))
        assert not client.is_ready


async def test_an_idle_engine_stops_quickly_even_when_asked_to_drain() -> None:
    async with engine(replicas=2) as client:
        async with asyncio.timeout(PATIENCE_S):
            await client.stop(drain_s=3600)


def test_an_engine_lives_in_uvloop_as_well() -> None:
    async def use() -> None:
        async with engine(replicas=2) as client:
            for worker in client.started.workers:
                assert list(worker.startup_s) == ["start process", "build"]
                assert worker.startup_s["start process"] > 0
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
    thread.join(PATIENCE_S)
    assert got == reply(tokens(0), 5)
