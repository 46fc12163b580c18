"""Servers that are forks of a process that has imported what they run; ``fork_server.py`` is that process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
EXECUTE = asyncio.create_subprocess_exec
# The others, helpers of the API process, are small, and restart when they have grown.
FORKED = ("hiserve.scheduler.process", "hiserve.ipc.launcher", "tests.faults.scheduler", "tests.helpers.fake_processes")


class Fork:
    """A fork that runs a command of Python; like ``subprocess.Popen``, as far as tests use it.

    Attributes:
        ends: A descriptor that can be read when the fork has ended.

    Args:
        command: ``python -c CODE ARGUMENT...`` or ``python -m MODULE ARGUMENT...``.
        stdout: A descriptor for its standard output.
        stderr: A descriptor for its standard error.
        environment: Its variables.
        is_leader: It has a session of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
        *,
        is_leader: bool = False,
    ) -> None:
        self._command = command
        self.returncode: int | None = None
        self.ends, ends = os.pipe()
        request = {
            "command": command,
            "folder": os.getcwd(),
            "environment": dict(environment),
            "is_leader": is_leader,
        }
        socket.send_fds(_server(), [json.dumps(request).encode()], [stdout, stderr, ends])
        os.close(ends)
        pid = b""
        while not pid.endswith(b" "):
            pid += (got := os.read(self.ends, 1))
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
        if self.returncode is None and select.select([self.ends], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self.ends, 16))
            os.close(self.ends)
        return self.returncode


class Child:
    """A fork as an ``asyncio.subprocess.Process``."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(fork.ends, self._end)
        self.pid, self.send_signal, self.kill = fork.pid, fork.send_signal, fork.kill

    @property
    def returncode(self) -> int | None:
        return self._fork.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._fork.wait()

    def _end(self) -> None:
        self._loop.remove_reader(self._fork.ends)
        self._fork.wait()
        self._ended.set()


async def start_child(*command: str, env: Mapping[str, str] | None, **options: Any) -> Any:
    """Stands for ``asyncio.create_subprocess_exec`` where this process starts an engine: its scheduler is a fork."""
    if command[2] not in FORKED or options["pass_fds"]:
        return await EXECUTE(*command, env=env, **options)
    return Child(Fork(command, 1, 2, os.environ if env is None else env, is_leader=options["start_new_session"]))


async def start_program(*command: str, stdout: int, stderr: IO[bytes]) -> Any:
    """Stands for ``asyncio.create_subprocess_exec`` where it runs ``env NAME=VALUE PROGRAM...``: the program is a fork."""
    _, variable, *program = command
    assert command[0] == "env" and stdout == asyncio.subprocess.PIPE, command
    name, _, value = variable.partition("=")
    read, write = os.pipe()
    child: Any = Child(Fork(program, write, stderr.fileno(), os.environ | {name: value}))
    os.close(write)
    child.stdout = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(child.stdout)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
    asyncio.create_task(child.wait()).add_done_callback(lambda _: pipe.close())
    return child


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Servers that a soak of this process starts meanwhile are forks, processes and all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start_program)
        yield


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Engines that this process starts meanwhile are forks, scheduler and workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start_child)
        yield


def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command as ``Fork`` does; returns when all processes that it started have closed their standard error.

    Args:
        command: As for ``Fork``. It prints less than a pipe holds.
        environment: Its variables.
    """
    pipes = [os.pipe() for _ in range(2)]
    try:
        fork = Fork(command, *(write for _, write in pipes), environment)
    finally:
        for _, write in pipes:
            os.close(write)
    output, errors = (os.fdopen(read) for read, _ in pipes)
    with output, errors:
        told = errors.read()
        return subprocess.CompletedProcess(command, fork.wait(), output.read(), told)


def run_here(program: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a program of Python in a fork of this process, which has imported the clients of others that it imports.

    Args:
        program: Its source. It prints less than a pipe holds.
        environment: Its variables.
    """
    pipes = [os.pipe() for _ in range(2)]
    sys.stdout.flush()
    if not (pid := os.fork()):
        code = 1
        try:
            for number, (_, write) in enumerate(pipes, start=1):
                os.dup2(write, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
            warnings.resetwarnings()
            os.environ.clear()
            os.environ.update(environment)
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
            code = 0
        except Exception:  # noqa: BLE001 - nothing may return to the test that was forked
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for _, write in pipes:
        os.close(write)
    output, errors = (os.fdopen(read) for read, _ in pipes)
    with output, errors:
        printed = output.read()
        told = errors.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return subprocess.CompletedProcess(program, code, printed, told)


def start_server() -> None:
    """Starts the process of which servers are forks, so that all forks of this one have it in common: it takes 3 s of CPU to begin."""
    _server()


@cache
def _server() -> socket.socket:
    """Starts that process. It ends with this one, and its forks, which hold the other end of the socket; each message is whole."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    starter = os.getpid()

    def end() -> None:
        if os.getpid() != starter:  # a fork: others use it
            return
        ours.shutdown(socket.SHUT_RDWR)  # whoever else has it open
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
