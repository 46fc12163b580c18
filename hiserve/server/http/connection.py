"""A client's connection: bounds on size and duration of a request, and errors in the format of all others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from hiserve.server.http.errors import error_response

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 300.0
# After a refusal the rest of the request is read and dropped for this time: closing at once would reset the
# connection, and the client would lose the response.
LINGER_S = 2.0


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, safe against hostile and broken clients.

    Bytes that bring neither a request's head to its end nor its body forward (an endless header, chunk extensions,
    trailers) are counted and end the connection, as does a request that does not arrive in time. A client that
    does not read its reply is ended by the kernel (see ``commands.serve.bind``).

    An offer of another protocol (some clients send ``Upgrade: h2c``) is ignored, as RFC 9110, 7.8 allows; uvicorn
    would lose the request's body.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_idle_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first request."""
        super().connection_made(transport)
        self._start_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and ends all requests."""
        self._stop_timer()
        self._end_cycles()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the data, unless the request was refused."""
        self._num_idle_bytes += len(data)
        self._unset_keepalive_if_required()
        while data and not self._is_refused:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse_bytes()
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the old one may be at its end
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self._refuse_bytes()
        if self._num_idle_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._is_in_head = True
        self._start_timer(HEAD_TIMEOUT_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header; ignores trailers, which come after the body."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the application for the request, if its head is within the limit."""
        self._num_idle_bytes = 0
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        if self._is_refused or self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self.cycle.transport = _ReplyTransport(self.transport, self._close)  # type: ignore[assignment]
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        self._is_in_head = False
        self._start_timer(BODY_TIMEOUT_S)

    def on_body(self, body: bytes) -> None:
        """Adds a part of the body."""
        self._num_idle_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        self._num_idle_bytes = 0
        self._stop_timer()
        if not self._is_refused and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Starts the next request, unless this one was refused."""
        if not self._is_refused:
            super().on_response_complete()

    def _head_without_offer(self) -> bytes:
        """Returns the last head without the header ``upgrade``."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def _end_cycles(self) -> None:
        """Marks all requests as disconnected; uvicorn marks only the last one."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()

    def _refuse_bytes(self) -> None:
        self._refuse(error_response(400, "this is not a valid HTTP request.", code="invalid_http"))

    def _refuse_head(self) -> None:
        message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes. Send shorter headers."
        self._refuse(error_response(431, message, code="headers_too_large"))

    def _on_late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # the server delays the request, not the client
            self._start_timer(BODY_TIMEOUT_S)
        else:
            self._refuse(error_response(408, "the request did not arrive in time.", code="request_timeout"))

    def _refuse(self, response: Response) -> None:
        """Ends the connection, with this response if no other one has begun. Only the first refusal has an effect."""
        if self._is_refused or self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if self.pipeline or not (self._is_in_head if is_idle else not self.cycle.response_started):
            self._is_refused = True
            self.transport.close()
            return
        self._end_cycles()
        headers = [*response.raw_headers, (b"x-request-id", secrets.token_hex(16).encode())]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        body = bytes(response.body)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"connection: close\r\n\r\n" + body)
        self._linger()

    def _close(self) -> None:
        """Closes the connection after a reply; later if the request has not ended, so that the client can read the reply."""
        if self.cycle.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._is_refused = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _ReplyTransport:
    """The transport that a reply writes to; ``close`` is the connection's."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
