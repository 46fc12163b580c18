"""Users in a closed loop: they read, read slowly, leave, come in crowds, and send nonsense."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from hiserve.bench.options import SoakOptions
from hiserve.bench.soak.questions import Questions, SentQuestion, Way
from hiserve.bench.soak.sender import Sender
from hiserve.bench.workload import Sample

RETRY_S = 0.3


class Users:
    """Asks questions until it is stopped. A reply usually takes ``usual_s``.

    Attributes:
        asked: All requests that were begun, in this order.
        nonsense: Malformed requests that were answered.
    """

    def __init__(self, sender: Sender, questions: Questions, soak: SoakOptions, usual_s: float) -> None:
        self._sender = sender
        self._questions = questions
        self._soak = soak
        self._usual_s = usual_s
        self._rng = np.random.default_rng(soak.seed)
        self._open: dict[int, SentQuestion] = {}
        self._last_token_s = 0.0
        self._is_over = asyncio.Event()
        self.asked: list[SentQuestion] = []
        self.nonsense: list[Sample] = []

    async def run(self) -> None:
        """Returns once it was stopped and its last request has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._soak.users):
                group.create_task(self._talk())
            if self._soak.burst_size:
                group.create_task(self._crowd())

    def stop(self) -> None:
        """Begins no more requests."""
        self._is_over.set()

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._open)

    def last_token_s(self) -> float:
        """Returns when the last token came, on the clock of the samples; 0 before the first."""
        return max(
            [self._last_token_s, *(each.sample.chunk_s[-1] for each in self._open.values() if each.sample.chunk_s)]
        )

    async def _talk(self) -> None:
        """Holds one conversation after the other."""
        while not self._is_over.is_set():
            session = self._questions.sessions[self._rng.integers(len(self._questions.sessions))]
            for question in session:
                if self._rng.random() < self._soak.bad:
                    await self._babble()
                asked = await self._ask(question, self._way())
                if asked.sample.error:  # clients wait before they retry
                    await self._pause(RETRY_S)
                if self._is_over.is_set() or asked.sample.error or asked.way == "cancelled":
                    break

    async def _crowd(self) -> None:
        """Comes with many requests at once, again and again."""
        while not await self._pause(self._soak.burst_every):
            drawn = self._rng.integers(len(self._questions.all), size=self._soak.burst_size)
            await asyncio.gather(*(self._ask(int(question), "burst") for question in drawn))

    def _way(self) -> Way:
        drawn = self._rng.random()
        if drawn < self._soak.cancelled:
            return "cancelled"
        return "slow" if drawn < self._soak.cancelled + self._soak.slow else "read"

    async def _ask(self, question: int, way: Way) -> SentQuestion:
        asked = SentQuestion(question=question, way=way)
        self._open[id(asked)] = asked
        self.asked.append(asked)
        asked.sample.begin_s = time.perf_counter()
        sending = asyncio.create_task(self._sender.send(self._questions.all[question], asked))
        if way == "cancelled":
            await asyncio.wait({sending}, timeout=self._rng.uniform(0, 1.5 * self._usual_s))
            sending.cancel()
        try:
            await asyncio.wait({sending})
        finally:
            sending.cancel()
        if not sending.cancelled():
            sending.result()
        sample = asked.sample
        sample.end_s = sample.end_s if sample.error or sample.finish else time.perf_counter()
        self._last_token_s = self.last_token_s()
        del self._open[id(asked)]
        return asked

    async def _babble(self) -> None:
        sample = Sample()
        self.nonsense.append(sample)
        await self._sender.send_nonsense(len(self.nonsense), sample)

    async def _pause(self, seconds: float) -> bool:
        """Waits; says whether it is over."""
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return False
        return True
