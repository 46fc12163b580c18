"""Others who find a private socket, or send nonsense to a public one: nobody hears them, nobody is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from hiserve.core.endpoints import new_endpoint, path_of, remove
from hiserve.engine.kv_event_sender import Publisher
from hiserve.ipc import child as child_module
from hiserve.ipc.channel import Link, PublishChannel
from hiserve.ipc.child import ChildProcess
from hiserve.ipc.codec import Frames
from hiserve.ipc.kv_events import Removed
from tests.helpers.kv_mirror import Reader
from tests.helpers.processes import wait_dead
from tests.helpers.waiting import PATIENCE_S, until

SEED = 11
NOBODY = 65_534
GREETING = bytes([0xFF, *8 * [0], 0x7F, 3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PAIR"
RAW = {
    "nothing": b"",
    "text": b"hello, this is no handshake of anything\r\n" * 8,
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "old": b"\x01\x00" + 40 * b"\x08\x00garbage",  # what zmq takes for a peer of its first version
    "greeting": GREETING,
    "peer": GREETING + READY + 20 * b"\x00\x07garbage",
    "huge": GREETING + READY + b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff",
}
ECHO = """
import os, signal, sys, time
from hiserve.ipc.child import connect_to_parent
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
link, frames = connect_to_parent(sys.argv[2], signal.SIGKILL)
while frames != [b"end"]:
    link.try_send([b"echo", *frames])
    while (frames := link.try_receive()) is None:
        link.wait()
link.try_send([b"last words"])
link.close(linger_ms=1000)
"""

# A child that says so when it waits for its parent's socket, and would wait for longer than a test lasts.
WAITS = """
import sys
from hiserve.ipc import child
def wait(endpoint, timeout_s, goes_on):
    print("waits", flush=True)
    found(endpoint, 3600, goes_on)
found, child.wait_for_listener = child.wait_for_listener, wait
child.connect_to_parent(sys.argv[1], 9)
"""

# A child that says so whenever it tries to connect, and says its parent's first word.
TRIES = """
import sys
from hiserve.ipc import child
def connect(endpoint):
    print("tries", flush=True)
    return found(endpoint)
