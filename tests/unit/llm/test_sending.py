"""Prompts are sent to the engine's processes while later ones are still being encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.llm.offline_backends import Job, Processes
from hiserve.scheduler.client import EngineClient
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.settings import settings_of

PROMPT, NUM_PROMPTS = 100, 12


class Diary:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def jobs(self) -> Iterator[Job]:
        """Encodes one prompt after the other, each when it is asked for."""
        for number in range(NUM_PROMPTS):
            self.events.append(f"encoded {number}")
            tokens = np.full(PROMPT, number, dtype=np.int32)
            yield Job(number, tokens, SamplingParams(seed=1), 0, lambda *_: False, lambda _: None)


def test_processes_get_each_prompt_before_the_next_is_encoded() -> None:
    diary, ended = Diary(), SimpleQueue[Job | None]()

    def script(prompt: Int32Array) -> list[list[int]]:
        diary.events.append(f"sent {prompt[0]}")
        return [[1]]

    backend: Any = object.__new__(Processes)
    backend._room, backend._client = 100, FakeEngineClient(script, FinishReason.LENGTH)
    asyncio.run(backend._drive(diary.jobs(), ended))
    assert ended.qsize() == NUM_PROMPTS + 1
    for number in range(NUM_PROMPTS - 1):
        assert diary.events.index(f"sent {number}") < diary.events.index(f"encoded {number + 1}")


def test_what_is_cancelled_has_cleaned_up_before_the_event_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C during a start does."""
    begun, cleaned = threading.Event(), list[bool]()

    async def start(_: Any) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            cleaned.append(True)

    def interrupted(self: Processes, work: Any) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        begun.wait()
        future.cancel()
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineClient, "start", start)
    config = settings_of(max_running_requests=4)
    monkeypatch.setattr(Processes, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Processes(config)
    assert cleaned == [True]
