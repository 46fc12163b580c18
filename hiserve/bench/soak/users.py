"""The users of a soak: their questions, how these are sent, and how they read the answers, leave, or come in crowds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from hiserve.bench.datasets.recorded import Dialogue, read_lines
from hiserve.bench.datasets.synthetic import draw_tokens
from hiserve.bench.http import Pool
from hiserve.bench.load_client import Client, OpenAIBackend, RequestDefaults, words_of
from hiserve.bench.options import SoakOptions
from hiserve.bench.spec_engine import HELD_OUT
from hiserve.bench.target import Target
from hiserve.bench.workload import Prompt, Sample, Turn
from hiserve.errors import UnavailableError

# Tokens of a chat's template and of what no history may come near.
MARGIN = 64

Source: TypeAlias = Literal["chat", "agent"]
Way: TypeAlias = Literal["read", "slow", "cancelled", "burst"]
# Questions that follow one another: each prompt begins like the one before.
Session: TypeAlias = list[int]
SLOW_BYTES_PER_S = 4000.0
TEMPERATURE, SEED = 0.8, 7
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Path and body of what no server may answer with 200.
NONSENSE: tuple[tuple[str, bytes], ...] = (
    (CHAT, b"{"),
    (CHAT, b'{"messages": 5}'),
    (CHAT, b'{"messages": [{"role": "robot", "content": "Hi"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}'),
    (COMPLETIONS, b'{"prompt": [1000000000]}'),
    (COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 2000000000}'),
    (COMPLETIONS, b'{"prompt": "Hi", "n": 1000000}'),
    (COMPLETIONS, b"\xff\xfe"),
    ("/v1/nowhere", b"{}"),
)
RETRY_S = 0.3


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request that users repeat."""

    prompt: Prompt  # what is sent: a dialogue's messages, or an agent's token ids
    max_tokens: int
    is_drawn: bool  # the reply is sampled, with a seed; otherwise greedy

    @property
    def source(self) -> Source:
        return "chat" if isinstance(self.prompt, list) else "agent"


class SentQuestion(msgspec.Struct, kw_only=True):
    """A question that was sent."""

    question: int
    way: Way  # how the answer was read: to its end, slowly, until the user left, or as one of many at once
    sample: Sample = msgspec.field(default_factory=Sample)


class Reference(msgspec.Struct, frozen=True):
    """The token ids and the finish reason of a question's reply before the first fault."""

    ids: list[int]
    finish: str


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """All questions by index, and the indices of each session's questions."""

    all: list[Question]
    sessions: list[Session]


def build(soak: SoakOptions, target: Target, seed: int) -> Questions:
    """Returns dialogues that come along, and agents that share a long prefix; every second session is sampled.

    Raises ConfigError.
    """
    room = (target.max_model_len or 1 << 30) - soak.output_length - MARGIN
    dialogues = islice(_dialogues(soak, room), soak.num_dialogues)
    found: list[Question] = []
    sessions: list[Session] = []
    for turns in [*dialogues, *_agents(soak, target, room, seed)]:
        is_drawn, first = len(sessions) % 2 == 1, len(found)
        found += [Question(prompt=turn.prompt, max_tokens=turn.max_tokens, is_drawn=is_drawn) for turn in turns]
        sessions.append(list(range(first, len(found))))
    return Questions(all=found, sessions=sessions)


def _dialogues(soak: SoakOptions, room: int) -> Iterator[list[Turn]]:
    """Yields the dialogues of several turns: each user message after the recorded history."""
    for dialogue in read_lines(HELD_OUT, Dialogue, "chats"):
        messages = dialogue.as_sent()
        histories = [messages[: index + 1] for index, message in enumerate(messages) if message["role"] == "user"]
        # A token is at least a byte.
        fitting = [each for each in histories if sum(len(said["content"].encode()) for said in each) <= room]
        if len(fitting) > 1:
            yield [Turn(prompt=each, max_tokens=soak.output_length) for each in fitting[: soak.num_turns]]


def _agents(soak: SoakOptions, target: Target, room: int, seed: int) -> list[list[Turn]]:
    """Returns agents that begin alike and learn something new in each turn, as token ids."""
    rng, size = np.random.default_rng(seed), target.require_vocab_size()
    shared = draw_tokens(rng, soak.prefix_length, size)
    sessions = []
    for _ in range(soak.num_agents):
        prompt, turns = shared, []
        for _ in range(soak.num_turns):
            prompt = np.concatenate([prompt, draw_tokens(rng, soak.turn_length, size)])
            if prompt.size <= room:
                turns.append(Turn(prompt=prompt, max_tokens=soak.output_length))
        if turns:
            sessions.append(turns)
    return sessions


class Sender:
    """Sends requests to one server."""

    def __init__(self, url: str, api_key: str | None, model: str, timeout_s: float) -> None:
        self._pools = {
            is_slow: Pool(url, api_key, bytes_per_s=SLOW_BYTES_PER_S if is_slow else None) for is_slow in (False, True)
        }
        greedy = RequestDefaults(model=model, has_token_ids=True)
        self._clients = {
            (source, is_slow): Client(pool, OpenAIBackend(is_chat=source == "chat"), greedy, timeout_s)
            for source in ("chat", "agent")
            for is_slow, pool in self._pools.items()
        }

    async def send(self, question: Question, asked: SentQuestion) -> None:
        """Asks and reads; what happens ends up in the sample."""
        client = self._clients[question.source, asked.way == "slow"]
        if question.is_drawn:
            client = client.asking_for(temperature=TEMPERATURE, seed=SEED)
        await client.send(question.prompt, question.max_tokens, asked.sample)

    async def record(self, index: int, question: Question) -> Reference:
        """Asks a question before the first fault. Raises UnavailableError."""
        asked = SentQuestion(question=index, way="read")
        await self.send(question, asked)
        sample = asked.sample
        if sample.error or not sample.output_ids:
            answer = f"{sample.error}, {sample.detail}" if sample.error else "the reply has no token ids"
            raise UnavailableError(f"a request could not be recorded before the soak: {answer}.")
        return Reference(sample.output_ids, sample.finish)

    async def send_nonsense(self, number: int, sample: Sample) -> None:
        path, body = NONSENSE[number % len(NONSENSE)]
        answer: list[bytes] = []
        try:
            sample.status = await self._pools[False].request(
                "POST", path, body, lambda _, part, __: answer.append(part)
            )
        except OSError as error:
            sample.error, sample.detail = "connection", str(error)
        with suppress(msgspec.DecodeError):
            sample.detail = sample.detail or words_of(msgspec.json.decode(b"".join(answer)))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


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
        self._is_over.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def last_token_s(self) -> float:
        """Returns when the last token came, on the clock of the samples; 0 before the first."""
        return max(
            [self._last_token_s, *(each.sample.chunk_s[-1] for each in self._open.values() if each.sample.chunk_s)]
        )

    async def _talk(self) -> None:
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
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return False
        return True
