"""Private sockets between a parent and its child process, and public ones for news; the only place that knows zmq.

A link is one PAIR socket over ``ipc://`` in a 0700 directory of its own. The parent starts the child and
listens for that process alone, by its id as the kernel tells it; the child connects, and removes the directory once
the first message proved the connection, so that nothing is left to leak and nobody can join later. Others of the
same user can reach the socket until then: they are hung up on, whatever they send.
A link never reconnects: what is queued for a dead peer never reaches a successor.
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
MAX_UNREAD_NEWS = 10_000  # messages that a subscriber may be behind before it loses some
MAX_UNREAD_ANSWERS = 16_384
MAX_QUESTION_BYTES = 1024
NEWS_LINGER_MS = 200


class PeerGoneError(Exception):
    """The process at the other end closed the link or died; all that arrived from it was received.

    What a peer said last may not arrive if it died while more than the high-water mark waited.
    """


class Link:
    """One end of a connection to one peer. Nothing here blocks but ``wait``.

    It owns a zmq context, so that closing the link ends its threads.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # What was queued for a peer that died is dropped at once. By default zmq keeps it for ever, and ``close`` with it:
        # the linger that ``close`` sets does not reach a connection that has ended.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._is_gone = False

    @classmethod
    def bind(cls, endpoint: str | None = None, peer_pid: int | None = None) -> Link:
        """Opens the parent's end.

        Args:
            endpoint: Made by ``new_endpoint``; None makes one.
            peer_pid: The only process that may connect; the system checks it.

        Raises:
            ResourceError: The directory for temporary files cannot be used, or no socket is left.
        """
        endpoint = endpoint or new_endpoint()
        path = path_of(endpoint)
        unheard = path.with_name("b")
        try:
            link = cls(endpoint)
        except zmq.ZMQError as error:
            raise ResourceError(f"No socket can be opened: {error}. Raise the limit of open files.") from error
        try:
            if peer_pid is not None:
                link._socket.setsockopt(zmq.IPC_FILTER_PID, peer_pid)
            link._socket.bind(f"{SCHEME}{unheard}")
        except zmq.ZMQError as error:
            link.close()
            raise ResourceError(
                f"No socket can be opened in {path.parent}: {error}. Point TMPDIR elsewhere."
            ) from error
        unheard.rename(path)  # who finds it is heard
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
        """Whether the peer was there and is not any more, or could not be reached."""
        self._is_gone = self._is_gone or bool(self._monitor.poll(0))
        return self._is_gone

    @property
    def is_writable(self) -> bool:
        """Whether the next ``try_send`` will be taken."""
        return bool(self._events & zmq.POLLOUT)

    @property
    def is_readable(self) -> bool:
        """Whether the next ``try_receive`` returns a message."""
        return bool(self._events & zmq.POLLIN)

    @property
    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def try_send(self, frames: Frames) -> bool:
        """Hands a message over; False when the peer is slow, not there yet, or gone."""
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
        """Blocks until a message came, the peer is gone, (if asked) the peer takes messages again, or time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if until_writable else 0))
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))

    def remove_endpoint(self) -> None:
        """Removes the directory of the endpoint; an existing connection stays."""
        remove(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Closes; messages that were sent get ``linger_ms`` milliseconds to leave."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()
        self.remove_endpoint()


class PollingChannel:
    """A link for a loop of its own, which must not be held up: the worker's."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def is_writable(self) -> bool:
        """Whether the peer takes another message now."""
        return self._link.is_writable

    def receive(self, *, is_idle: bool, until_writable: bool = False, timeout_s: float | None = None) -> list[Frames]:
        """Returns what has come.

        Args:
            is_idle: Nothing else to do: block until something happens.
            until_writable: While blocked, also return once the peer takes messages again.
            timeout_s: While blocked, return after so long; None waits for ever.

        Raises:
            PeerGoneError: The peer is gone and all that arrived from it was returned before.
        """
        if is_idle:
            self._link.wait(until_writable=until_writable, timeout_s=timeout_s)
        is_gone = self._link.is_gone
        batch: list[Frames] = []
        while len(batch) < MAX_BATCH and (frames := self._link.try_receive()) is not None:
            batch.append(frames)
        if is_gone and not batch:
            raise PeerGoneError("the scheduler is gone")
        return batch

    def try_send(self, frames: Frames) -> bool:
        """As ``Link.try_send``."""
        return self._link.try_send(frames)


