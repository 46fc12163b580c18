"""Sends one measured request and writes down what happened to it, whatever it was."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.server_backends import NO_USAGE, Reader, RequestDefaults, ServerBackend, words_of
from hiserve.bench.workload import Prompt, Sample
from hiserve.errors import ConfigError, UnavailableError

DONE = b"[DONE]"
# An answer to a field that a server does not know.
REFUSALS = (400, 422)


class Client:
    """Requests of one run to one server.

    Attributes:
        asking: As given, or less after ``warm_up`` found out that the server refuses some of it.
    """

    def __init__(self, pool: Pool, backend: ServerBackend, asking: RequestDefaults, timeout_s: float) -> None:
        self.asking = asking
        self._pool = pool
        self._backend = backend
        self._timeout_s = timeout_s

    async def send(self, prompt: Prompt, max_tokens: int, sample: Sample) -> None:
        """Sends and follows one request; failures end up in ``sample``, never as an exception."""
        body = msgspec.json.encode(self._backend.body(prompt, max_tokens, self.asking))
        stream = _Stream(sample, self._backend.reader(sample))
        sample.begin_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                sample.status = await self._pool.request("POST", self._backend.path, body, stream.receive)
            stream.end(time.perf_counter())
        except TimeoutError:
            sample.fail("timeout", f"no end after {self._timeout_s:g} s", time.perf_counter())
        except OSError as error:
            sample.status = stream.status
            sample.fail("connection", str(error), time.perf_counter())
        if isinstance(prompt, np.ndarray) and sample.num_prompt < 0:
            sample.num_prompt = prompt.size
        if not sample.has_usage:
            sample.num_output = len(sample.chunk_s)

    def asking_for(self, **fields: Any) -> Client:
        """Returns a client of the same server whose requests differ in some fields of ``RequestDefaults``."""
        asking = msgspec.structs.replace(self.asking, **fields)
        return Client(self._pool, self._backend, asking, self._timeout_s)

    async def warm_up(self, prompt: Prompt, max_tokens: int) -> Sample:
        """Sends one request that is not measured, and finds out how much the server will count.

        Raises ConfigError or UnavailableError.
        """
        if not self._backend.takes(prompt):
            kind = "messages" if isinstance(prompt, list) else "token ids"
            raise ConfigError(f"{self._backend.path} takes no {kind}; choose another --backend.", param="backend")
        first_refusal: Sample | None = None
        while True:
            sample = Sample()
            await self.send(prompt, max_tokens, sample)
            if not sample.error:
                return sample
            first_refusal = first_refusal or sample
            if sample.status not in REFUSALS or self.asking.usage == NO_USAGE:
                raise UnavailableError(f"the warm-up request failed: {first_refusal.error}, {first_refusal.detail}")
            self.asking = msgspec.structs.replace(self.asking, usage=self.asking.usage - 1)


class _Stream:
    """Splits a response's body into events.

    Attributes:
        status: HTTP status, 0 until something arrived.
    """

    def __init__(self, sample: Sample, read: Reader) -> None:
        self.status = 0
        self._sample = sample
        self._read = read
        self._rest = b""
        self._is_done = False

    def receive(self, status: int, part: bytes, now: float) -> None:
        """Takes a part of the body; events are read as soon as their line is complete."""
        self.status = status
        self._rest += part
        if status == 200 and b"\n" in part:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._take(line, now)

    def end(self, now: float) -> None:
        sample = self._sample
        if sample.status != 200:
            sample.fail(f"http {sample.status}", _explanation(self._rest), now)
            return
        self._take(self._rest, now)
        if not sample.finish and not self._is_done:
            sample.fail("incomplete", "the stream ended without a finish reason", now)
        if not sample.end_s:
            sample.end_s = now

    def _take(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == DONE:
            self._is_done = True
            return
        try:
            self._read(data, now)
        except msgspec.DecodeError as error:
            self._sample.fail("malformed event", str(error), now)


def _explanation(body: bytes) -> str:
    try:
        return words_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return words_of(body.decode(errors="replace"))
