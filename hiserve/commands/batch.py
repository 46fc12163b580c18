"""``hiserve generate --batch``: a file of requests, answered by the routes of the server without a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from hiserve.commands.batch_files import ENVELOPE_BYTES, BatchRequest, Results, read_lines, read_request
from hiserve.commands.progress import progress
from hiserve.commands.serve import assemble
from hiserve.config.options import Options
from hiserve.errors import ConfigError, RequestError, UnavailableError
from hiserve.server.http.errors import Error

MAX_BYTES = 2**26  # of the bodies that are answered at once
TRIES = 10
BUSY = (429, 503)
COUNTED_BYTES = 2**20

logger = logging.getLogger(__name__)
Sleep = Callable[[float], Awaitable[object]]


def run(options: Options, batch: str, output: str | None, errors: str | None) -> int:
    """Answers each request of a file that the output does not answer yet.

    Args:
        options: Of the engine. Keys are not asked for, and no response is stored.
        batch: File of requests.
        output: File of results.
        errors: File of errors; the default is beside the output.

    Returns:
        The exit status: 1 when a line was refused or failed.

    Raises:
        ConfigError: A file cannot be read or written.
        HiserveError: The engine cannot be started, or the disk is full.
    """
    paths = _paths(batch, output, errors)
    server = msgspec.structs.replace(
        options.server, api_key=(), admin_api_key=None, metrics_key=None, responses_store="off"
    )
    options = msgspec.structs.replace(options, server=server)
    try:
        file = paths[0].open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read --batch {batch}: {error.strerror}.", param="batch") from None
    with file, Results(*paths[1:]) as results:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(options, file, results))
        finally:
            failed = f", {results.num_failed:,} errors written to {paths[2]}" if results.num_failed else ""
            sys.stderr.write(f"{results.num_done:,} replies added to {paths[1]}{failed}\n")
    return int(results.num_failed > 0)


def _paths(batch: str, output: str | None, errors: str | None) -> tuple[Path, Path, Path]:
    if output is None:
        raise ConfigError("--batch needs --output FILE, which a second run continues.", param="output")
    target = Path(output)
    paths = Path(batch), target, target.with_name(f"{target.stem}.errors.jsonl") if errors is None else Path(errors)
    if len(set(map(_identity, paths))) < len(paths):
        raise ConfigError("--batch, --output and --errors must be three files.", param="output")
    return paths


def _identity(path: Path) -> object:
    """Returns the identity of a file: the same for all its names, hard links included."""
    try:
        found = path.stat()
    except OSError:  # opening it says what is wrong
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


async def _serve(options: Options, file: BinaryIO, results: Results) -> None:
    app, handle, settings = assemble(options)
    room = 2 * settings.scheduler.max_running_requests * settings.parallel.replicas  # as many run, and wait
    lines = read_lines(file, settings.server.max_request_bytes + ENVELOPE_BYTES)
    async with app.router.lifespan_context(app):
        await handle.wait_open()
        with progress("requests") as start:
            advance = start(_count_lines(file))
            await answer_all(app, lines, results, room=room, advance=lambda: advance(""))
        await handle.close(settings.server.drain_timeout_s)


def _count_lines(file: BinaryIO) -> int | None:
    """Returns the number of line ends of a file that has not been read; None where it can be read but once."""
    if not file.seekable():
        return None
    count = sum(chunk.count(b"\n") for chunk in iter(lambda: os.read(file.fileno(), COUNTED_BYTES), b""))
    file.seek(0)
    return count


async def answer_all(
    app: Starlette,
    lines: Iterable[tuple[int, bytes | None]],
    results: Results,
    *,
    room: int,
    advance: Callable[[], None] = lambda: None,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Sends the request of each line to the application, and writes the replies as they come.

    Args:
        app: The application, which runs.
        lines: As ``read_lines`` yields them.
        results: Takes replies and errors.
        room: Requests at once.
        advance: Called after each line.
        sleep: Waits before a request is sent again that found no room.

    Raises:
        ResourceError: As ``Results.add_reply``.
        UnavailableError: There is no engine any more.
    """
    transport = httpx.ASGITransport(_logged(app), raise_app_exceptions=False)
    window = _Window(room)

    async def answer(request: BatchRequest, number: int) -> None:
        for attempt in range(TRIES):
            reply = await client.post(request.url, content=request.body, headers={"content-type": "application/json"})
            if reply.status_code not in BUSY:
                break
            if attempt < TRIES - 1:
                await sleep(float(reply.headers["retry-after"]))
            elif (refusal := msgspec.json.decode(reply.content, type=Error).error).code == UnavailableError.code:
                raise UnavailableError(f"line {number}: {refusal.message} The same command continues the batch.")
        results.add_reply(request.custom_id, reply.status_code, reply.headers["x-request-id"], reply.content)
        window.leave(len(request.body))
        advance()

    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://batch") as client,
            asyncio.TaskGroup() as group,
        ):
            for number, line in lines:
                await asyncio.sleep(0)  # Ctrl-C is heard while lines are skipped
                custom_id, request = read_request(line)
                if custom_id is not None and not results.is_new(custom_id):
                    request = RequestError("custom_id is that of an earlier line.", param="custom_id")
                elif custom_id is not None and results.has(custom_id):
                    advance()
                    continue
                if isinstance(request, RequestError):
                    results.add_fault(custom_id, number, request)
                    advance()
                    continue
                await window.enter(len(request.body))
                group.create_task(answer(request, number))
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


class _Window:
    """Bounds the requests that are answered at once, and the bytes of their bodies."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._num_requests = 0
        self._num_bytes = 0
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Returns when there is room; a body alone may be of any size."""
        while self._num_requests >= self._room or (self._num_requests and self._num_bytes + num_bytes > MAX_BYTES):
            self._left.clear()
            await self._left.wait()
        self._num_requests += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Makes room."""
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._left.set()


def _logged(app: ASGIApp) -> ASGIApp:
    """Returns an application that logs errors of its own, which its clients do not see."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            logger.exception("a request failed")
            raise

    return logged
