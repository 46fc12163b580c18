"""A connection to a server that speaks Valkey's protocol (RESP2): the few replies that a page store reads, each of a known size."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

Argument = bytes | memoryview
MAX_LINE_BYTES = 1024
MAX_NUMBER = 1 << 32  # keys of a database at most; a value has fewer bytes
_RECEIVE_BYTES = 1 << 16


class Endpoint(NamedTuple):
    """A server.

    Attributes:
        host: Its name or address.
        port: Of TCP.
        has_tls: Speak TLS, and verify the server's certificate for ``host``.
        user: Empty for the default user.
        password_file: Has its password on one line; None without one.
        ca_file: Certificates to trust in place of the system's.
        database: Number of the database.
    """

    host: str
    port: int = 6379
    has_tls: bool = False
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    database: int = 0

    @property
    def name(self) -> str:
        """Its host and port."""
        return f"{self.host}:{self.port}"


class ProtocolError(OSError):
    """The server sent what no reply to the command is; the connection is of no further use."""


class RefusedError(OSError):
    """The server refused a command: it is full, or the user may not use it."""


class Connection:
    """A connection of one thread. Each exchange ends within its time; a reply of another size than expected is not read.

    Args:
        endpoint: The server.
        timeout_s: Longest that an exchange takes, and connecting to all addresses of the host, beside the search for these; each message of TLS's
            greeting has what is left of it.
        clock: Seconds, monotonic.

    Raises:
        OSError: There is no server, it does not answer in time, or it refuses the user.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._received = bytearray()
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        self._deadline_s = clock() + timeout_s
        self._socket = self._connected(addresses)
        with ExitStack() as failed:
            failed.callback(self.close)
            self._set_time()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.has_tls:
                context = ssl.create_default_context(cafile=None if endpoint.ca_file is None else str(endpoint.ca_file))
                self._socket = context.wrap_socket(self._socket, server_hostname=endpoint.host)
            self._log_in(endpoint)
            failed.pop_all()

    def send(self, commands: Sequence[Sequence[Argument]]) -> None:
        """Begins an exchange: sends commands, whose replies are read one after the other."""
        self._deadline_s = self._clock() + self._timeout_s
        parts: list[Argument] = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for argument in command:
                size = argument.nbytes if isinstance(argument, memoryview) else len(argument)
                parts += (b"$%d\r\n" % size, argument, b"\r\n")
        small = bytearray()
        for part in parts:
            if len(part) < _RECEIVE_BYTES:
                small += part
                continue
            self._send_all(small)
            small = bytearray()
            self._send_all(part)
        self._send_all(small)

    def read_ok(self) -> None:
        """Reads ``OK``."""
        self._read_line(b"+")

    def read_number(self) -> int:
        """Reads a number."""
        return _number(self._read_line(b":"), least=0)

    def read_values(self, buffers: Sequence[memoryview]) -> bool:
        """Reads an array of as many values, each of its buffer's size; returns whether they are there.

        Raises:
            ProtocolError: A value has another size.
        """
        if _number(self._read_line(b"*")) != len(buffers):
            raise ProtocolError("an array of another length")
        sizes = []
        for buffer in buffers:
            sizes.append(_number(self._read_line(b"$")))
            if sizes[-1] >= 0:
                if sizes[-1] != buffer.nbytes:
                    raise ProtocolError(f"a value of {sizes[-1]} bytes, not of {buffer.nbytes}")
                self._read_into(buffer)
                self._read_end()
        return min(sizes) >= 0

    def read_scan(self, most: int) -> tuple[bytes, list[bytes]]:
        """Reads a cursor and up to ``most`` keys, the reply to ``SCAN``."""
        if _number(self._read_line(b"*")) != 2:
            raise ProtocolError("no reply to SCAN")
        cursor = self._read_small()
        count = _number(self._read_line(b"*"))
        if not 0 <= count <= most:
            raise ProtocolError(f"{count} keys, more than {most}")
        return cursor, [self._read_small() for _ in range(count)]

    @property
    def is_closed(self) -> bool:
        """Whether it was closed here."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Closes the connection."""
        with suppress(OSError):
            self._socket.close()

    def _connected(self, addresses: Sequence[tuple[Any, ...]]) -> socket.socket:
        """Returns a socket that is connected to the first address that answers; each gets its share of the time that is left."""
        assert addresses, "the search for addresses finds some or fails"
        failure = OSError()
        for index, (family, kind, protocol, _, address) in enumerate(addresses):
            try:
                made = socket.socket(family, kind, protocol)
                with ExitStack() as failed:
                    failed.callback(made.close)
                    made.settimeout(self._left_s() / (len(addresses) - index))
                    made.connect(address)
                    failed.pop_all()
                    return made
            except OSError as error:
                failure = error
        raise failure

    def _log_in(self, endpoint: Endpoint) -> None:
        commands: list[list[Argument]] = []
        if endpoint.password_file is not None:
            password = endpoint.password_file.read_bytes().strip()
            commands.append([b"AUTH", *([endpoint.user.encode()] if endpoint.user else []), password])
        if endpoint.database:
            commands.append([b"SELECT", b"%d" % endpoint.database])
        if commands:
            self.send(commands)
            for _ in commands:
                self.read_ok()

    def _read_line(self, kind: bytes) -> bytes:
        """Returns a line that begins with its kind, without that."""
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > MAX_LINE_BYTES:
                raise ProtocolError("a line without an end")
            self._receive()
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        if line[:1] == b"-":
            raise RefusedError(line[1:200].decode(errors="replace"))
        if line[:1] != kind:
            raise ProtocolError(f"a reply that begins with {line[:1]!r}, not {kind!r}")
        return line[1:]

    def _read_small(self) -> bytes:
        size = _number(self._read_line(b"$"))
        if not 0 <= size <= MAX_LINE_BYTES:
            raise ProtocolError(f"a key of {size} bytes")
        value = bytearray(size)
        self._read_into(memoryview(value))
        self._read_end()
        return bytes(value)

    def _read_into(self, buffer: memoryview) -> None:
        count = min(len(self._received), buffer.nbytes)
        buffer[:count] = self._received[:count]
        del self._received[:count]
        while count < buffer.nbytes:
            self._set_time()
            got = self._socket.recv_into(buffer[count:])
            if not got:
                raise ConnectionError("the server closed the connection")
            count += got

    def _read_end(self) -> None:
        while len(self._received) < 2:
            self._receive()
        if self._received[:2] != b"\r\n":
            raise ProtocolError("a value without an end")
        del self._received[:2]

    def _receive(self) -> None:
        self._set_time()
        got = self._socket.recv(_RECEIVE_BYTES)
        if not got:
            raise ConnectionError("the server closed the connection")
        self._received += got

    def _send_all(self, data: Argument | bytearray) -> None:
        rest = memoryview(data)
        while rest.nbytes:
            self._set_time()
            rest = rest[self._socket.send(rest) :]

    def _set_time(self) -> None:
        self._socket.settimeout(self._left_s())

    def _left_s(self) -> float:
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise TimeoutError(f"the server did not answer within {self._timeout_s:g} s")
        return left_s


def _number(line: bytes, least: int = -1) -> int:
    try:
        number = int(line)
    except ValueError:
        raise ProtocolError(f"{line[:20]!r} is no number") from None
    if not least <= number <= MAX_NUMBER:
        raise ProtocolError(f"{line[:20]!r} is no count, and no size")
    return number