found, child.Link.connect = child.Link.connect, staticmethod(connect)
print(child.connect_to_parent(sys.argv[1], 9)[1][0].decode(), flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "an endpoint was left behind"


class Strangers:
    """Whoever is not the child, at its socket, again and again, from ``with`` to the end of it."""

    def __init__(self, folder: Path) -> None:
        print(f"seed {SEED}")
        self._folder = folder
        self._draw = random.Random(SEED)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_visits = 0

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._is_over.is_set():
                for path in self._folder.glob("*/*"):
                    self._visit(path, context)
                time.sleep(0.005)

    def _visit(self, path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        noise = self._draw.choice([*RAW.values(), self._draw.randbytes(500)])
        say_raw(f"ipc://{path}", noise)
        with context.socket(self._draw.choice([zmq.PAIR, zmq.DEALER, zmq.PUSH, zmq.PUB])) as peer:
            peer.linger = 0
            peer.connect(f"ipc://{path}")
            peer.poll(5, zmq.POLLOUT)
            with contextlib.suppress(zmq.Again):
                peer.send_multipart([b"garbage", b"\xc1"], zmq.NOBLOCK)
        self.num_visits += 1


async def test_strangers_at_the_socket_of_a_child_are_not_heard_and_do_not_keep_it_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "DRAIN_S", PATIENCE_S)
    heard: list[Frames] = []
    may_come = folder.with_name(f"{folder.name}.may_come")
    with Strangers(folder) as strangers:
        child = await ChildProcess.start([sys.executable, "-c", ECHO, str(may_come)], heard.extend)
        await until(lambda: strangers.num_visits >= 5)
        may_come.touch()  # the child comes, and waits: the socket is there until it has heard something
        before = strangers.num_visits
        await until(lambda: strangers.num_visits >= before + 20)
        assert not child._gone.is_set(), "a stranger's leave was taken for the child's"
        for number in range(20):
            child.send([str(number).encode()])
            await asyncio.sleep(0.01)
        child.send([b"end"])
        assert await child.wait() == "exit code 0"
    assert heard == [*([b"echo", str(number).encode()] for number in range(20)), [b"last words"]]


def test_a_child_connects_although_strangers_fill_the_queue_of_connections() -> None:
    endpoint = new_endpoint()
    command = [sys.executable, "-c", TRIES, endpoint]
    with contextlib.ExitStack() as crowd, subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        full = crowd.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(str(path_of(endpoint).with_name("b")))
        full.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger = crowd.enter_context(socket.socket(socket.AF_UNIX))
                stranger.setblocking(False)
                stranger.connect(full.getsockname())
        path_of(endpoint).with_name("b").rename(path_of(endpoint))
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == [b"tries\n"] * 2
        link = Link.bind(endpoint, child.pid)  # which takes the place of the full one
        while not link.try_send([b"welcome"]):
            link.wait(until_writable=True)
        assert child.stdout.read().splitlines()[-1] == b"welcome"
        link.close()
    assert child.returncode == 0


@pytest.mark.parametrize("noise", RAW)
def test_a_stranger_is_hung_up_on_whatever_he_says(noise: str) -> None:
    link = Link.bind(peer_pid=os.getppid())
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE_S)
        raw.connect(str(path_of(link.endpoint)))
        try:
            raw.sendall(RAW[noise])
            assert raw.recv(64) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass
    time.sleep(0.02)
    assert not link.is_gone
    assert link.try_receive() is None
    link.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_does_not_reach_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # where others get as far as our directory
    link = Link.bind()
    if not (pid := os.fork()):
        os.setuid(NOBODY)
        try:
            socket.socket(socket.AF_UNIX).connect(str(path_of(link.endpoint)))
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    link.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_nonsense_at_the_public_sockets_disturbs_no_reader(transport: str, folder: Path) -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    events, replays = addresses(transport, folder)
    publisher = Publisher(
        PublishChannel(events, replays, setting="kv_events", questions_setting="kv_events_replay"),
        page_size=2,
        replica=0,
        heartbeat_s=60.0,
    )
    for number in range(3):
        publisher.put([Removed("GPU", number.to_bytes(16, "big"))])
    with zmq.Context() as context:
        for address, kinds in ((events, (zmq.SUB, zmq.XSUB)), (replays, (zmq.DEALER, zmq.REQ))):
            for noise in (*RAW.values(), *(draw.randbytes(300) for _ in range(10))):
                say_raw(address, noise)
            for kind in kinds:
                for _ in range(20):
                    with context.socket(kind) as peer:
                        peer.linger = 100
                        peer.connect(address)
                        parts = [draw.randbytes(draw.choice([0, 1, 8, 900, 5000])) for _ in range(draw.randint(1, 8))]
                        if kind == zmq.SUB:
                            peer.setsockopt(zmq.SUBSCRIBE, parts[0])
                        else:
                            peer.send_multipart(parts)
                        peer.poll(2)
    reader = Reader(events, replays)
    assert [number for number, _ in reader.replay(0)] == [0, 1, 2]
    reader.close()
    publisher.close()


def test_a_question_of_many_frames_is_not_sent_back_with_every_batch(folder: Path) -> None:
    events, replays = addresses("ipc", folder)
    publisher = Publisher(
        PublishChannel(events, replays, setting="kv_events", questions_setting="kv_events_replay"),
        page_size=2,
        replica=0,
    )
    for number in range(50):
        publisher.put([Removed("GPU", number.to_bytes(16, "big"))])
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(replays)
        peer.send_multipart([*(20 * [bytes(1000)]), bytes(8)])
        assert not peer.poll(200)
        peer.send_multipart([b"", bytes(8)])
        assert peer.poll(1000 * PATIENCE_S)
    publisher.close()


def addresses(transport: str, folder: Path) -> tuple[str, str]:
    if transport == "ipc":
        return f"ipc://{folder}/events", f"ipc://{folder}/replays"
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}", f"tcp://127.0.0.1:{other.getsockname()[1]}"


def say_raw(address: str, noise: bytes) -> None:
    """Sends bytes to a socket of zmq as somebody who does not speak its protocol."""
    with contextlib.suppress(OSError):
        if address.startswith("ipc"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(address.removeprefix("ipc://"))
                raw.sendall(noise)
        else:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(noise)


def test_a_child_whose_parent_never_listens_ends(folder: Path) -> None:
    """As when the parent was killed between the start of its child and the opening of its socket."""
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    endpoint = f"ipc://{tempfile.mkdtemp()}/s"
    command = [sys.executable, "-c", code, sys.executable, "-c", WAITS, endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"waits\n"
        parent.send_signal(signal.SIGKILL)
    wait_dead([pid])
    remove(endpoint)
