"""Private sockets between a parent and its child process, and public ones for events; the only module that uses zmq.

A link is one PAIR socket over ``ipc://`` in its own 0700 directory. The parent starts the child and accepts
only this process, by the process id that the kernel reports; the child connects, and removes the directory once
the first message proved the connection, so that no socket file leaks and no other process can connect later. Until
then other processes of the same user can reach the socket: their connections are closed.
A link never reconnects: messages queued for a dead peer never reach a successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from hiserve.config.flags import flag_of
from hiserve.core.endpoints import SCHEME, new_endpoint, path_of, remove, require_free
from hiserve.errors import ResourceError
from hiserve.ipc.codec import Frames

HIGH_WATER_MARK = 256
MAX_BATCH = 64
MAX_UNREAD_EVENTS = 10_000  # messages queued for a subscriber; it loses further ones
MAX_UNREAD_ANSWERS = 16_384
MAX_QUESTION_BYTES = 1024
EVENTS_LINGER_MS = 200


class PeerGoneError(Exception):
    """The process at the other end closed the link or died; all messages that arrived from it were received.

    A peer's last messages may be lost if it died while more than the high-water mark were queued.
    """


class Link:
    """One end of a connection to one peer. Only ``wait`` blocks.

    It owns a zmq context, so that closing the link ends its threads.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # Drops messages queued for a dead peer at once. By default zmq keeps them for ever, and ``close`` blocks:
        # the linger that ``close`` sets does not apply to a connection that has ended.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._is_gone = False

    @classmethod
    def bind(cls, endpoint: str | None = None, peer_pid: int | None = None) -> Link:
        """Opens the parent's end.

        Args:
            endpoint: Made by ``new_endpoint``; None makes one.
            peer_pid: The only process that may connect; the kernel checks it.

        Raises:
            ResourceError: The directory for temporary files cannot be used, or no socket is left.
        """
        endpoint = endpoint or new_endpoint()
        path = path_of(endpoint)
        bound = path.with_name("b")
        try:
            link = cls(endpoint)
        except zmq.ZMQError as error:
            raise ResourceError(f"No socket can be opened: {error}. Raise the limit of open files.") from error
        try:
            if peer_pid is not None:
                link._socket.setsockopt(zmq.IPC_FILTER_PID, peer_pid)
            link._socket.bind(f"{SCHEME}{bound}")
        except zmq.ZMQError as error:
            link.close()
            raise ResourceError(
                f"No socket can be opened in {path.parent}: {error}. Point TMPDIR elsewhere."
            ) from error
        bound.rename(path)  # the path exists only once the socket listens
        return link

    @classmethod
    def connect(cls, endpoint: str) -> Link:
        """Opens the child's end."""
        link = cls(endpoint)
        link._socket.connect(endpoint)
        return link

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of the socket and of its monitor; readable when the state may have changed."""
        return int(self._socket.FD), int(self._monitor.FD)

    @property
    def is_gone(self) -> bool:
        """Whether the peer was connected and is not any more, or could not be reached."""
        self._is_gone = self._is_gone or bool(self._monitor.poll(0))
        return self._is_gone

    @property
    def is_writable(self) -> bool:
        """Whether the next ``try_send`` will succeed."""
        return bool(self._events & zmq.POLLOUT)

    @property
    def is_ready(self) -> tuple[bool, bool]:
        """Whether the next ``try_receive`` returns a message, and whether the next ``try_send`` will succeed."""
        events = self._events
        return bool(events & zmq.POLLIN), bool(events & zmq.POLLOUT)

    @property
    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def try_send(self, frames: Frames) -> bool:
        """Sends a message; False when the peer is slow, not yet connected, or gone."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def try_receive(self) -> Frames | None:
        """Returns the next message, or None."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, *, until_writable: bool = False, timeout_s: float | None = None) -> None:
        """Blocks until a message arrives, the peer is gone, the socket is writable (if requested), or the timeout."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if until_writable else 0))
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))

    def remove_endpoint(self) -> None:
        """Removes the directory of the endpoint; an existing connection stays."""
        remove(self.endpoint)

    def connect_again(self) -> Link:
        """Closes a child's end that could not connect, and returns another; the endpoint stays."""
        self._close()
        return self.connect(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Closes, and removes the endpoint; sent messages get ``linger_ms`` milliseconds for delivery."""
        if not self._socket.closed:
            self._close(linger_ms)
            self.remove_endpoint()

    def _close(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()


class PollingChannel:
    """A link for a loop that waits by itself: a worker's or a helper's."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def is_writable(self) -> bool:
        """Whether the next ``try_send`` will succeed."""
        return self._link.is_writable

    def receive(self, *, is_idle: bool, until_writable: bool = False, timeout_s: float | None = None) -> list[Frames]:
        """Returns up to ``MAX_BATCH`` messages.

        Args:
            is_idle: Block until an event.
            until_writable: While blocked, also return once the link is writable.
            timeout_s: While blocked, return after this time; None is no limit.

        Raises:
            PeerGoneError: The peer is gone and all messages from it were returned before.
        """
        if is_idle:
            self._link.wait(until_writable=until_writable, timeout_s=timeout_s)
        is_gone = self._link.is_gone
        batch: list[Frames] = []
        while len(batch) < MAX_BATCH and (frames := self._link.try_receive()) is not None:
            batch.append(frames)
        if is_gone and not batch:
            raise PeerGoneError("the process at the other end is gone")
        return batch

    def try_send(self, frames: Frames) -> bool:
        return self._link.try_send(frames)


def _ignore() -> None:
    """The default callback."""


class AsyncChannel:
    """A link served by the running event loop.

    Args:
        link: The channel closes it.
        on_messages: Called with up to ``MAX_BATCH`` messages at a time.
        on_writable: Called when the link is writable again after ``try_send`` returned False.
        on_gone: Called once, when the peer is gone and all messages from it were delivered.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_messages: Callable[[list[Frames]], None],
        on_writable: Callable[[], None] = _ignore,
        on_gone: Callable[[], None] = _ignore,
    ) -> None:
        self._link = link
        self._on_messages = on_messages
        self._on_writable = on_writable
        self._on_gone = on_gone
        self._backlog: deque[Frames] = deque()
        self._is_full = False
        self._is_woken = False
        self._is_closed = False
        self._is_gone = False
        self._loop = asyncio.get_running_loop()
        for fd in link.fds:
            self._loop.add_reader(fd, self._pump)
        self._wake()

    def send(self, frames: Frames) -> None:
        """Sends now or, while the peer is slow, later and in order. For messages of bounded number."""
        if not self.try_send(frames):
            self._backlog.append(frames)

    def try_send(self, frames: Frames) -> bool:
        """Sends now or returns False, so that the caller can merge messages for a slow peer."""
        if self._is_closed:
            return False
        self._wake()
        if self._backlog or not self._link.try_send(frames):
            self._is_full = True
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stops serving; sent messages get ``linger_ms`` milliseconds for delivery."""
        if self._is_closed:
            return
        self._is_closed = True
        for fd in self._link.fds:
            self._loop.remove_reader(fd)
        self._link.close(linger_ms)

    def _wake(self) -> None:
        # The descriptor is edge-triggered, and any call on the socket may consume the edge: after each call the state
        # is checked again.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_woken = False
        if not self._is_closed:
            self._deliver()
        if not self._is_closed and self._is_full and self._link.is_writable:
            self._flush()
        if not self._is_closed and self._has_more():
            self._wake()

    def _deliver(self) -> None:
        was_gone = self._link.is_gone  # read first: all that the peer sent before has arrived by now
        batch: list[Frames] = []
        while len(batch) < MAX_BATCH and (frames := self._link.try_receive()) is not None:
            batch.append(frames)
        if batch:
            self._on_messages(batch)
        elif was_gone and not self._is_gone:
            self._is_gone = True
            self._on_gone()

    def _has_more(self) -> bool:
        is_newly_gone = self._link.is_gone and not self._is_gone
        # One call, and the last on the socket: a second one would consume the edge of a message that came between them.
        is_readable, is_writable = self._link.is_ready
        return is_newly_gone or is_readable or (self._is_full and is_writable)

    def _flush(self) -> None:
        while self._backlog and self._link.try_send(self._backlog[0]):
            self._backlog.popleft()
        self._is_full = bool(self._backlog)
        if not self._is_full:
            self._on_writable()
        self._wake()


class PublishChannel:
    """Publishes messages to subscribers and answers their questions; never waits for a reader.

    A slow or dead reader loses messages. All methods except ``wake`` are for one thread at a time.

    Args:
        endpoint: Of the PUB socket, ``tcp://`` or ``ipc://``.
        questions_endpoint: Of the ROUTER socket; None for none.
        setting: Name of the setting of ``endpoint``.
        questions_setting: Name of the setting of ``questions_endpoint``.

    Raises:
        ResourceError: An address is in use or cannot be used.
    """

    def __init__(self, endpoint: str, questions_endpoint: str | None, *, setting: str, questions_setting: str) -> None:
        self._context = zmq.Context()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._paths: list[Path] = []
        self._poller = zmq.Poller()
        self._poller.register(self._waker, zmq.POLLIN)
        self._publisher = self._context.socket(zmq.PUB)
        self._questions = self._context.socket(zmq.ROUTER)
        self._publisher.set_hwm(MAX_UNREAD_EVENTS)
        self._questions.set_hwm(MAX_UNREAD_ANSWERS)
        for sock in (self._publisher, self._questions):  # subscriptions are messages, too
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        try:
            self._listen(self._publisher, endpoint, setting)
            if questions_endpoint is not None:
                self._listen(self._questions, questions_endpoint, questions_setting)
                self._poller.register(self._questions, zmq.POLLIN)
        except ResourceError:
            self.close()
            raise

    def publish(self, frames: Frames) -> None:
        """Sends a message to every connected subscriber."""
        self._publisher.send_multipart(frames)

    def take_question(self) -> Frames | None:
        """Returns the next question, its sender's address first, or None."""
        try:
            return self._questions.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def answer(self, frames: Frames) -> None:
        """Sends an answer to the address in its first frame."""
        self._questions.send_multipart(frames)

    def wait(self, timeout_s: float) -> None:
        """Blocks until a question arrives, ``wake`` is called, or the timeout."""
        self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def wake(self) -> None:
        """Ends the current or the next ``wait``; from any thread."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Closes; published messages get ``EVENTS_LINGER_MS`` for delivery."""
        self._publisher.close(linger=EVENTS_LINGER_MS)
        self._questions.close(linger=EVENTS_LINGER_MS)
        self._context.term()
        os.close(self._waker)
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _listen(self, sock: zmq.Socket[bytes], endpoint: str, setting: str) -> None:
        path = Path(endpoint.removeprefix(SCHEME)) if endpoint.startswith(SCHEME) else None
        sock.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            if path is not None:
                require_free(path)
            sock.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            raise ResourceError(
                f"{flag_of(setting)} cannot use {endpoint}: {zmq.strerror(error.errno or 0)}. Stop the program that "
                "uses it, if any, or choose another.",
                param=setting,
            ) from None
        self._paths += [] if path is None else [path]
