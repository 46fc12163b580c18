"""An OpenAI-shaped server over a real socket whose every byte and pause is the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

COMPLETIONS = "/v1/completions"
CARD = {"id": "fake", "object": "model", "max_model_len": 1000}


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Out:
    """Writes one response."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_dropped = False

    async def json(self, status: int, content: Any) -> None:
        """A whole response."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self.raw(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    async def begin(self) -> None:
        """The head of a stream."""
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, content: Any) -> None:
        """One event; text stays as it is."""
        await self.part(b"data: " + (content if isinstance(content, str) else json.dumps(content)).encode() + b"\n\n")

    async def part(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self, *, done: bool = True) -> None:
        """The end of a stream."""
        if done:
            await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Any bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def drop(self) -> None:
        """Closes the connection, whatever was promised."""
        self.is_dropped = True
        self._writer.close()


Handler = Callable[[Asked, Out], Awaitable[None]]


def text_event(text: str, num_tokens: int | None = None, *, prompt: int = 3, cached: int | None = None) -> Any:
    """One delta of a text completion, with running usage if ``num_tokens`` is given."""
    found: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
    if num_tokens is not None:
        found["usage"] = usage(num_tokens, prompt=prompt, cached=cached)
    return found


def finish_event(reason: str = "length") -> Any:
    return {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}


def usage_event(num_tokens: int, *, prompt: int = 3, cached: int | None = None) -> Any:
    return {"choices": [], "usage": usage(num_tokens, prompt=prompt, cached=cached)}


def usage(num_tokens: int, *, prompt: int, cached: int | None) -> Any:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens, **details}


def scripted(*pauses_s: float, final: Any = None) -> Handler:
    """A stream with one token after each pause, then the finish reason and the usage."""

    async def handle(_: Asked, out: Out) -> None:
        await out.begin()
        for number, pause_s in enumerate(pauses_s, start=1):
            await asyncio.sleep(pause_s)
            await out.event(text_event("a", number))
        await out.event(finish_event())
        await out.event(final or usage_event(len(pauses_s), cached=1))
        await out.end()

    return handle


@dataclass
class FakeServer:
    """Serves ``routes``; other paths are 404. Lists its one model by itself.

    Attributes:
        routes: Handlers by path.
        asked: Requests for anything but the list of models, in order.
        url: Where it listens.
        num_open: Handlers running now.
        most_open: Most handlers that ran at once.
    """

    routes: dict[str, Handler]
    card: dict[str, Any] = field(default_factory=lambda: dict(CARD))
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0

    async def __aenter__(self) -> FakeServer:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.create_task(self._serve(reader, writer, self.num_connections))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        out = Out(writer)
        try:
            while not out.is_dropped:
                asked = await _read(reader, connection)
                if asked.path == "/v1/models":
                    await out.json(200, {"data": [self.card]})
                    continue
                self.asked.append(asked)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                handler = self.routes.get(asked.path, _missing)
                try:
                    await handler(asked, out)
                finally:
                    self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _missing(asked: Asked, out: Out) -> None:
    await out.json(404, {"error": {"message": f"there is no route {asked.path}"}})


async def _read(reader: asyncio.StreamReader, connection: int) -> Asked:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split()
    return Asked(method, path, headers, json.loads(raw) if raw else None, connection)
