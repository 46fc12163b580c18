"""The engine behind the gate: started again when it dies, and whoever asks meanwhile is told why he has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hiserve.errors import ResourceError, UnavailableError
from hiserve.server import engine_handle as gate_module
from hiserve.server.engine_handle import EngineHandle
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.waiting import PATIENCE_S


class Starter:
    """Makes engines; some starts fail."""

    def __init__(
        self, failing: Callable[[int], bool] = lambda number: False, error: type[Exception] = ResourceError
    ) -> None:
        self.engines: list[FakeEngineClient] = []
        self.num_starts = 0
        self._failing = failing
        self._error = error
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self) -> FakeEngineClient:
        self.num_starts += 1
        await self.hold.wait()
        if self._failing(self.num_starts):
            raise self._error("another server uses the cache.")
        self.engines.append(FakeEngineClient(lambda prompt: [[1]]))
        return self.engines[-1]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "RESTART_DELAYS_S", (0.0, 0.001))


@pytest.fixture
async def starter() -> Starter:
    return Starter()


async def opened(starter: Starter) -> EngineHandle:
    handle = EngineHandle(starter)
    handle.open()
    await handle.wait_open()
    return handle


async def until_served(handle: EngineHandle) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while handle.reason is not None:
            await asyncio.sleep(0.001)


async def test_an_engine_that_dies_is_replaced_and_meanwhile_the_gate_says_why(starter: Starter) -> None:
    handle = await opened(starter)
    starter.hold.clear()
    starter.engines[0].die("the scheduler process died (killed by SIGKILL).")
    async with asyncio.timeout(PATIENCE_S):
        while starter.num_starts < 2:
            await asyncio.sleep(0.001)
    assert handle.reason == "the engine is started again: the scheduler process died (killed by SIGKILL)."
    with pytest.raises(UnavailableError, match="started again"):
        handle.require()
    starter.hold.set()
    await until_served(handle)
    assert handle.require() is starter.engines[1]
    await handle.close()
    assert [engine.stopped for engine in starter.engines] == [0, 1]


@pytest.mark.parametrize("error", [ResourceError, OSError])  # the second of a process that cannot be started
async def test_a_start_that_fails_is_tried_again(error: type[Exception]) -> None:
    starter = Starter(lambda number: number in (2, 3), error)
    handle = await opened(starter)
    starter.engines[0].die("gone")
    await until_served(handle)
    assert starter.num_starts == 4
    await handle.close()


async def test_an_engine_that_cannot_be_started_is_given_up_and_the_gate_says_so() -> None:
    starter = Starter(lambda number: number > 1)
    handle = await opened(starter)
    starter.engines[0].die("gone")
    async with asyncio.timeout(PATIENCE_S):
        while handle.reason is None or "in a row" not in handle.reason:
            await asyncio.sleep(0.001)
    assert starter.num_starts == 1 + gate_module.MAX_FAILURES
    assert handle.reason.endswith("8 times in a row: gone")
    await handle.close()


async def test_an_engine_that_dies_again_and_again_is_given_up(starter: Starter) -> None:
    handle = await opened(starter)
    async with asyncio.timeout(PATIENCE_S):
        while handle.reason is None or "in a row" not in handle.reason:
            if not starter.engines[-1].trouble:
                starter.engines[-1].die("gone")
            await asyncio.sleep(0.001)
    assert starter.num_starts == 1 + gate_module.MAX_FAILURES
    await handle.close()


async def test_an_engine_that_lived_for_long_is_forgiven(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "SETTLED_S", 0.0)
    handle = await opened(starter)
    for _ in range(2 * gate_module.MAX_FAILURES):
        starter.engines[-1].die("gone")
        await asyncio.sleep(0.002)
        await until_served(handle)
    await handle.close()


async def test_an_engine_that_is_stopped_is_not_started_again(starter: Starter) -> None:
    handle = await opened(starter)
    handle.drain()
    starter.engines[0].die("the engine was stopped.")
    await asyncio.sleep(0.01)
    assert starter.num_starts == 1
    assert handle.reason == "the server is shutting down"
    await handle.close()


async def test_an_engine_without_workers_says_so(starter: Starter) -> None:
    handle = await opened(starter)
    starter.engines[0].is_ready = False
    starter.engines[0].trouble = "no worker is left: worker 0 died (exit code 71)."
    assert handle.reason == "no worker is left: worker 0 died (exit code 71)."
    with pytest.raises(UnavailableError, match=r"\(exit code 71\); try again later\.$"):
        handle.require()
    await handle.close()


async def test_who_has_no_patience_with_pages_on_their_way_closes_again(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await opened(starter)
    engine, given = starter.engines[0], []

    async def stop(drain_s: float = 0.0, copy_s: float = 0.0) -> None:
        given.append((drain_s, copy_s))
        if copy_s:
            await asyncio.Event().wait()

    monkeypatch.setattr(engine, "stop", stop)
    closing = asyncio.create_task(handle.close(30.0))
    while not given:
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await handle.close()
    await handle.close()
    assert given == [(0.0, 30.0), (0.0, 0.0)]
