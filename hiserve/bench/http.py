"""A small HTTP/1.1 client for load generation: it notes when bytes arrive and costs little per chunk.

It connects straight to the server: proxies are ignored, redirects are not followed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from hiserve.errors import ConfigError, UnavailableError

# Called with the status, a part of the body and the time it arrived.
Receive = Callable[[int, bytes, float], None]

# Servers close idle connections after some seconds; one this old may be closing while it is written to.
MAX_IDLE_S = 2.0
# Bytes of a slow reader's window; the kernel doubles it.
SMALL_WINDOW = 4096


class Pool:
    """Connections to one server, kept alive between requests. Raises ConfigError where the URL is malformed.

    With ``bytes_per_s`` responses are read no faster, through a small window, so that the server notices.
    """

    def __init__(self, url: str, api_key: str | None = None, *, bytes_per_s: float | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; give one like http://127.0.0.1:8000.", param="url")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        credentials = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        host = parts.netloc.rpartition("@")[2]
        self._headers = f"host: {host}\r\naccept: */*\r\ncontent-type: application/json\r\n{credentials}"
        self._bytes_per_s = bytes_per_s
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, receive: Receive) -> int:
        """Sends JSON; returns the status at the end. ``receive`` gets every part as it arrives. Raises OSError."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        connection = self._fresh_idle() or await self._connect()
        with ExitStack() as undo:
            undo.callback(connection.close)
            status = await connection.exchange(head.encode() + body, receive)
            undo.pop_all()
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Sends one request that is not measured; returns its status and JSON (None when it is none).

        Raises UnavailableError.
        """
        status, found = await self.read(method, path, body)
        with suppress(msgspec.DecodeError):
            return status, msgspec.json.decode(found)
        return status, None

    async def read(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Sends one request that is not measured; returns its status and body. Raises UnavailableError."""
        parts: list[bytes] = []
        raw = b"" if body is None else msgspec.json.encode(body)
        try:
            status = await self.request(method, path, raw, lambda _, part, __: parts.append(part))
        except OSError as error:
            raise UnavailableError(
                f"cannot reach the server at {self._host} port {self._port}: {error}. Start it, or give its --url."
            ) from None
        return status, b"".join(parts)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _fresh_idle(self) -> _Connection | None:
        """Takes the connection that was used last; drops the ones that are too old."""
        oldest = time.perf_counter() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.used_s >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        pace = partial(_Connection, self._bytes_per_s)
        _, connection = await loop.create_connection(pace, self._host, self._port, ssl=self._ssl)
        return connection


class _Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time.

    Attributes:
        is_open: Another exchange may follow.
        used_s: When the last byte arrived.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self.is_open = False
        self.used_s = time.perf_counter()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._receive: Receive | None = None
        self._parser: Any = None
        self._status = 0
        self._is_framed = False

    async def exchange(self, request: bytes, receive: Receive) -> int:
        assert self._transport is not None and self._done is None, "one exchange at a time"
        self._receive = receive
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._is_framed = 0, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = self._receive = None

    def close(self) -> None:
        """Closes at once; what is in flight is lost."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.is_open = True
        if self._bytes_per_s is not None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW)

    def data_received(self, data: bytes) -> None:
        self.used_s = time.perf_counter()
        if self._bytes_per_s is not None and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(len(data) / self._bytes_per_s, self._read_on)
        if self._done is None:  # bytes without a request
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # our own fault, not the server's
            self._end(error)
            self.close()
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"the response is not HTTP: {error}"))
            self.close()

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the exchange: well if the response lasts until the connection closes, else badly."""
        self.is_open = False
        if self._status and not self._is_framed and error is None:
            self._end(None)
        else:
            self._end(ConnectionResetError("the connection was closed before the response had ended"))

    # Callbacks of the parser.

    def on_header(self, name: bytes, _: bytes) -> None:
        self._is_framed = self._is_framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self.is_open = self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        if self._receive is not None:
            self._receive(self._status, part, self.used_s)

    def on_message_complete(self) -> None:
        """Ends the exchange; interim responses (1xx) are none."""
        if self._status >= 200:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(self._status)
        else:
            self._done.set_exception(error)
