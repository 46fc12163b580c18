"""Sends one measured request, worded for its kind of server, and records its events, failures among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.workload import Prompt, Sample
from hiserve.errors import ConfigError, UnavailableError

# Takes the data of one event and the time it arrived.
Reader = Callable[[bytes, float], None]

# How much a server counts, from least to most.
NO_USAGE, FINAL_USAGE, RUNNING_USAGE = range(3)
DONE = b"[DONE]"
# An answer to a field that a server does not know.
REFUSALS = (400, 422)


class RequestDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all requests of a run have beside their prompts."""

    model: str
    temperature: float = 0.0  # sampling temperature; 0 is greedy
    seed: int | None = None  # of the sampling; None leaves it to the server
    ignore_eos: bool = False  # generate ``max_tokens``, past the model's end
    usage: int = RUNNING_USAGE  # one of ``NO_USAGE``, ``FINAL_USAGE`` and ``RUNNING_USAGE``
    has_token_ids: bool = False  # ask for the generated token ids
    cache_salt: str = ""  # prefixes are shared among requests of the same salt; empty for none


class ServerBackend(Protocol):
    """One kind of server."""

    path: str

    def takes(self, prompt: Prompt) -> bool:
        """Says whether such a prompt can be sent."""

    def body(self, prompt: Prompt, max_tokens: int, asking: RequestDefaults) -> dict[str, Any]:
        """Returns the body of a streaming request."""

    def reader(self, sample: Sample) -> Reader:
        """Returns the function that writes the events of one reply into ``sample``.

        The reader raises ``msgspec.DecodeError`` for an event it cannot read.
        """


class _Miss(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, Any] | None = None
    cache_miss: _Miss | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAIBackend:
    """``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, *, is_chat: bool) -> None:
        self.path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._is_chat = is_chat
        self._decoder = msgspec.json.Decoder(_Event)

    def takes(self, prompt: Prompt) -> bool:
        """Chats take messages and texts, completions texts and token ids."""
        return not isinstance(prompt, np.ndarray if self._is_chat else list)

    def body(self, prompt: Prompt, max_tokens: int, asking: RequestDefaults) -> dict[str, Any]:
        """Builds a request; options without a value are left out."""
        body: dict[str, Any] = {"model": asking.model}
        if self._is_chat:
            body["messages"] = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        body |= {"max_tokens": max_tokens, "temperature": asking.temperature, "stream": True}
        if asking.usage:
            running = {"continuous_usage_stats": True} if asking.usage == RUNNING_USAGE else {}
            body["stream_options"] = {"include_usage": True} | running
        body |= {} if asking.seed is None else {"seed": asking.seed}
        body |= {"ignore_eos": True} if asking.ignore_eos else {}
        body |= {"return_token_ids": True} if asking.has_token_ids else {}
        return body | _salt(asking)

    def reader(self, sample: Sample) -> Reader:
        return partial(self._take, sample)

    def _take(self, sample: Sample, data: bytes, now: float) -> None:
        event = self._decoder.decode(data)
        if event.error is not None:
            sample.num_ends += 1
            sample.fail("error event", words_of(event.error), now)
            return
        if event.usage is not None:
            _count(sample, event.usage)
        for choice in event.choices:
            delta = choice.delta
            has_text = choice.text or (delta is not None and (delta.content or delta.reasoning_content))
            if has_text:
                sample.chunk_s.append(now)
                sample.chunk_texts.append(choice.text or (delta is not None and delta.content) or "")
                is_counted = event.usage is not None and event.usage.completion_tokens is not None
                sample.chunk_tokens.append(sample.num_output if is_counted else -1)
            if choice.token_ids:
                sample.output_ids += choice.token_ids
            if choice.finish_reason is not None:
                sample.finish = choice.finish_reason
                sample.num_ends += 1
            if has_text or choice.finish_reason is not None:
                sample.end_s = now


def _count(sample: Sample, usage: _Usage) -> None:
    if usage.completion_tokens is None:
        return
    sample.has_usage = True
    sample.num_prompt, sample.num_output = usage.prompt_tokens, usage.completion_tokens
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        sample.num_cached = details.cached_tokens
        sample.cached_by_tier = _by_tier(details.cached_tokens_details)
        sample.miss = details.cache_miss.reason if details.cache_miss else ""


def _by_tier(details: dict[str, Any] | None) -> dict[str, int]:
    """Reads tokens by tier; what SGLang calls storage is the store."""
    counts = {"store" if name == "storage" else name: count for name, count in (details or {}).items()}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _salt(asking: RequestDefaults) -> dict[str, str]:
    return {"cache_salt": asking.cache_salt} if asking.cache_salt else {}


class _Finish(msgspec.Struct):
    type: str = ""


class _Meta(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int | None = None
    cached_tokens: int = -1
    cached_tokens_details: dict[str, Any] | None = None
    finish_reason: _Finish | None = None


class _Generated(msgspec.Struct):
    text: str = ""
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


class GenerateBackend:
    """SGLang's native ``/generate``: each event repeats the whole text so far."""

    path = "/generate"

    def takes(self, prompt: Prompt) -> bool:
        """Takes texts and token ids."""
        return not isinstance(prompt, list)

    def body(self, prompt: Prompt, max_tokens: int, asking: RequestDefaults) -> dict[str, Any]:
        """Words a request; usage comes unasked."""
        given = {"input_ids": prompt.tolist()} if isinstance(prompt, np.ndarray) else {"text": prompt}
        sampling = {"max_new_tokens": max_tokens, "temperature": asking.temperature, "ignore_eos": asking.ignore_eos}
        return {**given, "sampling_params": sampling, "stream": True, **_salt(asking)}

    def reader(self, sample: Sample) -> Reader:
        return _GrowingText(sample).take


class _GrowingText:
    """Tells what is new in each event."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._num_chars = 0
        self._decoder = msgspec.json.Decoder(_Generated)

    def take(self, data: bytes, now: float) -> None:
        event, sample = self._decoder.decode(data), self._sample
        if event.error is not None:
            sample.num_ends += 1
            sample.fail("error event", words_of(event.error), now)
            return
        meta = event.meta_info or _Meta()
        is_counted = meta.completion_tokens is not None
        if meta.completion_tokens is not None:
            sample.has_usage = True
            sample.num_prompt, sample.num_output = meta.prompt_tokens, meta.completion_tokens
            sample.num_cached = meta.cached_tokens
            sample.cached_by_tier = _by_tier(meta.cached_tokens_details)
        if len(event.text) > self._num_chars:
            sample.chunk_s.append(now)
            sample.chunk_texts.append(event.text[self._num_chars :])
            sample.chunk_tokens.append(sample.num_output if is_counted else -1)
        if len(event.text) > self._num_chars or meta.finish_reason is not None:
            sample.end_s = now
        self._num_chars = len(event.text)
        sample.output_ids = event.output_ids
        if meta.finish_reason is not None:
            sample.finish = meta.finish_reason.type
            sample.num_ends += 1


def words_of(answer: Any) -> str:
    while isinstance(answer, dict):
        answer = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), str(answer))
    return " ".join(str(answer).split())[:300]


BACKENDS: dict[str, Callable[[], ServerBackend]] = {
    "openai": lambda: OpenAIBackend(is_chat=False),
    "openai-chat": lambda: OpenAIBackend(is_chat=True),
    "generate": GenerateBackend,
}


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
