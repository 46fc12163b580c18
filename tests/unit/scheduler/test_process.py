"""What the scheduler says to a slow client stays in order."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from hiserve.core.request import SamplingParams
from hiserve.errors import EngineError
from hiserve.ipc.channel import Link
from hiserve.ipc.codec import MessageDecoder, encode
from hiserve.ipc.messages import Failed, Generate, Halted, Ready, StartFailed, ToClient
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.scheduler.process import SchedulerService
from tests.helpers.links import is_full
from tests.helpers.settings import settings_of
from tests.helpers.waiting import PATIENCE_S

NO_WORKER = ("/does/not/exist",)


class SlowClient:
    """A service whose client has stopped reading."""

    def __init__(self, **settings: object) -> None:
        self._link = Link.bind()
        self._scheduler_link = Link.connect(self._link.endpoint)
        self.service = SchedulerService(settings_of(host_cache_gib=0, **settings), self._scheduler_link, NO_WORKER)
        self._decoder = MessageDecoder[ToClient](ToClient)
        self.news: list[str] = []
        self.num_messages = 0
        self.num_sent = 0

    def tell(self, uid: int) -> None:
        """Sends the next number to a request."""
        updates = RequestUpdates()
        updates.add(TokenDelta([self.num_sent] * 2000, uid=uid))
        self.service.updated(updates)
        self.num_sent += 1

    def stop_reading(self) -> None:
        """Talks until the client's end takes no more, then a little."""
        while not is_full(self._scheduler_link):
            self.tell(1)
        for _ in range(5):
            self.tell(1)

    def read(self, *, until_writable: bool = False) -> None:
        """Reads what has come, without a turn of the event loop."""
        while not (until_writable and self._scheduler_link.is_writable):
            if (frames := self._link.try_receive()) is None:
                if not until_writable:
                    return
                time.sleep(0.001)
                continue
            self.num_messages += 1
            received = self._decoder.decode(frames)
            match received.message:
                case RequestUpdates() as updates:
                    self.news += [str(number) for number in updates.tokens[::2000]]
                case Failed(uid):
                    self.news.append(f"failed {uid}")
                case Halted(reason):
                    self.news.append(f"halted: {reason}")

    async def read_all(self, num_news: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.news) < num_news:
                self.read()
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.service._client.close()
        self._link.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def test_news_does_not_overtake_the_news_that_waits() -> None:
    client = SlowClient()
    client.stop_reading()
    client.read(until_writable=True)
    client.tell(1)
    await client.read_all(client.num_sent)
    assert client.news == [str(number) for number in range(client.num_sent)]
    assert client.num_messages < client.num_sent, "nothing was merged"
    client.close()


async def test_a_failure_comes_after_the_news_that_waits() -> None:
    client = SlowClient()
    client.stop_reading()
    client.service.failed(1, EngineError("the worker died"))
    client.tell(2)
    await client.read_all(client.num_sent + 1)
    numbers = [str(number) for number in range(client.num_sent)]
    assert client.news == [*numbers[:-1], "failed 1", numbers[-1]]
    client.close()


async def test_a_client_is_told_when_no_worker_is_left() -> None:
    client = SlowClient()
    client.service.worker_abandoned(0, EngineError("worker 0 died (exit code 71)."))
    await client.read_all(1)
    assert client.news == ["halted: no worker is left: worker 0 died (exit code 71)."]
    client.close()


async def test_while_a_deadline_is_awaited_batches_do_not_look_for_one() -> None:
    client = SlowClient(queue_timeout_s=60.0, request_timeout_s=600.0)
    dispatcher, looks = client.service._dispatcher, 0
    dispatcher.worker_ready(0, Ready(1, 0, 1, 64, 10, 16, b"n" * 16, {}))
    look = dispatcher.seconds_to_deadline

    def counted() -> float | None:
        nonlocal looks
        looks += 1
        return look()

    dispatcher.seconds_to_deadline = counted  # type: ignore[method-assign]
    for uid in range(1, 40):
        client.service._receive([encode(Generate(uid, SamplingParams(max_tokens=5)), np.arange(4, dtype=np.int32))])
    timer = client.service._timer
    assert timer is not None
    # Those that a worker gets have far deadlines; that of the first to wait is nearer, and is awaited from then on.
    assert looks <= 4, f"{looks} times in 39 batches"
    assert 50 < timer.when() - asyncio.get_running_loop().time() <= 60
    timer.cancel()
    client.close()


async def test_a_client_is_told_why_no_worker_could_be_started() -> None:
    client = SlowClient()
    assert await asyncio.wait_for(client.service.run(), PATIENCE_S) == 1
    async with asyncio.timeout(PATIENCE_S):
        while (frames := client._link.try_receive()) is None:  # it may still be under way
            await asyncio.sleep(0.001)
    message = client._decoder.decode(frames).message
    assert isinstance(message, StartFailed)
    assert message.code == "insufficient_resources"
    assert "worker 0 could not be started: the process /does/not/exist cannot be started" in message.message
    client._link.close()
