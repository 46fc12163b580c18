"""How a soak's requests are sent: each question by its route, with its sampling, read fast or slowly."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from hiserve.bench.http import Pool
from hiserve.bench.load_client import Client
from hiserve.bench.server_backends import OpenAIBackend, RequestDefaults, words_of
from hiserve.bench.soak.questions import Question, SentQuestion
from hiserve.bench.soak.stream_oracle import Reference
from hiserve.bench.workload import Sample
from hiserve.errors import UnavailableError

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
        """Asks a question before the first fault.

        Raises:
            UnavailableError: It got no answer, or the server returns no token ids.
        """
        asked = SentQuestion(question=index, way="read")
        await self.send(question, asked)
        sample = asked.sample
        if sample.error or not sample.output_ids:
            told = f"{sample.error}, {sample.detail}" if sample.error else "the reply has no token ids"
            raise UnavailableError(f"a request could not be recorded before the soak: {told}.")
        return Reference(sample.output_ids, sample.finish)

    async def send_nonsense(self, number: int, sample: Sample) -> None:
        """Sends the n-th malformed request."""
        path, body = NONSENSE[number % len(NONSENSE)]
        told: list[bytes] = []
        try:
            sample.status = await self._pools[False].request("POST", path, body, lambda _, part, __: told.append(part))
        except OSError as error:
            sample.error, sample.detail = "connection", str(error)
        with suppress(msgspec.DecodeError):
            sample.detail = sample.detail or words_of(msgspec.json.decode(b"".join(told)))

    def close(self) -> None:
        """Closes idle connections."""
        for pool in self._pools.values():
            pool.close()
