"""Links are private, bounded and never block; channels lose no message and no wake-up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.errors import ResourceError
from hiserve.ipc.channel import HIGH_WATER_MARK, AsyncChannel, Link, PeerGoneError, PollingChannel
from hiserve.ipc.codec import Frames
from tests.helpers.links import is_full
from tests.helpers.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "an endpoint was left behind"


def pair() -> tuple[Link, Link]:
    parent = Link.bind()
    return parent, Link.connect(parent.endpoint)


def receive(link: Link) -> Frames:
    while (frames := link.try_receive()) is None:
        link.wait()
    return frames


def send(link: Link, frames: Frames) -> None:
    while not link.try_send(frames):
        link.wait(until_writable=True)


def test_the_endpoint_is_in_a_directory_for_its_owner_alone(folder: Path) -> None:
    link = Link.bind()
    [directory] = folder.iterdir()
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    link.close()


def test_a_connection_survives_the_removal_of_its_endpoint(folder: Path) -> None:
    parent, child = pair()
    send(parent, [b"first"])
    assert receive(child) == [b"first"]
    child.remove_endpoint()
    assert list(folder.iterdir()) == []
    send(child, [b"a", b"", b"b"])
    assert receive(parent) == [b"a", b"", b"b"]
    child.close()
    parent.close()


def test_sending_to_nobody_is_refused_at_once() -> None:
    link = Link.bind()
    assert not link.is_writable
    assert not link.try_send([b"x"])
    link.close()


def test_a_peer_that_does_not_read_is_refused_after_a_bounded_number_of_messages() -> None:
    parent, child = pair()
    num_sent = 0
    while num_sent < 10_000 and not is_full(child):
        num_sent += child.try_send([b"x" * 100_000])
    assert HIGH_WATER_MARK <= num_sent <= 4 * HIGH_WATER_MARK
    assert not child.is_writable
    for _ in range(num_sent):
        assert len(receive(parent)[0]) == 100_000
    child.wait(until_writable=True)
    assert child.try_send([b"again"])
    child.close()
    parent.close()


def test_what_the_dead_said_is_delivered_before_they_are_reported_gone() -> None:
    parent, child = pair()
    channel = PollingChannel(parent)
    for number in range(100):
        send(child, [str(number).encode()])
    child.close(linger_ms=1000)
    got: list[Frames] = []
    while len(got) < 100:
        got += channel.receive(is_idle=True)
    assert [int(frames[0]) for frames in got] == list(range(100))
    with pytest.raises(PeerGoneError):
        channel.receive(is_idle=True)
    parent.close()


def test_a_child_whose_parent_is_dead_is_told_so() -> None:
    parent = Link.bind()
    endpoint = parent.endpoint
    parent.close()
    child = Link.connect(endpoint)
    with pytest.raises(PeerGoneError, match="the process at the other end is gone"):  # whichever it was
        PollingChannel(child).receive(is_idle=True)
    child.close()


def test_messages_for_the_dead_never_reach_a_successor() -> None:
    parent, child = pair()
    for _ in range(HIGH_WATER_MARK // 2):
        send(parent, [b"for the first, which never reads"])
    child.close()
    while not parent.is_gone:
        parent.wait()
    while parent.is_writable:  # zmq drops the pipe on its own thread
        time.sleep(0.001)
    parent.try_send([b"for the dead"])
    successor = Link.connect(parent.endpoint)
    time.sleep(0.1)
    assert successor.try_receive() is None
    successor.close()
    parent.close()


@pytest.mark.parametrize("is_child", [True, False])
def test_what_waits_for_the_dead_holds_nobody_up(is_child: bool) -> None:
    """A scheduler whose client was killed has to end, however much the client had not read."""
    parent, child = pair()
    dead, left = (parent, child) if is_child else (child, parent)
    send(dead, [b"here"])
    receive(left)
    while left.try_send([b"x" * 100_000]):
        pass
    dead.close()
    while not left.is_gone:
        left.wait()
    for _ in range(20):  # zmq learns on its own thread that nobody will come back
        time.sleep(0.01)
        left.try_receive()
    closing = threading.Thread(target=left.close, args=(1000,), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_path_too_long_for_a_socket_is_one_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ResourceError, match=r"107 characters.*TMPDIR"):
        Link.bind()
    assert list(deep.iterdir()) == []
    deep.rmdir()


def test_a_missing_directory_for_temporary_files_is_one_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with pytest.raises(ResourceError, match="TMPDIR"):
        Link.bind()


class Recorder:
    def __init__(self, link: Link) -> None:
        self.messages: list[Frames] = []
        self.num_writable = 0
        self.gone = asyncio.Event()
        self.channel = AsyncChannel(
            link, on_messages=self.messages.extend, on_writable=self._writable, on_gone=self._gone
        )
        self.heard_when_gone: list[int] = []

    def _gone(self) -> None:
        self.heard_when_gone.append(len(self.messages))
        self.gone.set()

    def _writable(self) -> None:
        self.num_writable += 1

    async def until(self, num_messages: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < num_messages:
                await asyncio.sleep(0.001)


async def test_an_async_channel_sends_before_the_peer_is_there() -> None:
    link = Link.bind()
    recorder = Recorder(link)
    recorder.channel.send([b"early"])
    child = Link.connect(link.endpoint)
    assert await asyncio.to_thread(receive, child) == [b"early"]
    recorder.channel.close()
    child.close()


async def test_no_message_and_no_wake_up_is_lost_under_traffic_both_ways() -> None:
    parent, child = pair()
    left, right = Recorder(parent), Recorder(child)
    total = 8 * HIGH_WATER_MARK
    for number in range(total):
        left.channel.send([str(number).encode(), b"x" * (number % 7)])
        right.channel.send([str(number).encode()])
        if number % 97 == 0:
            await asyncio.sleep(0)
    await left.until(total)
    await right.until(total)
    assert [int(frames[0]) for frames in left.messages] == list(range(total))
    assert [int(frames[0]) for frames in right.messages] == list(range(total))
    left.channel.close()
    right.channel.close()


async def test_a_refused_sender_is_told_when_it_may_go_on() -> None:
    parent, child = pair()
    recorder = Recorder(child)
    while not recorder.channel.try_send([b"x" * 100_000]):
        await asyncio.sleep(0.001)
    num_sent = 1
    while not is_full(child):
        num_sent += recorder.channel.try_send([b"x" * 100_000])
    assert not recorder.channel.try_send([b"too much"])
    await asyncio.sleep(0)
    before = recorder.num_writable
    reader = threading.Thread(target=lambda: [receive(parent) for _ in range(num_sent)])
    reader.start()
    async with asyncio.timeout(PATIENCE_S):
        while recorder.num_writable == before:
            await asyncio.sleep(0.001)
    await asyncio.to_thread(reader.join)
    assert recorder.channel.try_send([b"more"])
    recorder.channel.close()
    parent.close()


async def test_what_waits_is_not_overtaken() -> None:
    parent, child = pair()
    recorder = Recorder(child)
    while not recorder.channel.try_send([b"x" * 100_000]):
        await asyncio.sleep(0.001)
    num_sent = 1
    while not is_full(child):
        num_sent += recorder.channel.try_send([b"x" * 100_000])
    recorder.channel.send([b"first"])
    while not child.is_writable:
        receive(parent)
        num_sent -= 1
    assert not recorder.channel.try_send([b"too early"])
    recorder.channel.send([b"second"])
    got = await asyncio.to_thread(lambda: [receive(parent) for _ in range(num_sent)])
    assert {len(frames[0]) for frames in got} == {100_000}
    assert await asyncio.to_thread(receive, parent) == [b"first"]
    assert await asyncio.to_thread(receive, parent) == [b"second"]
    recorder.channel.close()
    parent.close()


async def test_an_async_channel_reports_its_peer_gone_once_and_last() -> None:
    parent, child = pair()
    recorder = Recorder(parent)
    for number in range(200):
        send(child, [str(number).encode()])
    child.close(linger_ms=1000)
    time.sleep(0.2)  # the end is known before the first message is delivered
    async with asyncio.timeout(PATIENCE_S):
        await recorder.gone.wait()
        await asyncio.sleep(0.05)
    assert recorder.heard_when_gone == [200]
    recorder.channel.close()


class EdgeLink:
    """A link as zmq has it: an event is announced once, and the next call on its socket consumes the announcement.

    Args:
        event: ``message``, ``writable`` or ``gone``, which the socket of the monitor announces.
        moment: The call before which it happens, the first is 1.
        is_full: It takes no message before the event ``writable``.
    """

    def __init__(self, event: str, moment: int, *, is_full: bool) -> None:
        self.endpoint = ""
        self._socket, self._monitor = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self.fds = self._socket, self._monitor
        self._event, self._moment, self._is_full = event, moment, is_full
        self._num_calls = 0
        self._is_taken = False

    @property
    def has_happened(self) -> bool:
        return self._num_calls >= self._moment

    def _is_known(self, event: str, fd: int) -> bool:
        self._num_calls += 1
        if self._num_calls == self._moment:
            os.eventfd_write(self._monitor if self._event == "gone" else self._socket, 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        return self.has_happened and event == self._event

    @property
    def is_gone(self) -> bool:
        return self._is_known("gone", self._monitor)

    @property
    def is_writable(self) -> bool:
        return self._is_known("writable", self._socket) or not self._is_full

    @property
    def is_ready(self) -> tuple[bool, bool]:
        is_writable = self.is_writable
        return self.has_happened and self._event == "message" and not self._is_taken, is_writable

    def try_send(self, frames: Frames) -> bool:
        return self.is_writable

    def try_receive(self) -> Frames | None:
        if self._is_known("message", self._socket) and not self._is_taken:
            self._is_taken = True
            return [b"came meanwhile"]
        return None

    def close(self, linger_ms: int = 0) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("event", "is_full"),
    [("message", True), ("message", False), ("gone", True), ("gone", False), ("writable", True)],
)
async def test_no_event_is_missed_between_any_two_calls(event: str, is_full: bool) -> None:
    moment, has_happened = 0, True
    while has_happened:
        moment += 1
        link = EdgeLink(event, moment, is_full=is_full)
        recorder = Recorder(link)
        for number in range(20):  # turns of the event loop, which waits for nothing
            if number == 5:
                is_sent = recorder.channel.try_send([b"x"])
            await asyncio.sleep(0)
        has_happened = link.has_happened
        found = {"message": bool(recorder.messages), "writable": is_sent or recorder.num_writable > 0}
        assert (found | {"gone": recorder.gone.is_set()})[event] == has_happened, f"missed before call {moment}"
        recorder.channel.close()
    assert moment > 5


async def test_a_callback_may_close_its_channel() -> None:
    parent, child = pair()
    channel = AsyncChannel(parent, on_messages=lambda batch: channel.close())
    send(child, [b"one"])
    async with asyncio.timeout(PATIENCE_S):
        while not child.is_gone:
            await asyncio.sleep(0.001)
    channel.close()
    child.close()
