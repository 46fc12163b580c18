"""Runs commands of Python, each in a fork of this process, which has imported all that a server and its worker import.

    python -m tests.helpers.fork_server SOCKET

Three processes of a server take 3 s of CPU to import what they run, and 0.4 s to begin as forks. A fork does what its
command line says: the module runs as ``__main__``, with its arguments and its environment. The processes that it starts
by ``ChildProcess`` are forks too if their commands are in ``FORKED``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import hiserve.cli
import hiserve.commands.serve
import hiserve.engine.worker
import hiserve.scheduler.process  # noqa: F401
import tests.helpers.fake_engine  # noqa: F401
from tests.helpers.forks import FORKED

MAX_REQUEST_BYTES = 2**20
NUM_FILES = 3  # the standard output, the standard error, and the end of a pipe for the exit status


class Child:
    """A forked child, as ``asyncio.subprocess.Process`` is one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set_result(None)

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(command: Sequence[str]) -> int:
    """Does what ``python -c CODE ARGUMENT...`` or ``python -m MODULE ARGUMENT...`` does; returns the exit code, or less the signal."""
    _, flag, source, *arguments = command
    main = types.ModuleType("__main__")
    if flag == "-c":
        code: Any = compile(source, "<string>", "exec")
    else:
        spec = importlib.util.find_spec(source)
        assert flag == "-m" and spec is not None and spec.loader is not None, command
        code = spec.loader.get_code(source)  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.argv = [flag if flag == "-c" else source, *arguments]
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever the program raises
        ours = error.__traceback__
        traceback.print_exception(error.with_traceback(ours and ours.tb_next))
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def become(
    command: Sequence[str], files: Mapping[int, int], kept: Iterable[int], environment: Mapping[str, str] | None
) -> NoReturn:
    """Turns this process, just forked, into one that runs a command, and ends it.

    Args:
        command: As for ``run``.
        files: Descriptors by the number that they get; others are closed.
        kept: Descriptors that stay.
        environment: Its variables; None leaves them.
    """
    code = 1
    try:
        gc.freeze()  # what is not of this process is neither looked at nor closed
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, source in files.items():
            os.dup2(source, number)
        first = 3
        for number in sorted(kept):
            os.closerange(first, number)
            first = number + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        tempfile.tempdir = None
        code = run(command)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of Python: a thread that goes on is waited for
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    except Exception:  # noqa: BLE001 - nothing may return to the process that was forked
        traceback.print_exc()
    finally:
        os._exit(code)


async def start_child(
    execute: Callable[..., Awaitable[Any]],
    *command: str,
    stdin: int,
    start_new_session: bool,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> Any:
    """Stands for ``asyncio.create_subprocess_exec``, which is ``execute``, as ``ChildProcess`` calls it."""
    assert stdin == asyncio.subprocess.DEVNULL and start_new_session
    if command[2] not in FORKED:
        return await execute(*command, stdin=stdin, start_new_session=True, pass_fds=pass_fds, env=env)
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return Child(pid)
    os.setsid()
    become(command, {0: os.open(os.devnull, os.O_RDONLY)}, pass_fds, env)


def serve_one(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Runs a command in a fork, below a process that writes its number and its exit status into the last of the files."""
    *outputs, ends = files
    if pid := os.fork():
        os.closerange(3, ends)  # the socket too: where this process alone is left, nobody waits for an answer
        os.closerange(ends + 1, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(BrokenPipeError):  # who asked is gone
            os.write(ends, b"%d " % pid)
            os.write(ends, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.chdir(request["folder"])
    if request["is_leader"]:
        os.setsid()
    asyncio.create_subprocess_exec = functools.partial(start_child, asyncio.create_subprocess_exec)  # type: ignore[assignment]
    files_of = {0: os.open(os.devnull, os.O_RDONLY)} | dict(enumerate(outputs, start=1))
    become(request["command"], files_of, (), request["environment"])


def main(number: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, which the forks get too
    gc.freeze()
    with socket.socket(fileno=int(number)) as requests:
        while True:
            request, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, NUM_FILES)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not request:
                return 0
            if not os.fork():
                serve_one(json.loads(request), files)
            for each in files:
                os.close(each)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