def _ignore() -> None:
    """The default of callbacks that nobody asked for."""


class AsyncChannel:
    """A link served by the running event loop.

    Args:
        link: Its end; the channel closes it.
        on_messages: Called with up to ``MAX_BATCH`` messages at a time.
        on_writable: Called when the peer may take messages again after ``try_send`` refused one.
        on_gone: Called once, when the peer is gone and all that arrived from it was delivered.
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

    @property
    def endpoint(self) -> str:
        """Where the other end connects."""
        return self._link.endpoint

    def send(self, frames: Frames) -> None:
        """Sends now or, while the peer is slow, later and in order. For messages whose number is bounded."""
        if not self.try_send(frames):
            self._backlog.append(frames)

    def try_send(self, frames: Frames) -> bool:
        """Sends now or refuses, so that the caller can merge what the peer is too slow for."""
        if self._is_closed:
            return False
        self._wake()
        if self._backlog or not self._link.try_send(frames):
            self._is_full = True
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stops serving; messages that were sent get ``linger_ms`` milliseconds to leave."""
        if self._is_closed:
            return
        self._is_closed = True
        for fd in self._link.fds:
            self._loop.remove_reader(fd)
        self._link.close(linger_ms)

    def _wake(self) -> None:
        # The descriptor only announces changes, and any call on the socket may consume the
        # announcement: after each call somebody has to look again.
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
        was_gone = self._link.is_gone  # asked first: what it sent before is there by now
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
        return is_newly_gone or self._link.is_readable or (self._is_full and self._link.is_writable)

    def _flush(self) -> None:
        while self._backlog and self._link.try_send(self._backlog[0]):
            self._backlog.popleft()
        self._is_full = bool(self._backlog)
        if not self._is_full:
            self._on_writable()
        self._wake()


class PublishChannel:
    """Tells news to whoever subscribes, and answers questions about them; never waits for anybody.

    A socket of a slow or dead reader drops what it does not take. Everything but ``wake`` is for one thread at a time.

    Args:
        endpoint: Of the PUB socket, ``tcp://`` or ``ipc://``.
        questions_endpoint: Of the ROUTER socket; None for none.
        setting: Name of the setting that gave the first endpoint.
        questions_setting: Of the second.

    Raises:
        ResourceError: An address is in use or cannot be used.
    """

    def __init__(self, endpoint: str, questions_endpoint: str | None, *, setting: str, questions_setting: str) -> None:
        self._context = zmq.Context()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._paths: list[Path] = []
        self._poller = zmq.Poller()
        self._poller.register(self._waker, zmq.POLLIN)
        self._news = self._context.socket(zmq.PUB)
        self._questions = self._context.socket(zmq.ROUTER)
        self._news.set_hwm(MAX_UNREAD_NEWS)
        self._questions.set_hwm(MAX_UNREAD_ANSWERS)
        for sock in (self._news, self._questions):  # subscriptions are messages, too
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        try:
            self._listen(self._news, endpoint, setting)
            if questions_endpoint is not None:
                self._listen(self._questions, questions_endpoint, questions_setting)
                self._poller.register(self._questions, zmq.POLLIN)
        except ResourceError:
            self.close()
            raise

    def publish(self, frames: Frames) -> None:
        """Sends a message to every subscriber that is there."""
        self._news.send_multipart(frames)

    def take_question(self) -> Frames | None:
        """Returns the next question, its sender in front, or None."""
        try:
            return self._questions.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def answer(self, frames: Frames) -> None:
        """Sends one answer to the sender in front."""
        self._questions.send_multipart(frames)

    def wait(self, timeout_s: float) -> None:
        """Blocks until a question came, ``wake`` was called, or the time is over."""
        self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def wake(self) -> None:
        """Ends ``wait``, or the next one; from any thread."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Closes; what was told gets ``NEWS_LINGER_MS`` to leave."""
        self._news.close(linger=NEWS_LINGER_MS)
        self._questions.close(linger=NEWS_LINGER_MS)
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
