"""A child process: the parent starts it, exchanges messages with it and ends it; the child connects and dies with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hiserve.config.settings import Settings
from hiserve.core.endpoints import new_endpoint, path_of, remove, wait_for_listener
from hiserve.errors import ResourceError
from hiserve.ipc.channel import AsyncChannel, Link, PeerGoneError, PollingChannel
from hiserve.ipc.codec import Frames

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DRAIN_S = 0.5  # to receive the last messages of an ended child


class ChildProcess:
    """A process and its only channel. Made by ``start``.

    ``gone`` is set when the child closed its end and all messages from it were delivered.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel, gone: asyncio.Event) -> None:
        self._process = process
        self._channel = channel
        self._gone = gone

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        on_messages: Callable[[list[Frames]], None],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Starts ``command ENDPOINT`` in its own session, which Ctrl-C does not reach.

        Args:
            command: Its command line; the endpoint is appended.
            on_messages: As in ``AsyncChannel``. A child sends nothing before its first message from the parent.
            pass_fds: Descriptors that the child inherits, under the same numbers; all others are closed in it.
            environment: Its environment variables; None gives it those of this process.

        Raises:
            ResourceError: The command cannot be run, or the directory for temporary files cannot be used.
        """
        gone = asyncio.Event()
        endpoint = new_endpoint()
        with contextlib.ExitStack() as undo:
            undo.callback(remove, endpoint)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    endpoint,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=pass_fds,
                    env=environment,
                )
            except OSError as error:
                raise ResourceError(
                    f"the process {' '.join(command)} cannot be started: {error}. Free memory, or raise the limits of "
                    "processes and of open files."
                ) from error
            try:
                link = Link.bind(endpoint, process.pid)
            except ResourceError:
                process.kill()
                await process.wait()
                raise
            undo.pop_all()
        return cls(process, AsyncChannel(link, on_messages=on_messages, on_gone=gone.set), gone)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, frames: Frames) -> None:
        """As ``AsyncChannel.send``."""
        self._channel.send(frames)

    async def wait(self) -> str:
        """Waits for its end and its last messages; returns how it ended."""
        returncode = await self._process.wait()
        await wait_for_event(self._gone, DRAIN_S)
        self._channel.close()
        return f"exit code {returncode}" if returncode >= 0 else f"killed by {signal.Signals(-returncode).name}"

    def kill(self) -> None:
        """Kills it; ``wait`` must still be called."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, if it lives."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class JobProcess:
    """A child process that does one job at a time. It is started with the first, and again after it has ended.

    Args:
        command: As for ``ChildProcess``.
        setup: The first message to each process.
    """

    def __init__(self, command: Sequence[str], setup: bytes) -> None:
        self._command = command
        self._setup = setup
        self._child: ChildProcess | None = None
        self._ended: asyncio.Task[str] | None = None
        self._answer: asyncio.Future[Frames] | None = None
        self._is_retired = False

    async def do(self, frames: Frames) -> Frames | None:
        """Sends one job and returns the answer; None if the process ended instead.

        Raises:
            ResourceError: As ``ChildProcess.start``.
        """
        if self._is_retired or self._ended is None or self._ended.done():
            await self.end()
            self._is_retired = False
            self._child = await ChildProcess.start(self._command, self._take)
            self._ended = asyncio.create_task(self._child.wait())
            self._child.send([self._setup])
        assert self._child is not None and self._ended is not None, "just started"
        self._answer = asyncio.get_running_loop().create_future()
        self._child.send(frames)
        await asyncio.wait((self._answer, self._ended), return_when=asyncio.FIRST_COMPLETED)
        return self._answer.result() if self._answer.done() else None

    @property
    def is_busy(self) -> bool:
        """Whether a job was sent whose answer has not come."""
        return self._answer is not None and not self._answer.done()

    def retire(self) -> None:
        """Ends the process, which is not waited for; the next job starts another."""
        self._is_retired = True
        if self._child is not None:
            self._child.kill()

    async def end(self) -> None:
        """Ends the process if it runs."""
        if self._child is not None and self._ended is not None:
            self._child.kill()
            await asyncio.wait((self._ended,))

    def _take(self, messages: list[Frames]) -> None:
        for frames in messages:
            assert self._answer is not None and self.is_busy, "an answer without a job"
            self._answer.set_result(frames)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event, at most ``timeout_s`` seconds; returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


CONNECT_S = 10.0
RETRY_S = 0.02
_PR_SET_PDEATHSIG = 1


def connect_to_parent(endpoint: str, death_signal: signal.Signals) -> tuple[Link, Frames]:
    """Connects to the parent and waits for its first message; returns the link and the frames of this message.

    Afterwards SIGINT and SIGTERM are ignored: they may reach every process of a service at
    once, and the parent decides the order of their ends.

    Args:
        endpoint: Where the parent listens; removed once connected.
        death_signal: Sent to this process by the kernel when the thread that started it ends (Linux only; elsewhere
            the end of the link is the only sign).

    Raises:
        SystemExit: The parent died before its first message, or no process listens for ``CONNECT_S``.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    parent, late_s = os.getppid(), time.monotonic() + CONNECT_S
    wait_for_listener(endpoint, CONNECT_S, lambda: os.getppid() == parent)
    link = Link.connect(endpoint)
    while (frames := link.try_receive()) is None:
        if link.is_gone:
            if os.getppid() != parent or not path_of(endpoint).exists() or time.monotonic() >= late_s:
                link.close()
                raise SystemExit(f"No parent listens at {endpoint}; this process is started by hiserve, not by hand.")
            time.sleep(RETRY_S)  # others may have filled the queue of connections, which refuses more
            link = link.connect_again()
        link.wait()
    link.remove_endpoint()
    die_with_parent(death_signal)
    return link, frames


def die_with_parent(death_signal: signal.Signals) -> None:
    """Has the kernel send a signal to this process when the thread that started it ends (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)


def bound_memory(num_bytes: int) -> None:
    """Lets this process allocate ``num_bytes`` more than it has; allocations beyond fail.

    What it has grows with the machine: threads of libraries, one a core, hold stacks and buffers.
    """
    num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def serve_jobs(link: Link, do: Callable[[Frames], Frames]) -> int:
    """Does one job after the other until the parent ends, in the process of a ``JobProcess``; returns the exit code."""
    channel = PollingChannel(link)
    try:
        while True:
            for job in channel.receive(is_idle=True):
                answer = do(job)
                while not channel.try_send(answer):
                    link.wait(until_writable=True)
    except PeerGoneError:
        link.close()
        return 0


def log_to_stderr(settings: Settings) -> None:
    """Sets up logging of a child process as the configuration asks."""
    logging.basicConfig(level=settings.server.log_level.upper(), format=LOG_FORMAT, force=True)
