"""Sends replies, whole or as server-sent events, and aborts them when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hiserve.errors import HiserveError
from hiserve.scheduler.client import EngineClient
from hiserve.server.http.auth import caller_of
from hiserve.server.http.errors import describe, error_body
from hiserve.server.http.tracing import note_choices
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.format import json_response
from hiserve.server.reply.generation import OutputDelta
from hiserve.text.helpers.fair_threads import FairThreads

DONE = b"data: [DONE]\n\n"
PING_S = 15.0
Failure = Callable[[int, str, str, str | None], bytes]
_T = TypeVar("_T")


def event(data: bytes | msgspec.Struct) -> bytes:
    """Returns one event; a reply becomes JSON, which has no line breaks."""
    return b"data: " + (data if isinstance(data, bytes) else msgspec.json.encode(data)) + b"\n\n"


def error_event(status: int, message: str, code: str, param: str | None) -> bytes:
    """Returns the event that ends a failed stream, in OpenAI's form."""
    return event(error_body(status, message, code=code, param=param))


class EventHead:
    """Encodes the first fields of all events of a stream once.

    Args:
        fields: The first fields; not empty.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._start = b"data: " + msgspec.json.encode(fields)[:-1] + b","

    def event(self, fields: msgspec.Struct) -> bytes:
        """Returns the event with these fields after the first ones; there is at least one."""
        return self._start + msgspec.json.encode(fields)[1:] + b"\n\n"


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs ``work`` and cancels it when the client closes its connection.

    Args:
        receive: The request's ASGI channel; the body must have been read.
        work: Work for the client.

    Raises:
        ClientDisconnect: The client went away; ``work`` has ended.
    """
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose body is a stream of events.

    The status is sent with the first chunk, so an error before it is an ordinary error response. An error
    after it becomes a last event. The stream is closed in every case.

    Args:
        chunks: Bytes of one or more events.
        failure: Returns the last event by status, message, code and ``param``.
        ping: An event that is sent after ``PING_S`` without another one; empty for none.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], failure: Failure, ping: bytes = b"") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._failure = failure
        self._ping = ping
        self._sent_at = 0.0  # of the loop's clock; 0 before the first chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the stream or the client ends."""
        async with aclosing(self._chunks):
            with suppress(ClientDisconnect):  # the client has closed the connection
                await cancel_on_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        clock, pinging = asyncio.get_running_loop().time, None
        last, failure = b"", None
        try:
            async for chunk in self._chunks:
                if not self._sent_at:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    pinging = asyncio.create_task(self._send_pings(send)) if self._ping else None
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not self._sent_at:
                raise
            last, failure = self._failure(*describe(error)), error
        finally:
            if pinging is not None:
                pinging.cancel()
                await asyncio.wait([pinging])
        await send({"type": "http.response.body", "body": last, "more_body": False})
        if failure is not None and not isinstance(failure, HiserveError):
            raise failure

    async def _send_pings(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            wait_s = self._sent_at + PING_S - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})


async def answer(
    request: Request,
    engine: EngineClient,
    choices: Choices,
    format_threads: FairThreads,
    *,
    whole: Callable[[], Any],
    events: Callable[[AsyncGenerator[OutputDelta, None]], AsyncGenerator[bytes, None]] | None,
    failure: Failure = error_event,
    ping: bytes = b"",
) -> Response:
    """Runs the choices of a reply; returns the whole reply after their end, or a stream before its start.

    Args:
        request: The request; its body must have been read.
        engine: Runs the choices.
        choices: All of them.
        format_threads: Format large replies.
        whole: Returns the reply after the end of the choices.
        events: Formats the deltas of the choices as events; None sends the whole reply.
        failure: As for ``EventStream``.
        ping: As for ``EventStream``.

    Raises:
        HiserveError: The engine refused or failed a choice; not for a stream, which ends with the error.
        ClientDisconnect: The client went away; all choices are aborted.
    """
    note_choices(request, choices, streams=events is not None)
    deltas = choices.run(engine)
    if events is not None:
        return EventStream(events(deltas), failure, ping)
    await cancel_on_disconnect(request.receive, _exhaust(deltas))
    if choices.is_large:
        return await format_threads.do(lambda: json_response(whole()), caller_of(request).number)
    return json_response(whole())


async def _exhaust(deltas: AsyncGenerator[OutputDelta, None]) -> None:
    async with aclosing(deltas):
        async for _ in deltas:
            pass
