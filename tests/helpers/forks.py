"""Servers that are forks of a process that has imported what they run; ``fork_server.py`` is that process."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Fork:
    """A fork that runs a command of Python; like ``subprocess.Popen``, as far as tests use it.

    Args:
        command: ``python -c CODE ARGUMENT...`` or ``python -m MODULE ARGUMENT...``.
        stderr: A descriptor for its standard error.
        environment: Its variables.
    """

    def __init__(self, command: Sequence[str], stderr: int, environment: Mapping[str, str]) -> None:
        self._command = command
        self.returncode: int | None = None
        read, write = os.pipe()
        self._ends, ends = os.pipe()
        request = {"command": command, "folder": os.getcwd(), "environment": dict(environment)}
        socket.send_fds(_server(), [json.dumps(request).encode()], [write, stderr, ends])
        os.close(write)
        os.close(ends)
        self.stdout = os.fdopen(read)
        pid = b""
        while not pid.endswith(b" "):
            pid += (got := os.read(self._ends, 1))
            assert got, f"{command} was not forked"
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: It has not ended after ``timeout`` seconds.
        """
        code = self._status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._ends, 16))
            os.close(self._ends)
        return self.returncode


def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command as ``Fork`` does; returns when all processes that it started have closed their standard error.

    Args:
        command: As for ``Fork``. It prints less than a pipe holds.
        environment: Its variables.
    """
    read, write = os.pipe()
    try:
        fork = Fork(command, write, environment)
    finally:
        os.close(write)
    with os.fdopen(read) as errors, fork.stdout as output:
        told = errors.read()
        return subprocess.CompletedProcess(command, fork.wait(), output.read(), told)


@cache
def _server() -> socket.socket:
    """Starts the process of which servers are forks. It ends with this one, which holds the other end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
